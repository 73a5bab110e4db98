"""A user's rewards or environment, in a process of its own with a time limit."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

from zerojax.errors import ConfigurationError
from zerojax.multihost import pdeathsig
from zerojax.posttrain.reward import worker
from zerojax.validation.untrusted import printable

Kind = Literal["rewards", "environment"]

_LOADING_SECONDS = 60.0
_POLL_SECONDS = 0.1  # within which the end of a process is noticed
_MAX_LINE_BYTES = 4096  # of what a function prints
_SECRET = re.compile(
    r"(^|_)(TOKENS?|(API|ACCESS)?KEYS?|SECRETS?|PASS|PASSWD|PASSWORDS?|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE
)


class LostReward(Exception):
    """A completion has no reward: the user's code raised an error, took too long, or ended its process."""


class RefusedReward(LostReward):
    """No completion can have a reward: a function takes other arguments, or returns no number."""


class RewardProcess:
    """A process that runs a user's code, started on first use and again after it hung or ended.

    "rewards" are functions ``reward(prompt: str, completion: str, **row) -> float``, which may be async; an
    "environment" is a ``zerojax.posttrain.Environment``. JAX sees no accelerator there. An error, a hang or
    an exit does not harm the run. The process gets no environment variables whose names suggest a secret,
    such as HF_TOKEN.

    On Linux the process ends with the thread that started it.

    Args:
        named: what to run, each "path/to/file.py:name".
        seconds: that an answer may take.
        variables: of the environment that it gets, whatever their names.
        kind: what ``named`` are.

    Raises:
        ConfigurationError: one of ``named`` names nothing, or the file does not exist.
    """

    def __init__(
        self, named: Sequence[str], seconds: float, variables: Sequence[str] = (), kind: Kind = "rewards"
    ) -> None:
        self.key = f"posttrain.{kind.removesuffix('s')}"
        self._arguments: list[str] = [kind]
        for one in named:
            file, _, name = one.rpartition(":")
            if not file or not name.isidentifier():
                what = "function" if kind == "rewards" else "class"
                raise ConfigurationError(f'{self.key} = "{one}": name a {what}, as "path/to/file.py:{what}"')
            if not Path(file).is_file():
                raise ConfigurationError(f"{self.key}: {file}: no such file (from {Path.cwd()})")
            self._arguments += file, name
        self._named = ", ".join(named)
        self._seconds = seconds
        self._variables = {*variables}
        self._process: subprocess.Popen[bytes] | None = None

    def load(self) -> None:
        """Start, and load the files.

        Raises:
            ConfigurationError: they do not have what is named.
        """
        try:
            self._start()
        except LostReward as error:
            raise ConfigurationError(f"{self.key}: cannot load {self._named}: {error}") from error

    def ask(self, what: str, *arguments: Any) -> dict[str, Any]:
        """The answer to a question; reward/worker.py lists both.

        The question is "score", "reset" or "step". Arguments that JSON has no type for become text.

        Raises:
            LostReward: there is none; says why.
        """
        if self._process is None:
            self._start()
        return self._ask([what, *arguments], self._seconds)

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
            self._listener.close()
            if self._connection is not None:
                self._connection.close()
            self._folder.cleanup()

    def _start(self) -> None:
        # Of this process alone: an earlier one may still have connected to its own.
        self._folder = tempfile.TemporaryDirectory(prefix="zerojax-reward-")
        self._listener, self._connection = socket.socket(socket.AF_UNIX), None
        address = f"{self._folder.name}/socket"
        try:
            self._listener.bind(address)
        except OSError as error:
            raise ConfigurationError(f"{self.key}: no socket {address}: {error}; set TMPDIR") from error
        self._listener.listen()
        program = [sys.executable, "-P", worker.__file__, address, *self._arguments]
        plain = {
            name: x for name, x in os.environ.items() if name in self._variables or not _SECRET.search(name)
        }
        self._process = subprocess.Popen(
            [sys.executable, pdeathsig.__file__, *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=plain | {"JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )
        # Not waited for: a child of the process may hold the pipe open.
        threading.Thread(target=_show, args=(self._process.stderr,), daemon=True).start()
        try:
            self._ask(None, _LOADING_SECONDS)
        except LostReward:
            self.close()  # it has loaded nothing, and the next start may do better
            raise

    def _ask(self, question: Any, seconds: float) -> dict[str, Any]:
        """Send a question, unless it is None, and read the answer; ends the process if there is none."""
        deadline = time.monotonic() + seconds
        try:
            if question is not None:
                assert self._connection is not None
                self._connection.settimeout(seconds)
                with self._connection:
                    self._connection.sendall(json.dumps(question, default=str).encode() + b"\n")
            self._connection = self._accept(deadline)
            answer = json.loads(_read_line(self._connection, deadline))
        except TimeoutError:
            self.close()
            limit = "to load it" if question is None else "(posttrain.reward_seconds)"
            raise LostReward(f"no answer for {seconds:g} s {limit}") from None
        except (OSError, EOFError, ValueError):
            self.close()
            raise LostReward("its process has ended") from None
        if "error" in answer:
            kind = RefusedReward if answer.get("refused") else LostReward
            raise kind(printable(answer["error"]))
        return answer

    def _accept(self, deadline: float) -> socket.socket:
        """The connection by which the process answers.

        Raises:
            TimeoutError: there is none by the deadline.
            EOFError: the process has ended.
        """
        assert self._process is not None
        while True:
            left = deadline - time.monotonic()
            self._listener.settimeout(min(max(left, 1e-3), _POLL_SECONDS))
            try:
                return self._listener.accept()[0]
            except TimeoutError:
                if self._process.poll() is not None:
                    raise EOFError from None
                if left <= 0:
                    raise


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        if not (more := connection.recv(1 << 16)):
            raise EOFError
        line += more
    return line


def _show(printed: IO[bytes]) -> None:
    """Print what a process prints, without control characters."""
    with printed:
        while line := printed.readline(_MAX_LINE_BYTES):
            print(printable(line.decode(errors="replace").rstrip("\r\n")), file=sys.stderr, flush=True)
