"""Metrics on disk: ``metrics.jsonl``, one JSON object per step."""

import errno
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax.errors import RunError
from zerojax.multihost.background import Worker
from zerojax.run.checkpoints.step_dirs import free
from zerojax.run.run_dir import write_whole

_MAX_STEPS = 1 << 53  # beyond, a chart could not tell them apart


class MetricsFile:
    """Writes a run's metrics; a resumed run continues the file.

    A separate thread writes the lines, so that a hung disk delays no step. If too many lines are queued, or
    the queue must be flushed, a hung disk ends the run with an error.

    Args:
        path: the file.
        start: steps done before. Lines of later steps, which will be repeated, are dropped.
        most: the most lines in the queue.
        patience: seconds that the disk may take for one line when the run waits for it.

    Attributes:
        reached: the last step that was in the file before.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, *, start: int = 0, most: int = 1000, patience: float = 60.0) -> None:
        before = read_metrics(path)
        self.reached = max((values["step"] for values in before), default=0)
        write_whole(path, "".join(_line(values) for values in before if values["step"] <= start))
        self.hangs = False
        self._path = path
        self._patience = patience
        self._most = most
        # Not a file object: Python would close it at exit, and wait for a hung disk.
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._worker = Worker("metrics", most)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue a step's line. A value that is not finite is written as null, since JSON has no NaN.

        Raises:
            OSError: an earlier line could not be written, or the disk hangs.
            RunError: the file was deleted.
        """
        self._check()
        append = functools.partial(self._append, _line({"step": step, **values}).encode())
        if not self._worker.put(append):
            self._wait(self._most - 1)
            self._worker.put(append)

    def flush(self) -> None:
        """Wait until all lines are written; errors as for ``write``."""
        self._wait(0)

    def close(self) -> None:
        """Flush and close; errors as for ``write``."""
        try:
            self.flush()
        finally:
            self._worker.close()
            if not self.hangs:
                os.close(self._file)

    def _append(self, line: bytes) -> None:
        if not os.fstat(self._file).st_nlink:  # a write would succeed, but nobody could read it
            raise RunError(f"{self._path} was deleted while the run wrote to it: later lines would be lost")
        while line:
            line = line[os.write(self._file, line) :]

    def _wait(self, left: int) -> None:
        """Wait until at most ``left`` lines are queued, as long as lines are being written."""
        while not self.hangs and (now := self._worker.left) > left:
            self.hangs = not self._worker.wait(self._patience, now - 1)
        self._check()

    def _check(self) -> None:
        if self.hangs:
            raise OSError(
                errno.ETIMEDOUT, f"the disk has not responded for {self._patience:g} s", str(self._path)
            )
        if self._worker.error is not None:
            raise self._worker.error


def _line(values: Mapping[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    return json.dumps(finite) + "\n"


def move_later_lines(path: Path, step: int) -> Path | None:
    """Move a log's lines of later steps, and unreadable lines, to a file beside it.

    The log is ``metrics.jsonl`` or ``samples.jsonl``.

    Returns:
        That file; None if there was nothing to move.
    """
    if not path.exists():
        return None
    kept, moved = [], []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        values = _read_line(line)
        (moved if values is None or values["step"] > step else kept).append(line)
    if not moved:
        return None
    undone = free(path.with_name(f"{path.name}.undone"))
    write_whole(undone, "".join(moved))
    write_whole(path, "".join(kept))
    return undone


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps in a ``metrics.jsonl``, in order; none if there is no file.

    Skips a line that a killed process left incomplete.
    """
    return [values for values in iterate_lines(path) if values is not None]


def iterate_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a log, None for one that is unreadable; nothing if there is no file."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from map(_read_line, file)


def _read_line(line: str) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = values.get("step") if isinstance(values, dict) else None
    return values if type(step) is int and 0 <= step < _MAX_STEPS else None
