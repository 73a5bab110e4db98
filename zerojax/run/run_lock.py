"""One process at a time writes to a run's folder: `RUN/lock`.

The lock is the system's own (flock), so that the end of a process, of whatever kind, gives it back; what the
file says is for people. It holds between the processes of a host. Between hosts it holds where the file
system that they share passes locks on: NFS does, unless it is mounted with `nolock` or `local_lock`, and
Lustre, unless with `noflock` or `localflock`.
"""

import errno
import fcntl
import json
import os
import platform
import shlex
import sys
from datetime import datetime
from typing import Self, TextIO

from zerojax.errors import ZeroError
from zerojax.run.run_dir import RunFolder

# What flock raises on file systems that know no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """The lock of one run's folder; in a job the first process has it."""

    def __init__(self, folder: RunFolder) -> None:
        """Nothing is locked before `take` or `with`.

        Args:
            folder: the run's.
        """
        self._folder = folder
        self._file: TextIO | None = None

    def take(self) -> str | None:
        """Make the folder, and lock it.

        Returns:
            None; or, on a file system without locks, a line that says so.

        Raises:
            ZeroError: another process has it; names its host and number. Or the folder cannot be written to.
        """
        self._folder.create()
        path, note = self._folder.lock, None
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise ZeroError(f"{path}: the run cannot write here: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise ZeroError(
                    f"{self._folder.path} is in use by {_holder(file)}: wait for it, end it, or choose "
                    "another folder"
                ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            note = f"{path}: this file system has no locks: let no second run use the folder"
        file.truncate(0)
        file.write(json.dumps(_own()))
        file.flush()
        self._file = file
        return note

    def close(self) -> None:
        """Give it back."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        """Take it, and say what is to be said; errors as `take`."""
        if (line := self.take()) is not None:
            print(f"zerojax: {line}", file=sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self.close()


def _own() -> dict[str, object]:
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        "command": shlex.join(sys.argv),
    }


def _holder(file: TextIO) -> str:
    """Who holds a lock, as far as its file says: it is written after the lock was taken."""
    file.seek(0)
    try:
        found = json.loads(file.read())
        line = f"process {found['pid']} on {found['host']} since {found['since']} ({found['command']})"
        return "".join(x if x.isprintable() else "?" for x in line)
    except (ValueError, TypeError, KeyError, RecursionError):
        return "another process"
