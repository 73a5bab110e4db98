"""A process that has imported everything, and waits for a command: imports take most of a restart's start.

``zerojax launch`` keeps one for each process of a job. It has no device, and JAX has not started any backend.
The file needs the standard library alone until it imports, and runs by its path:
``python standby.py NAME SECONDS MODULE``.
"""

import importlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_USED_LATER = ("tyro", "tensorboardX")
"""Modules that commands import on use, if they are installed."""


class Standby:
    """The launcher's end: a process that waits for the arguments of ``zerojax`` and their environment.

    Args:
        name: shown in lists of processes.
        module: of the command, with everything that it imports.
        env: its environment; JAX reads some variables when it is imported.
        pass_fds: open files that the command will use.
        after: seconds to wait before importing, because the job itself starts at the same time.
    """

    def __init__(
        self, name: str, module: str, env: Mapping[str, str], pass_fds: Sequence[int], after: float
    ) -> None:
        tied = [sys.executable, "-IS", str(Path(__file__).with_name("pdeathsig.py"))]
        self._process = subprocess.Popen(
            [*tied, sys.executable, __file__, name, str(after), module],
            env=dict(env),
            pass_fds=tuple(pass_fds),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def begin(self, arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Let the process run ``zerojax`` with arguments, in an environment. None if it has ended."""
        order = json.dumps({"arguments": [*arguments], "env": dict(env)})
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with stdin:  # nobody else can read a pipe, as they could the arguments of a process
                stdin.write(order.encode())
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


def main(after: float, module: str) -> None:
    """Import, read an order from standard input, and run it."""
    sys.path[0] = str(Path.cwd())  # as for `python -m zerojax`
    select.select([sys.stdin], [], [], after)
    importlib.import_module(module)
    for name in _USED_LATER:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    if not (text := sys.stdin.buffer.read()):
        return
    order = json.loads(text)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.clear()
    os.environ.update(order["env"])
    cli = importlib.import_module("zerojax.cli")
    sys.argv = [cli.__file__, *order["arguments"]]
    cli.program()


if __name__ == "__main__":
    main(float(sys.argv[2]), sys.argv[3])
