"""What a person is told instead of a traceback, and the codes that processes exit with."""

import traceback

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_DIVERGED = 3
EXIT_PEER_LOST = 4  # because another process of the run ended: `zerojax launch` looks for the cause there
EXIT_STOPPED = 75  # sysexits.h calls it EX_TEMPFAIL: the same command, given again, goes on
EXIT_INTERRUPTED = 130

NO_RESTART = (EXIT_WRONG_USE, EXIT_DIVERGED)
"""Codes of a process that would end in the same way if it were started again."""


class ZeroError(ValueError):
    """Something was asked for that can't be right; the message names it and the way out."""


class RunError(Exception):
    """A run that began well and cannot go on; the message says where it began to go wrong."""


class DivergedError(RunError):
    """Training has broken the weights, so that starting it again would end in the same way.

    Attributes:
        good: the last step whose weights are known to be good, because a later step could use them.
    """

    def __init__(self, message: str, good: int) -> None:
        """Say what was seen, and which step was good."""
        super().__init__(message)
        self.good = good


class Stopped(Exception):
    """A run was asked to stop; it has saved and can go on from there."""


class JobError(Exception):
    """The processes of a job could not come together; the message says which is missing, or why."""


def show_traceback(error: BaseException) -> tuple[int, str]:
    """Print an error as Python does; return the exit code and a line that says what it was."""
    traceback.print_exception(error)
    return EXIT_FAILED, traceback.format_exception_only(error)[-1].strip().splitlines()[0][:500]
