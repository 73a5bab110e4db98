"""Run a command that is killed when the process that started it ends: ``python pdeathsig.py COMMAND...``.

So that a launcher which is itself killed, with no chance to clean up, leaves no trainer behind that
holds the GPUs. Needs the standard library only and is started by its path.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> None:
    """Tie this process to its parent, as far as the system can, and become the command."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the kernel knew
            sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
