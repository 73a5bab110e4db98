"""The lock that lets one process at a time write to a run's folder: ``RUN/lock``.

It is a lock of the operating system (flock), which is released however its process ends. The file's content
is for people. It excludes other processes of the same host. It excludes processes of other hosts if the
shared file system supports locks: NFS unless mounted with ``nolock`` or ``local_lock``, Lustre unless with
``noflock`` or ``localflock``.
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

from zerojax.errors import ConfigurationError, file_errors
from zerojax.log import logger
from zerojax.run.run_dir import RunFolder

# Error numbers of flock on file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """The lock of a run's folder, held by process zero of a job; a context manager."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._file: TextIO | None = None

    def take(self) -> str | None:
        """Create the folder and lock it.

        Returns:
            None, or a warning if the file system has no locks.
        """
        self._folder.create()
        path, note = self._folder.lock, None
        with file_errors(path, what="the run cannot write here: "):
            file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise ConfigurationError(
                    f"{self._folder.path} is in use by {_holder(file)}: wait for it, end it, or choose "
                    "another folder"
                ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            note = f"{path}: this file system has no locks: let no second run use the folder"
        file.truncate(0)
        own = {"host": platform.node(), "pid": os.getpid(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        file.write(json.dumps(own | {"command": shlex.join(sys.argv)}))
        file.flush()
        self._file = file
        return note

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        if (line := self.take()) is not None:
            logger.warning(line)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _holder(file: TextIO) -> str:
    """The process that holds a lock, as it has described itself in the lock's file."""
    file.seek(0)
    try:
        found = json.loads(file.read())
        line = f"process {found['pid']} on {found['host']} since {found['since']} ({found['command']})"
        return "".join(x if x.isprintable() else "?" for x in line)
    except (ValueError, TypeError, KeyError, RecursionError):
        return "another process"
