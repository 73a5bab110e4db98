"""Run a command that is killed when its parent process ends: ``python pdeathsig.py PARENT COMMAND...``.

So a launcher that is killed, without a chance to clean up, leaves no trainer behind on the GPUs. The file
only needs the standard library, and runs by its path.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Tie this process to its parent (on Linux), then execute the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before prctl took effect, perhaps before Python had started
            sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
