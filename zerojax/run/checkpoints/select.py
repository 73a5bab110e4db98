"""Which checkpoint to go on from: the newest that is what was saved."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zerojax.errors import ZeroError
from zerojax.run.checkpoints import step_dirs
from zerojax.run.checkpoints.manifest import DamagedError, Manifest, read_manifest, verify


@dataclass(frozen=True)
class Choice:
    """The outcome of looking at the checkpoints of a run, newest first.

    Attributes:
        step: of the newest sound one; None where there is no checkpoint at all.
        damaged: step -> what is wrong, of each that is newer and damaged.
    """

    step: int | None
    damaged: dict[int, str]


def newest_valid(folder: Path, *, checksums: bool = True) -> Choice:
    """Find the newest checkpoint that its manifest vouches for; nothing is changed.

    Args:
        folder: of the checkpoints.
        checksums: read every byte of those that are looked at.

    Raises:
        ZeroError: there are checkpoints, and all of them are damaged; names each.
    """
    found: dict[int, str] = {}
    for step in reversed(step_dirs.steps(folder)):
        try:
            verify(folder / str(step), step, checksums=checksums)
            return Choice(step, found)
        except DamagedError as error:
            found[step] = str(error)
    if found:
        each = "; ".join(damage_line(folder, step, why) for step, why in found.items())
        raise ZeroError(f"no checkpoint can be used: {each}. Restore one, or move them away to start afresh")
    return Choice(None, {})


def set_damaged_aside(folder: Path, choice: Choice) -> list[str]:
    """Move damaged checkpoints aside, so that their steps can be saved again; a line for each."""
    return [
        f"{damage_line(folder, step, why)}; it is now called {step_dirs.move_aside(folder, step).name}"
        for step, why in choice.damaged.items()
    ]


def damage_line(folder: Path, step: int, why: str) -> str:
    """How a damaged checkpoint is named to people."""
    return f"checkpoint {folder / str(step)} is damaged: {why}"


def find(run_or_checkpoint: Path) -> Path:
    """The sound checkpoint that a path means: itself, or the newest of a run's folder.

    Raises:
        ZeroError: there is none, or it is damaged.
    """
    path = run_or_checkpoint
    if (path / "checkpoints").is_dir():
        path /= "checkpoints"
        if (step := newest_valid(path).step) is None:
            raise ZeroError(f"{path}: there is no checkpoint yet")
        return path / str(step)
    if not path.is_dir():
        raise ZeroError(f"{path} is neither a run's folder nor a checkpoint")
    try:
        verify(path)
    except DamagedError as error:
        raise ZeroError(f"{path} is no checkpoint, or a damaged one: {error}") from error
    return path


def read_manifests(folder: Path) -> list[Manifest]:
    """The manifests of all checkpoints that have one, oldest first; their files are not looked at."""
    found = []
    for step in step_dirs.steps(folder):
        # A damaged one is named when somebody wants to go on from it.
        with suppress(DamagedError):
            found.append(read_manifest(folder / str(step)))
    return found
