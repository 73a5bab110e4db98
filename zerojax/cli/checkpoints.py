"""``zerojax checkpoints RUN``: list, verify, rewind and delete checkpoints."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zerojax.cli.options import RunPath, read_options
from zerojax.errors import ConfigurationError, RunError
from zerojax.formatting import size
from zerojax.run.checkpoints import (
    DamagedError,
    Manifest,
    RunCopy,
    damage_line,
    read_manifest,
    read_manifests,
    step_dirs,
    verify,
)
from zerojax.run.metrics.files import move_later_lines
from zerojax.run.run_dir import RunFolder, RunLock
from zerojax.validation.paths import is_store_url

# Columns in a pipe or file: a checkpoint is one line.
_PIPE_WIDTH = 1000


@dataclass(frozen=True)
class Options:
    """List the checkpoints of a run and check each against its manifest; uses no device.

    Exits with code 1 if one is damaged.

    Attributes:
        run: The run's folder.
        verify: Read every byte and compare checksums; otherwise only names and sizes of files.
        rewind: Go back to this step, from which the run then resumes. Later checkpoints are kept as
            STEP.undone, later lines of metrics.jsonl in metrics.jsonl.undone.
        delete: Delete this checkpoint: a step, or a name such as 400.damaged.
        fetch: First bring the run, with its newest checkpoint, from this URL (checkpoint.copy_to). RUN need
            not exist.
    """

    run: RunPath
    verify: bool = True
    rewind: int | None = None
    delete: str | None = None
    fetch: str | None = None


def run(arguments: list[str]) -> None:
    """Rewind and delete if asked to, then list and verify."""
    options = read_options(Options, "checkpoints", arguments)
    if options.rewind is not None and options.delete is not None:
        raise ConfigurationError("--rewind moves later checkpoints aside: give --delete in a second command")
    folder = RunFolder(options.run)
    if options.fetch is not None:
        _fetch(options.fetch, folder)
    if not folder.path.is_dir():
        raise ConfigurationError(
            f"{folder.path} is not a run folder: name the folder of a run, such as runs/gpt-tiny"
        )
    if options.rewind is not None:
        with RunLock(folder):
            _rewind(folder, options.rewind, checksums=options.verify)
    if options.delete is not None:
        with RunLock(folder):
            _delete(folder, options.delete)
    paths = [folder.checkpoints / str(step) for step in step_dirs.steps(folder.checkpoints)]
    paths += step_dirs.aside(folder.checkpoints)
    if not paths:
        raise ConfigurationError(f"{folder.path} has no checkpoint yet: train the run first")
    table = Table("name", "saved", "size", "metrics", "written on", "state", box=None, pad_edge=False)
    bad = 0
    for path in paths:
        why = _damage(path, checksums=options.verify)
        if not path.exists():  # a running run has just removed it
            continue
        bad += why is not None
        state = f"damaged: {why}" if why else "verified" if options.verify else "complete"
        table.add_row(path.name, *_described(path), f"{_part(path)}{state}")
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    Console(soft_wrap=True, highlight=False, markup=False, width=width).print(table)
    if bad:
        raise RunError(f"{bad} of {len(paths)} checkpoints are damaged")


def _damage(path: Path, *, checksums: bool) -> str | None:
    try:
        verify(path, int(path.name.partition(".")[0]), checksums=checksums, is_part=True)
    except (DamagedError, RunError) as error:
        return str(error)
    return None


def _part(path: Path) -> str:
    """Which part of a checkpoint this host has; empty if it has a whole one."""
    with suppress(DamagedError, RunError):
        manifest = read_manifest(path)
        return f"part {manifest.part + 1} of {manifest.parts}, " if manifest.parts > 1 else ""
    return ""


def _described(path: Path) -> tuple[str, str, str, str]:
    """Time of saving, size, metrics, and mesh and preset; "?" if the manifest cannot be read."""
    try:
        manifest: Manifest = read_manifest(path)
    except (DamagedError, RunError):
        return "?", size(sum(p.stat().st_size for p in path.rglob("*") if p.is_file())), "", "?"
    record = manifest.record
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
    nodes, local = record.mesh
    preset = record.config.get("zero", {}).get("preset", "?")
    saved = datetime.fromtimestamp(manifest.saved_at).astimezone()
    return f"{saved:%Y-%m-%d %H:%M:%S}", size(manifest.size), metrics, f"{nodes} x {local}, {preset}"


def _fetch(url: str, folder: RunFolder) -> None:
    if not is_store_url(url):
        raise ConfigurationError(f"--fetch {url}: give a URL such as s3://bucket/run")
    copy = RunCopy(url, folder)
    if not (steps := copy.steps()):
        raise ConfigurationError(f"--fetch {url}: there is no complete checkpoint")
    with RunLock(folder):
        copy.fetch_files()
        for line in copy.fetch(steps[-1]):
            print(line)


def _copy_of(folder: RunFolder) -> RunCopy | None:
    return RunCopy.of(folder.read_config().checkpoint.copy_to, folder) if folder.config.exists() else None


def _rewind(folder: RunFolder, step: int, *, checksums: bool) -> None:
    copy = _copy_of(folder)
    copied = [] if copy is None else copy.steps()
    if copy is not None and step in copied:
        copy.fetch(step)
    steps = step_dirs.steps(folder.checkpoints)
    if step not in steps:
        raise ConfigurationError(
            f"{folder.path} has no checkpoint of step {step}; there are: {_listed(steps)}"
        )
    if why := _damage(folder.checkpoints / str(step), checksums=checksums):
        raise ConfigurationError(damage_line(folder.checkpoints, step, why))
    if copy is not None:
        for later in [one for one in reversed(copied) if one > step]:
            copy.delete(later)
            print(f"deleted checkpoint {later} in {copy.url}")
    # Newest first: if interrupted, the remaining checkpoints still form a run that resumes from its newest.
    undone = [
        step_dirs.move_aside(folder.checkpoints, later, "undone") for later in reversed(steps) if later > step
    ]
    moved = [move_later_lines(path, step) for path in (folder.metrics, folder.samples)]
    print(f"{folder.path} will resume from step {step}")
    if undone:
        print(f"later checkpoints are kept as {_listed(path.name for path in reversed(undone))}")
    for path in undone:
        if runs := step_dirs.needed_by(path):
            print(f"{path.name} holds weights that other runs need and can no longer find: {_listed(runs)}")
    if kept := [path.name for path in moved if path is not None]:
        print(f"lines of later steps are kept in {_listed(kept)}")


def _delete(run: RunFolder, name: str) -> None:
    folder, copy = run.checkpoints, _copy_of(run)
    known = [str(step) for step in step_dirs.steps(folder)] + [path.name for path in step_dirs.aside(folder)]
    if name not in known:
        raise ConfigurationError(f"{folder} has no checkpoint {name!r}; there are: {_listed(known)}")
    if users := [m.step for m in read_manifests(folder) if f"{folder.name}/{name}" in m.record.bases]:
        raise ConfigurationError(
            f"checkpoint {folder / name} holds weights that the checkpoints of steps {_listed(users)} need: "
            "delete those first"
        )
    if runs := step_dirs.needed_by(folder / name):
        raise ConfigurationError(
            f"checkpoint {folder / name} holds weights that other runs need: {_listed(runs)}. If they no "
            f"longer need them, delete {name}.needed-by beside it"
        )
    if copy is not None and name.isdecimal():
        copy.delete(int(name))
    if (line := step_dirs.remove(folder / name)) is not None:
        raise RunError(line)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"
