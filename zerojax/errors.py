"""The package's exceptions, and the exit codes of its processes."""

import errno
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import dacite

from zerojax import terminal

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_DIVERGED = 3
EXIT_PEER_LOST = 4  # another process ended first, or never joined: `zerojax launch` looks for the cause there
EXIT_STOPPED = 75  # sysexits.h's EX_TEMPFAIL: the same command, given again, resumes the run
EXIT_INTERRUPTED = 130

NO_RESTART = (EXIT_WRONG_USE, EXIT_DIVERGED)
"""Exit codes of a process that would fail in the same way if it were restarted."""

_MAX_LENGTH = 500  # of a line about an error
_DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # full
    *(errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT),  # no longer there
)
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, dacite.DaciteError)
"""What readers of JSON, TOML and the like raise on content that they do not expect."""


class ZeroJaxError(Exception):
    """Base of this package's errors: each is reported as one line, without a traceback."""


class ConfigurationError(ZeroJaxError, ValueError):
    """Invalid settings, arguments or input; the message names the cause and the way out."""


ZeroError = ConfigurationError
"""The public name of ``ConfigurationError``."""


class RunError(ZeroJaxError):
    """A run that began well cannot continue; the message says what failed."""


class DivergedError(RunError):
    """Training has diverged: restarting the run would end in the same way.

    ``good`` is the last step whose weights are known to be finite, because a later step used them.
    """

    def __init__(self, message: str, good: int) -> None:
        super().__init__(message)
        self.good = good


class Stopped(ZeroJaxError, SystemExit):
    """A run stopped on request; it has saved and can be resumed.

    If nothing catches it, the exit code is 75.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = EXIT_STOPPED


class JobError(ZeroJaxError):
    """The processes of a job could not connect; the message says which is missing, or why."""


class AbsentError(JobError):
    """Other processes of a job did not join it, so this one is not at fault."""


EXIT_CODES: dict[type[BaseException], int] = {
    ConfigurationError: EXIT_WRONG_USE,
    DivergedError: EXIT_DIVERGED,
    RunError: EXIT_FAILED,
    AbsentError: EXIT_PEER_LOST,
    JobError: EXIT_FAILED,
    Stopped: EXIT_STOPPED,
    KeyboardInterrupt: EXIT_INTERRUPTED,
}
"""Exit codes of errors that are reported in one line, without a traceback."""


def one_line(message: str) -> str:
    """A message as one line of at most 500 characters: more is cut before its end, which has the way out."""
    line, end = " ".join(message.split()), _MAX_LENGTH // 2
    return line if len(line) <= _MAX_LENGTH else f"{line[: end - 5]} ... {line[-end:]}"


def error_line(error: BaseException) -> str:
    """The type and the message of an error as one line: "ValueError: not a number".

    JAX adds a note to its errors, which is the last line of their traceback; it is skipped.
    """
    return one_line(f"{type(error).__name__}: {error}").removesuffix(":")


def report(error: BaseException) -> tuple[int, str]:
    """Print an error: one of this package as one line, any other with its traceback.

    Returns:
        The exit code and the line.
    """
    for kind, code in EXIT_CODES.items():
        if isinstance(error, kind):
            line = one_line(str(error)) or "interrupted"
            terminal.stderr.write(f"zerojax: {line}\n")
            return code, line
    terminal.stderr.write("".join(traceback.format_exception(error)))
    return EXIT_FAILED, error_line(error)


@contextmanager
def file_errors(
    path: Path, kind: type[ConfigurationError] = ConfigurationError, what: str = "", content: str = ""
) -> Generator[None]:
    """Report the system's errors about a file as ``ConfigurationError``: "PATH: No such file or directory".

    Args:
        path: of the file, for the message.
        kind: of the error.
        what: the failed action, for the message, such as "cannot write: ".
        content: what is wrong if a reader of the content raises an error, such as "not JSON"; "" if none can.

    Raises:
        ConfigurationError: in place of an ``OSError``, and of a reader's error.
    """
    try:
        yield
    except ZeroJaxError:
        raise
    except OSError as error:
        raise kind(f"{path}: {what}{error.strerror or error}") from error
    except _UNREADABLE as error:
        if not content:
            raise
        raise kind(f"{path}: {content}: {error}") from error


@contextmanager
def errors_at(where: object) -> Generator[None]:
    """Let the message of a ``ConfigurationError`` begin with where it belongs: "FILE:LINE: not text"."""
    try:
        yield
    except ConfigurationError as error:
        raise type(error)(f"{where}: {error}") from error


@contextmanager
def disk_errors(place: Path, after: str = "") -> Generator[None]:
    """Report in one line that the disk of ``place`` is full or no longer there; ``after`` ends the line.

    Raises:
        RunError: in place of such an ``OSError``; other errors pass unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        where = error.filename or place
        raise RunError(f"cannot write to {where}: {error.strerror or error}{after}") from error
