"""Processes that have done all of a restart that needs no state of the run, and wait.

``zerojax launch`` starts one for each process of a job, with the command of the next start. They join each
other, trace the step, and load its program. On a GPU they have a context and no arrays. This file also
delays such a command: ``python standby.py SECONDS COMMAND...``. For that it needs the standard library alone.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

VARIABLE = "ZEROJAX_STANDBY"
"""The environment variable of a process that waits for its launcher; its standard input is a pipe."""

COMPILE = "compile"
"""The variable's value for a process that only compiles its program, at the lowest priority, and ends."""

# The launcher writes this to the pipe when a process of the job is lost, and variables when all have ended.
_LOST = b"\n"

# Seconds between looks whether a process that waits can still begin.
_LOOK_EVERY = 0.2


class Standby:
    """The launcher's end: a process that waits before it uses its run.

    Args:
        command: of the process.
        env: its environment.
        pass_fds: open files that it will use.
        after: seconds to wait before it starts, because the job itself starts at the same time.
        value: of the environment variable.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        after: float,
        value: str = "1",
    ) -> None:
        tied, delayed = (
            [sys.executable, "-IS", str(file)]
            for file in (Path(__file__).with_name("pdeathsig.py"), __file__)
        )
        self._process = subprocess.Popen(
            [*tied, str(os.getpid()), *delayed, str(after), *command],
            env={**env, VARIABLE: value},
            pass_fds=tuple(pass_fds),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def waits(self) -> bool:
        """Whether the process has not ended, so that it can begin."""
        return self._process.poll() is None

    def prepare(self) -> None:
        """Let the process do what it can while the job before it ends."""
        with suppress(BrokenPipeError):
            self._stdin.write(_LOST)
            self._stdin.flush()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def begin(self, env: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Let the process go on, with further environment variables. None if it has ended."""
        try:
            with self._stdin as stdin:
                stdin.write(json.dumps(dict(env)).encode())
        except BrokenPipeError:
            self.close()
            return None
        return self._process

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert stream is not None
                stream.close()


def only_compiles() -> bool:
    """Whether this process ends once it has compiled its program."""
    return os.environ.get(VARIABLE) == COMPILE


def waits(seconds: float) -> bool:
    """Whether this process stands by, and its launcher does not let it begin within some seconds."""
    return VARIABLE in os.environ and not select.select([sys.stdin], [], [], seconds)[0]


def wait(*, works: Callable[[], bool] = lambda: True, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait until the launcher lets this process begin, if it stands by, and set the variables that it gives.

    The process ends if the launcher has ended.

    Args:
        works: whether this process can still begin; if not, it ends, and the launcher starts another.
        meanwhile: what can be done once a process of the job is lost, while the others end.
    """
    if os.environ.pop(VARIABLE, None) is None:
        return
    if (text := _read(works)) == _LOST:
        meanwhile()
        text = _read(works)
    if not text:
        os._exit(0)
    os.environ.update(json.loads(text))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)


def _read(works: Callable[[], bool]) -> bytes:
    """The launcher's next line, or what it writes before it closes the pipe."""
    while not select.select([sys.stdin], [], [], _LOOK_EVERY)[0]:
        if not works():
            print("zerojax: the GPU's context was lost while this process stood by", flush=True)
            os._exit(1)
    return sys.stdin.buffer.readline()


if __name__ == "__main__":
    select.select([sys.stdin], [], [], float(sys.argv[1]))
    if only_compiles():
        os.nice(19)
    os.execvp(sys.argv[2], sys.argv[2:])
