"""What the folders in `RUN/checkpoints` are called.

```
400                 a checkpoint: sealed before it got this name, so it is complete or damaged
400.unfinished      being saved (Orbax's own drafts begin with the same words)
400.removed         being deleted, or what is left where that failed
400.damaged         was found damaged when a run went on from an older one; left for a person to look at
400.undone          was newer than the one that a person went back to; left likewise
```
"""

import re
import shutil
import time
from pathlib import Path
from typing import Literal

_LEFTOVER = re.compile(r"\d+\.(unfinished|removed)(-\d+)?(\..*)?")
_ASIDE = re.compile(r"\d+\.(damaged|undone)(-\d+)?")


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, oldest first; none where there is no folder."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def aside(folder: Path) -> list[Path]:
    """The checkpoints that were moved aside."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _ASIDE.fullmatch(path.name))


def unfinished(folder: Path, step: int) -> Path:
    """Where a checkpoint lies until it is sealed."""
    return folder / f"{step}.unfinished"


def clear_leftovers(folder: Path) -> list[str]:
    """Remove what processes that died left half written or half deleted; a line for each that stays."""
    return [line for path in _leftovers(folder) if (line := remove(path)) is not None]


def _leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)] if folder.is_dir() else []


def clear_failed(folder: Path, step: int, *, quiet: float = 0.5, most: float = 5.0) -> None:
    """Remove what a save that failed left.

    Orbax gives up at the first error. Writes of other arrays, which nobody waits for any more, go on for a
    while and make their folders anew.

    Args:
        folder: of the checkpoints.
        step: that was to be saved.
        quiet: seconds in which nothing new has to appear.
        most: seconds after which what is left stays, for the next start to clear.
    """
    begun = seen = time.monotonic()
    while (now := time.monotonic()) - seen < quiet and now - begun < most:
        if left := [path for path in _leftovers(folder) if path.name.startswith(f"{step}.")]:
            seen = now
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.02)


def move_aside(folder: Path, step: int, why: Literal["damaged", "undone"] = "damaged") -> Path:
    """Free a checkpoint's name, and keep the files; the new path."""
    return (folder / str(step)).rename(free(folder / f"{step}.{why}"))


def free(path: Path) -> Path:
    """A path of this name, or of this with -2, -3, ... behind it, at which nothing is yet."""
    tried, number = path, 1
    while tried.exists() or tried.is_symlink():
        number += 1
        tried = path.with_name(f"{path.name}-{number}")
    return tried


def remove(path: Path) -> str | None:
    """Delete a checkpoint; nobody sees it half deleted under its own name.

    A link is deleted, and not what it points to.

    Returns:
        What could not be deleted and why, in a line; None where nothing is left.
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
        return (
            f"{gone} cannot be deleted: {error.strerror or error}; it can go, and takes up space until then"
        )
    return None
