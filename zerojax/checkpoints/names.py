"""What the folders in `RUN/checkpoints` are called.

```
400                 a checkpoint: sealed before it got this name, so it is complete or damaged
400.unfinished      being saved (Orbax's own drafts begin with the same words)
400.removed         being deleted
400.damaged         was found damaged when a run went on from an older one; left for a person to look at
```
"""

import re
import shutil
import time
from pathlib import Path

_LEFTOVER = re.compile(r"\d+\.(unfinished|removed)(\..*)?")
_DAMAGED = re.compile(r"\d+\.damaged(-\d+)?")


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, oldest first; none where there is no folder."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def damaged(folder: Path) -> list[Path]:
    """The checkpoints that were moved aside."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _DAMAGED.fullmatch(path.name))


def unfinished(folder: Path, step: int) -> Path:
    """Where a checkpoint lies until it is sealed."""
    return folder / f"{step}.unfinished"


def clear_leftovers(folder: Path) -> None:
    """Remove what processes that died left half written or half deleted."""
    for path in _leftovers(folder):
        shutil.rmtree(path)


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


def move_aside(folder: Path, step: int) -> Path:
    """Free a damaged checkpoint's name, and keep the files; the new path."""
    number = 1
    while True:
        path = folder / (f"{step}.damaged" if number == 1 else f"{step}.damaged-{number}")
        if not path.exists():
            return (folder / str(step)).rename(path)
        number += 1


def remove(path: Path) -> None:
    """Delete a checkpoint; nobody sees it half deleted under its own name."""
    gone = path.rename(path.with_name(f"{path.name.partition('.')[0]}.removed"))
    shutil.rmtree(gone)
