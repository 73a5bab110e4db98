"""Runs programs in forks of one process that has imported zerojax, which takes as long as many of them."""

import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NoReturn


class ForkedPrograms:
    """A process that runs each program in a fork of its own, with warnings as errors.

    Args:
        environment: the variables of the programs.
    """

    def __init__(self, environment: Mapping[str, str]):
        command = [sys.executable, "-W", "error", __file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # Python warns of a fork where other threads run, as those of OpenBLAS would.
        self._process = subprocess.Popen(command, env={**environment, "OPENBLAS_NUM_THREADS": "1"}, **pipes)

    def run(self, code: str, folder: Path, output: Path) -> int:
        """Run a program in a folder, and return its exit code. ``output`` takes what it prints."""
        requests, answers = self._pipes()
        print(json.dumps([code, str(folder), str(output)]), file=requests, flush=True)
        return int(answers.readline())

    def close(self) -> None:
        """End the process."""
        for pipe in self._pipes():
            pipe.close()
        self._process.wait()

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def serve() -> None:
    """Fork for each request until there are no more."""
    package = importlib.import_module("zerojax")
    for name in package.__all__:
        getattr(package, name)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            become(*json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def become(code: str, folder: str, output: str) -> NoReturn:
    """Run a program as ``python -c`` does in that folder."""
    os.chdir(folder)
    for target, opened in (
        (0, os.open(os.devnull, os.O_RDONLY)),
        (1, written := _opened(output)),
        (2, written),
    ):
        os.dup2(opened, target)
    sys.argv, sys.path[0] = ["-c"], ""
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    exec(compile(code, "<program>", "exec"), vars(module))
    sys.exit()


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT)


if __name__ == "__main__":
    serve()
