"""The names of the folders in ``RUN/checkpoints``.

```
400                 a checkpoint; its manifest was written before it got this name
400.unfinished      being saved (the names of Orbax's temporary folders begin like this)
400.removed         being deleted, or left by a deletion that failed
400.damaged         found damaged when a run resumed from an older checkpoint; kept for inspection
400.undone          newer than the checkpoint to which a user went back; kept for inspection
400.needed-by       a file that lists the runs that began with the weights of checkpoint 400, one a line;
                    400.undone.needed-by for 400.undone
```
"""

import re
import shutil
import time
from pathlib import Path
from typing import Literal

_LEFTOVER = re.compile(r"\d+\.(unfinished|removed)(-\d+)?(\..*)?")
_ASIDE = re.compile(r"\d+\.(damaged|undone)(-\d+)?")
# A failed save has ended when nothing new has appeared for this many seconds; and the most seconds to wait.
_QUIET_SECONDS, _MAX_SECONDS = 0.5, 5.0


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, oldest first; none if the folder does not exist."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def aside(folder: Path) -> list[Path]:
    """The checkpoints that were renamed because they are damaged or undone."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _ASIDE.fullmatch(path.name))


def unfinished(folder: Path, step: int) -> Path:
    """The path of a checkpoint until it is complete."""
    return folder / f"{step}.unfinished"


def clear_leftovers(folder: Path) -> list[str]:
    """Remove folders that dead processes left half written or deleted; returns a line for each failure."""
    return [line for path in _leftovers(folder) if (line := remove(path)) is not None]


def _leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)] if folder.is_dir() else []


def clear_failed(folder: Path, step: int) -> None:
    """Remove a failed save's folder, until nothing new appears in it; the next start removes the rest.

    Orbax gives up at the first error, but its writes of other arrays continue for a while and create their
    folders again.
    """
    started = seen = time.monotonic()
    while (now := time.monotonic()) - seen < _QUIET_SECONDS and now - started < _MAX_SECONDS:
        if left := [path for path in _leftovers(folder) if path.name.startswith(f"{step}.")]:
            seen = now
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.02)


def move_aside(folder: Path, step: int, why: Literal["damaged", "undone"] = "damaged") -> Path:
    """Rename a checkpoint and its list of runs that need it, so that its step can be saved again.

    Returns the new path.
    """
    path = folder / str(step)
    moved = path.rename(free(folder / f"{step}.{why}"))
    if _needs(path).exists():
        _needs(path).rename(_needs(moved))
    return moved


def free(path: Path) -> Path:
    """This path if nothing is there yet, else the first free one with -2, -3, ... appended."""
    tried, number = path, 1
    while tried.exists() or tried.is_symlink():
        number += 1
        tried = path.with_name(f"{path.name}-{number}")
    return tried


def note_need(path: Path, run: Path) -> str | None:
    """Record beside a checkpoint that another run needs it, so that the checkpoint's own run keeps it.

    Returns:
        A line if that cannot be written, else None.
    """
    try:
        if str(run.resolve()) not in needed_by(path):
            with _needs(path).open("a", encoding="utf-8") as file:
                file.write(f"{run.resolve()}\n")
    except OSError as error:
        return (
            f"cannot note beside {path} that this run needs it ({error.strerror or error}): the run that "
            "wrote it may delete it"
        )
    return None


def needed_by(path: Path) -> list[str]:
    """The existing runs that need a checkpoint; raises OSError."""
    file = _needs(path)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [line for line in lines if Path(line).exists()]


def _needs(path: Path) -> Path:
    return path.with_name(f"{path.name}.needed-by")


def remove(path: Path) -> str | None:
    """Delete a checkpoint. It is renamed first, so that nobody sees it half deleted under its own name.

    If it is a link, only the link is deleted.

    Returns:
        A line on what could not be deleted and why; None if everything is deleted.
    """
    gone, number = path, path.name.partition(".")[0]
    try:
        if not path.name.startswith(f"{number}.removed"):
            gone = path.rename(free(path.with_name(f"{number}.removed")))
        if gone.is_symlink():
            gone.unlink()
        else:
            shutil.rmtree(gone)
    except OSError as error:
        return f"{gone} cannot be deleted: {error.strerror or error}; delete it yourself to free its space"
    return None
