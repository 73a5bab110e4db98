"""A reward by a user's function, in a process of its own with a time limit."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.multihost import pdeathsig
from zerojax.posttrain import reward_worker

_LOADING_SECONDS = 60.0


class LostReward(Exception):
    """A completion has no reward: the function raised an error, took too long, or ended its process."""


class RewardProcess:
    """A process that scores completions, started on first use and again after it hung or ended.

    The function is ``reward(prompt: str, completion: str, **row) -> float``. JAX sees no accelerator there.
    An error, a hang or an exit of the function does not harm the run.

    On Linux the process ends with the thread that started it.

    Args:
        function: "path/to/file.py:function".
        seconds: that a reward may take.

    Raises:
        ConfigurationError: ``function`` names no function, or the file does not exist.
    """

    def __init__(self, function: str, seconds: float) -> None:
        file, _, name = function.rpartition(":")
        if not file or not name.isidentifier():
            raise ConfigurationError(
                f'posttrain.reward = "{function}": name a function, as "path/to/file.py:function"'
            )
        if not Path(file).is_file():
            raise ConfigurationError(f"posttrain.reward: {file}: no such file (from {Path.cwd()})")
        self._function = file, name
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def load(self) -> None:
        """Start, and load the function.

        Raises:
            ConfigurationError: there is no such function.
        """
        try:
            self._start()
        except LostReward as error:
            where = ":".join(self._function)
            raise ConfigurationError(f"posttrain.reward: cannot load {where}: {error}") from error

    def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """The reward of a completion.

        Args:
            prompt: as text.
            completion: likewise.
            row: further arguments of the function, by name; values that JSON has no type for become text.

        Raises:
            LostReward: there is none; says why.
        """
        if self._process is None:
            self._start()
        return self._ask([prompt, completion, dict(row)], self._seconds)["reward"]

    def kill(self) -> None:
        """Kill the process and those that it started; another thread that waits for a reward loses it."""
        if (process := self._process) is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and those that it started."""
        self.kill()
        if (process := self._process) is not None:
            self._process = None
            process.wait()
            for pipe in (process.stdin, process.stdout):  # not to their end: a child may hold them open
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()

    def _start(self) -> None:
        worker = [sys.executable, "-P", reward_worker.__file__, *self._function]
        self._process = subprocess.Popen(
            [sys.executable, pdeathsig.__file__, *worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )
        try:
            self._ask(None, _LOADING_SECONDS)
        except LostReward:
            self.close()  # it has no function, and the next start may do better
            raise

    def _ask(self, question: Any, seconds: float) -> dict[str, Any]:
        """Send a question, unless it is None, and read the answer; ends the process if there is none."""
        assert self._process is not None
        try:
            if question is not None:
                assert self._process.stdin is not None
                self._process.stdin.write(json.dumps(question, default=str).encode() + b"\n")
                self._process.stdin.flush()
            line = self._read_line(time.monotonic() + seconds)
        except TimeoutError:
            self.close()
            limit = "to load it" if question is None else "(posttrain.reward_seconds)"
            raise LostReward(f"no answer for {seconds:g} s {limit}") from None
        except (OSError, EOFError):
            self.close()
            raise LostReward("its process has ended") from None
        answer = json.loads(line)
        if "error" in answer:
            raise LostReward(answer["error"])
        return answer

    def _read_line(self, deadline: float) -> bytes:
        """The next line of the process.

        Raises:
            TimeoutError: it has not come by the deadline.
            EOFError: the process has ended.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        pipe, line = self._process.stdout.fileno(), b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            if not (more := os.read(pipe, 1 << 16)):
                raise EOFError
            line += more
        return line
