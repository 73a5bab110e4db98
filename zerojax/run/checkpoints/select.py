"""Which checkpoint to resume from: the newest valid one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zerojax.comm.gather import gather_from_all
from zerojax.errors import ConfigurationError
from zerojax.multihost.agreement import run_on_each_process, run_on_process_zero
from zerojax.multihost.files import on_own_disks
from zerojax.run.checkpoints import parts, step_dirs
from zerojax.run.checkpoints.manifest import DamagedError, Manifest, read_manifest, verify
from zerojax.run.checkpoints.run_copy import RunCopy


class Choice(NamedTuple):
    """The newest checkpoint that can be used.

    Attributes:
        step: the checkpoint's step; None if there are no checkpoints at all.
        damaged: step -> reason, for each newer checkpoint of this process that cannot be used.
    """

    step: int | None
    damaged: dict[int, str]


def newest_valid(
    folder: Path, *, checksums: bool = True, copied: int | None = None, on_hosts: bool = False
) -> Choice:
    """Find the newest checkpoint that matches its manifest; changes nothing.

    ``copied`` is the newest one in the run's copy, which is the choice if the folder has none as new. With
    ``on_hosts`` each process has the folder on its own disk. All processes then call it together, and find
    the newest checkpoint that the hosts together have whole.

    Raises:
        ConfigurationError: there are checkpoints, but none can be used; says why.
        RunError: one cannot be read for a reason other than damage, such as a lack of permission.
    """
    gather: Callable[[Any], list[Any]] = gather_from_all if on_hosts else lambda own: [own]
    # Commands choose before they emulate devices, so JAX must not look for devices here.
    own, rank, damaged = step_dirs.steps(folder), jax.process_index() if on_hosts else 0, dict[int, str]()
    steps = sorted({step for each in gather(own) for step in each}, reverse=True)
    for step in (step for step in steps if step >= (copied or 0)):
        mine = None
        try:
            if step in own:
                mine = verify(folder / str(step), step, checksums=checksums, is_part=on_hosts)
        except DamagedError as error:
            damaged[step] = str(error)
        save = parts.newest_save(parts.manifests_of(mine, gather))
        if step in own and save[rank] is None:
            damaged.setdefault(step, "the job's hosts do not have all of its parts")
        if any(save):
            return Choice(step, damaged)
    if steps and copied is None:
        reasons = [why for each in gather(damaged) for why in each.values()]
        each = "; ".join(damage_line(folder, step, why) for step, why in damaged.items())
        raise ConfigurationError(
            f"no checkpoint in {folder} can be used, of steps {steps}: {reasons[0]}. Bring back the disks of "
            "the hosts that saved them, or move the checkpoints away to start over"
            if on_hosts
            else f"no checkpoint can be used: {each}. Restore one, or move them away to start over"
        )
    return Choice(copied, damaged)


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
        lines = [
            f"{damage_line(folder, step, why)}; it is now called {step_dirs.move_aside(folder, step).name}"
            for step, why in choice.damaged.items()
        ]
        if copy is not None and choice.step is not None and choice.step == copied:
            lines += copy.fetch(choice.step)
        return lines

    def choice() -> dict[str, Any]:
        found = newest_valid(folder, checksums=checksums, copied=copied)
        check(found.step)
        return {"step": found.step, "lines": use(found)}

    if on_own_disks(folder):
        found = newest_valid(folder, checksums=checksums, copied=copied, on_hosts=True)
        step = found.step
        check(step)
        moved = run_on_each_process(lambda: use(found))
        lines = [f"process {rank}: {line}" for rank, each in enumerate(moved) for line in each]
        if step is not None:
            parts.bring_to_all_hosts(folder, step)
    else:
        chosen = run_on_process_zero(choice)
        step, lines = chosen["step"], chosen["lines"]
    return None if step is None else read_manifest(folder / str(step)), lines


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
