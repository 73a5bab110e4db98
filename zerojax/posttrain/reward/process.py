"""A separate process with a time limit for a user's rewards or environment."""

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
from zerojax.posttrain.reward import worker
from zerojax.validation.untrusted import printable, short

Kind = Literal["rewards", "environment"]

_LOADING_SECONDS = 60.0
_POLL_SECONDS = 0.1  # the time to notice the end of a process
_MAX_LINE_BYTES = 4096  # of a line that a function prints
_MAX_RESPONSE_BYTES = 1 << 24  # of a state with an observation
_RESPONSES = {
    "load": set[str](),
    "score": {"rewards"},
    "reset": {"state"},
    "step": {"state", "observation", "reward"},
}
"""Question -> the keys of its response."""
_SECRET = re.compile(
    r"(^|_)(TOKENS?|(API|ACCESS)?KEYS?|SECRETS?|PASS|PASSWD|PASSWORDS?|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE
)


class LostReward(Exception):
    """A completion has no reward: the user's code raised an error, took too long, or ended its process."""


class RefusedReward(LostReward):
    """No completion can have a reward: a function takes different arguments, or returns no number."""


class RewardProcess:
    """A process that runs a user's code. It starts on first use, and again after it hung or ended.

    "rewards" are functions ``reward(prompt: str, completion: str, **row) -> float``, which may be async. An
    "environment" is a ``zerojax.posttrain.Environment``. JAX sees no accelerator in the process. Its errors,
    hangs and exits do not harm the run. It gets no environment variable whose name suggests a secret, such as
    HF_TOKEN.

    The process and its children end with the process that started it, even if that process is killed.

    Args:
        named: the objects to run, each as "path/to/file.py:name".
        seconds: time limit for a response.
        variables: names of environment variables to pass on although they suggest a secret.
        kind: the kind of the objects.
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
                raise ConfigurationError(
                    f"{self.key}: {file} does not exist: give its path from {Path.cwd()}, or an absolute one"
                )
            self._arguments += file, name
        self._named, self._count = ", ".join(named), len(named)
        self._seconds = seconds
        self._variables = {*variables}
        self._process: subprocess.Popen[bytes] | None = None

    def load(self) -> None:
        """Start the process, which loads the files.

        Raises:
            ConfigurationError: the files cannot be loaded, or the socket cannot be created.
        """
        try:
            self._start()
        except LostReward as error:
            raise ConfigurationError(f"{self.key}: cannot load {self._named}: {error}") from error

    def ask(self, what: str, *arguments: Any) -> dict[str, Any]:
        """The response to a question. reward/worker.py lists questions and responses.

        Args:
            what: "score", "reset" or "step".
            arguments: of the question. Values without a type in JSON become text.

        Raises:
            LostReward: there is no response. The message says why.
        """
        if self._process is None:
            self._start()
        return self._ask(what, self._seconds, arguments)

    def kill(self) -> None:
        """Kill the process and its children. A thread that waits for a reward loses it."""
        if (process := self._process) is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and its children, and wait for that."""
        self.kill()
        if (process := self._process) is not None:
            self._process = None
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            self._listener.close()
            if self._connection is not None:
                self._connection.close()
            self._folder.cleanup()

    def _start(self) -> None:
        # A new folder for each process, because an earlier process may still connect to its socket.
        self._folder = tempfile.TemporaryDirectory(prefix="zerojax-reward-")
        self._listener, self._connection = socket.socket(socket.AF_UNIX), None
        address = f"{self._folder.name}/socket"
        try:
            self._listener.bind(address)
        except OSError as error:
            raise ConfigurationError(
                f"{self.key}: cannot create the socket {address}: {error}. Set TMPDIR to another folder"
            ) from error
        self._listener.listen()
        program = [sys.executable, "-P", worker.__file__, address, *self._arguments]
        plain = {
            name: x for name, x in os.environ.items() if name in self._variables or not _SECRET.search(name)
        }
        self._process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,  # nothing is written: its end tells the worker that this process has ended
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=plain | {"JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )
        # Nobody joins this thread, because a child of the process may hold the pipe open.
        threading.Thread(target=_show, args=(self._process.stderr,), daemon=True).start()
        try:
            self._ask("load", _LOADING_SECONDS)
        except LostReward:
            self.close()  # nothing was loaded, so the next question starts a new process
            raise

    def _ask(self, what: str, seconds: float, arguments: Sequence[Any] | None = None) -> dict[str, Any]:
        """Send a question unless ``arguments`` is None, and read a response. A failure ends the process."""
        deadline = time.monotonic() + seconds
        try:
            if arguments is not None:
                assert self._connection is not None
                self._connection.settimeout(seconds)
                with self._connection:
                    self._connection.sendall(json.dumps([what, *arguments], default=str).encode() + b"\n")
            self._connection = self._accept(deadline)
            response = self._parse(what, read_line(self._connection, deadline))
        except LostReward:
            self.close()
            raise
        except TimeoutError:
            self.close()
            limit = "(posttrain.reward_seconds)" if arguments is not None else "to load it"
            raise LostReward(f"no response within {seconds:g} s {limit}") from None
        except (OSError, EOFError):
            self.close()
            raise LostReward("its process has ended") from None
        if "error" in response:
            kind = RefusedReward if response.get("refused") else LostReward
            raise kind(printable(response["error"]))
        return response

    def _parse(self, what: str, line: bytes) -> dict[str, Any]:
        """Parse a line, which may be from any process that the user's code started.

        Raises:
            LostReward: reward/worker.py does not send such a line.
        """
        with suppress(ValueError, RecursionError):
            if self._is_response(what, response := json.loads(line)):
                return response
        raise LostReward(f"its process sent {short(line)}, which is no response")

    def _is_response(self, what: str, value: Any) -> bool:
        if not isinstance(value, dict) or isinstance(value.get("error"), str):
            return isinstance(value, dict)
        numbers = value.get("rewards", [value.get("reward", 0.0)])
        return (
            value.keys() == _RESPONSES[what]
            and isinstance(numbers, list)
            and (what != "score" or len(numbers) == self._count)
            and all(isinstance(one, float) and abs(one) <= worker.MAX_REWARD for one in numbers)
        )

    def _accept(self, deadline: float) -> socket.socket:
        """Accept the connection with the process's response.

        Raises:
            TimeoutError: there was no connection before the deadline.
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


def read_line(connection: socket.socket, deadline: float) -> bytes:
    """Read a whole line before the deadline, a time of ``time.monotonic``.

    Raises:
        TimeoutError: the deadline has passed, even if bytes keep arriving.
        EOFError: the connection ended before the line did.
        LostReward: the line is longer than any response.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        if not (more := connection.recv(1 << 16)):
            raise EOFError
        line += more
        if len(line) > _MAX_RESPONSE_BYTES:
            raise LostReward(f"the response has more than {_MAX_RESPONSE_BYTES >> 20} MiB")
    return bytes(line)


def _show(printed: IO[bytes]) -> None:
    """Print a process's output without control characters."""
    with printed:
        while line := printed.readline(_MAX_LINE_BYTES):
            print(printable(line.decode(errors="replace").rstrip("\r\n")), file=sys.stderr, flush=True)
