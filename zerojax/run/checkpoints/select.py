"""Which checkpoint to resume from: the newest valid one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.multihost.agreement import run_on_each_process, run_on_process_zero
from zerojax.multihost.files import on_own_disks
from zerojax.run.checkpoints import parts, step_dirs
from zerojax.run.checkpoints.manifest import DamagedError, Manifest, read_manifest, verify
from zerojax.run.checkpoints.run_copy import RunCopy


@dataclass(frozen=True)
class Choice:
    """The newest valid checkpoint of a run.

    Attributes:
        step: the checkpoint's step; None if there are no checkpoints at all.
        damaged: step -> reason, for each newer, damaged checkpoint.
    """

    step: int | None
    damaged: dict[int, str]


def newest_valid(folder: Path, *, checksums: bool = True, copied: int | None = None) -> Choice:
    """Find the newest checkpoint that matches its manifest; changes nothing.

    ``copied`` is the newest one in the run's copy, which is the choice if the folder has none as new.

    Raises:
        ConfigurationError: there are checkpoints, but all are damaged; names each.
        RunError: one cannot be read for a reason other than damage, such as a lack of permission.
    """
    found: dict[int, str] = {}
    for step in (step for step in reversed(step_dirs.steps(folder)) if step >= (copied or 0)):
        try:
            verify(folder / str(step), step, checksums=checksums)
            return Choice(step, found)
        except DamagedError as error:
            found[step] = str(error)
    if found and copied is None:
        each = "; ".join(damage_line(folder, step, why) for step, why in found.items())
        raise ConfigurationError(
            f"no checkpoint can be used: {each}. Restore one, or move them away to start over"
        )
    return Choice(copied, found)


def choose(
    folder: Path,
    *,
    checksums: bool = True,
    check: Callable[[int | None], None] = lambda _: None,
    copy: RunCopy | None = None,
) -> tuple[Manifest | None, list[str]]:
    """Choose the newest valid checkpoint, on process zero for all; rename newer, damaged ones.

    If the hosts share no file system, they choose the newest one that they have whole together, and every
    host gets the parts that it lacks. Arguments and errors are as for ``newest_valid``. ``check`` gets
    the step, or None if there is no checkpoint. It may raise a ConfigurationError before anything is renamed.
    If ``copy`` has a newer checkpoint, that is the choice, and is fetched.

    Returns:
        The manifest of the checkpoint, or None if there is none; and a line for each damaged one.
    """

    copied = None if copy is None else run_on_process_zero(lambda: max(copy.steps(), default=None))

    def use(choice: Choice) -> list[str]:
        lines = set_damaged_aside(folder, choice)
        if copy is not None and choice.step is not None and choice.step == copied:
            lines += copy.fetch(choice.step)
        return lines

    def choice() -> dict[str, Any]:
        found = newest_valid(folder, checksums=checksums, copied=copied)
        check(found.step)
        return {"step": found.step, "lines": use(found)}

    if on_own_disks(folder):
        step, damaged = parts.newest_complete(folder, checksums=checksums, copied=copied)
        check(step)
        moved = run_on_each_process(lambda: use(Choice(step, damaged)))
        lines = [f"process {rank}: {line}" for rank, each in enumerate(moved) for line in each]
        if step is not None:
            parts.bring_to_all_hosts(folder, step)
    else:
        chosen = run_on_process_zero(choice)
        step, lines = chosen["step"], chosen["lines"]
    return None if step is None else read_manifest(folder / str(step)), lines


def set_damaged_aside(folder: Path, choice: Choice) -> list[str]:
    """Rename damaged checkpoints, so that their steps can be saved again; returns a line for each."""
    return [
        f"{damage_line(folder, step, why)}; it is now called {step_dirs.move_aside(folder, step).name}"
        for step, why in choice.damaged.items()
    ]


def damage_line(folder: Path, step: int, why: str) -> str:
    """The message about a damaged checkpoint."""
    return f"checkpoint {folder / str(step)} is damaged: {why}"


def find(run_or_checkpoint: Path) -> Path:
    """The valid checkpoint at a path, or the newest one of the run at that path.

    Raises:
        ConfigurationError: there is none, or it is damaged.
    """
    path = run_or_checkpoint
    if (path / "checkpoints").is_dir():
        path /= "checkpoints"
        if (step := newest_valid(path).step) is None:
            raise ConfigurationError(f"{path}: there is no checkpoint yet")
        return path / str(step)
    if not path.is_dir():
        raise ConfigurationError(f"{path} is neither a run's folder nor a checkpoint")
    try:
        verify(path)
    except DamagedError as error:
        raise ConfigurationError(f"{path} is not a checkpoint, or is damaged: {error}") from error
    return path
