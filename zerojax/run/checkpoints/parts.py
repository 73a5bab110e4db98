"""Checkpoints on hosts that share no file system.

Each process saves what its devices hold on its own disk, with a manifest. That is a part of the checkpoint,
or all of it if every node has the whole state. Parts of one save have the same time in their manifests. A
part lacks Orbax's merged stores ("manifest.ocdbt" and "d"), because they refer to the parts of all processes.

When a run starts, and at its end, the hosts send each other what they lack. Then every host has the whole
checkpoint, as on a shared file system, and any command can read it on any host and mesh. Files of other parts
are added before the manifest is replaced, so an interruption leaves a valid part.
"""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import tensorstore as ts

from zerojax.comm.gather import gather_from_all
from zerojax.errors import RunError
from zerojax.multihost.files import exchange_files
from zerojax.run.checkpoints import step_dirs
from zerojax.run.checkpoints.manifest import (
    Manifest,
    files_of,
    parse_manifest,
    read_manifest,
    sizes_and_checksums,
    write_manifest,
)
from zerojax.run.checkpoints.portions import merge
from zerojax.validation.untrusted import dump_checked

Hosts = Sequence[Manifest | None]
"""For each process the manifest of its part of a checkpoint; None if it has none."""

_MERGED = re.compile(r"[^/]+/(manifest\.ocdbt|d/.*)")


def bring_to_all_hosts(folder: Path, step: int) -> None:
    """Make a checkpoint whole on every host, from the parts that the hosts have together.

    All processes call it together.

    Raises:
        RunError: a file has changed on its way.
    """
    path, draft = folder / str(step), step_dirs.unfinished(folder, step)
    hosts = newest_save(manifests_of(read_manifest(path) if path.exists() else None))
    if all(one is not None and one.parts == 1 for one in hosts):
        return
    rank, whole = jax.process_index(), [one is not None and one.parts == 1 for one in hosts]
    senders = {whole.index(True)} if any(whole) else {*range(len(hosts))}
    sent = {i: _pieces(one) for i, one in enumerate(hosts) if one is not None and i in senders}
    every = {name: x for i in sorted(sent, reverse=True) for name, x in sent[i].items()}
    mine = hosts[rank]
    place = draft if mine is None else path
    if mine is not None and not whole[rank]:
        for left in {*files_of(path)} - {*mine.files}:  # by a start that was interrupted
            (path / left).unlink()
    lacking = set() if whole[rank] else {*every} - {*(mine.files if mine else ())}
    exchange_files(place, sent.get(rank, {}), lacking)
    if whole[rank]:
        return
    if any(x != every[name] for name, x in sizes_and_checksums(place, lacking).items()):
        raise RunError(f"checkpoint {path} has changed on its way from other hosts: start the run again")
    merge_parts(place, next(one for one in (mine, *hosts) if one is not None))
    if mine is None:
        draft.rename(path)


def merge_parts(path: Path, like: Manifest) -> None:
    """Make one checkpoint of a folder with the files of all parts; ``like`` is the manifest of one."""
    remove_merged(path)
    for kind in {part.parent for part in path.glob("*/ocdbt.process_*")}:
        merge(kind, ts.Context())
    write_manifest(path, like.step, like.saved_at, like.record)


def remove_merged(path: Path) -> None:
    """Remove the stores that refer to the stores of several processes."""
    for kind in filter(Path.is_dir, path.iterdir()):
        (kind / "manifest.ocdbt").unlink(missing_ok=True)
        shutil.rmtree(kind / "d", ignore_errors=True)


def _pieces(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """The files of a checkpoint that are needed on any host; the others are merged from them."""
    return {name: x for name, x in manifest.files.items() if not _MERGED.fullmatch(name)}


def manifests_of(own: Manifest | None, gather: Callable[[Any], list[Any]] = gather_from_all) -> Hosts:
    """The manifests that all processes have; ``gather`` gathers a value from each."""
    texts = gather(own and dump_checked(asdict(own)))
    return [None if text is None else parse_manifest(text) for text in texts]


def newest_save(hosts: Hosts) -> Hosts:
    """The parts of the newest save that is complete; all None if none is."""
    for saved_at in sorted({one.saved_at for one in hosts if one}, reverse=True):
        save = [one if one and one.saved_at == saved_at else None for one in hosts]
        found = [one for one in save if one]
        if any(one.parts == 1 for one in found) or len({one.part for one in found}) == found[0].parts:
            return save
    return [None] * len(hosts)
