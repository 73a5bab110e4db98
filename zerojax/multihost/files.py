"""Files of a job whose hosts share no file system: whether that is so, and how files reach other hosts.

Files travel as collectives, so they need no other port than training, and no process that cannot join the job
sees them. Every process reads its files as one stream, a block at a time; an all-gather brings each block to
all processes.
"""

import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.comm.gather import gather_from_all
from zerojax.errors import ConfigurationError

_GATHERED, _LEAST = 1 << 28, 1 << 16
"""Bytes of the blocks of all processes together, at most; and bytes of one block, at least."""


def on_own_disks(folder: Path) -> bool:
    """Whether each process has this folder on another disk. All processes call it together.

    With several processes, each creates the folder and, for a moment, a file in it.

    Raises:
        ConfigurationError: some processes share the folder, and others do not.
    """
    if jax.process_count() == 1:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{secrets.token_hex(8)}"
    probe.touch()
    try:
        probes = gather_from_all(probe.name)
        seen = gather_from_all(_seen(folder, probes))
    finally:
        probe.unlink(missing_ok=True)
    if all(0 in found for found in seen):
        return False
    if all(found == [rank] for rank, found in enumerate(seen)):
        return True
    sharing = next(rank for rank, found in enumerate(seen) if found != [rank])
    raise ConfigurationError(
        f"{folder} is shared by some processes of the job only: process {sharing} sees the files of "
        f"processes {seen[sharing]}. Put the folder on storage that all share, or start one process per host"
    )


def _seen(folder: Path, probes: Sequence[str]) -> list[int]:
    """The processes whose files this process finds: process 0 looks for all, the others for three."""
    os.listdir(folder)  # an NFS client asks the server again, also about names that it did not find before
    rank = jax.process_index()
    looked_for = range(len(probes)) if rank == 0 else sorted({0, rank - 1, rank})
    return [one for one in looked_for if (folder / probes[one]).exists()]


def exchange_files(folder: Path, offered: Collection[str], wanted: Collection[str]) -> None:
    """Bring files of a folder from the processes that have them to the ones that lack them.

    All processes call it together, each on its own disk. Interrupted, it leaves files incomplete.

    Args:
        folder: the files' folder, which has the same path everywhere.
        offered: names, relative to the folder, of the files that this process can send.
        wanted: names of the files that it lacks. Existing files are overwritten.

    Raises:
        ConfigurationError: no process offers a wanted file.
    """
    offers = gather_from_all(sorted(offered))
    names = sorted({name for one in gather_from_all(sorted(wanted)) for name in one})
    if missing := [name for name in names if not any(name in one for one in offers)]:
        raise ConfigurationError(f"no host of the job has {folder / missing[0]}: put it back on one of them")
    senders = {name: next(rank for rank, one in enumerate(offers) if name in one) for name in names}
    own = [name for name in names if senders[name] == jax.process_index()]
    streams = gather_from_all([(name, (folder / name).stat().st_size) for name in own])
    lengths = [sum(size for _, size in stream) for stream in streams]
    block = max(_LEAST, min(_GATHERED // len(streams), max(lengths)))
    for name in wanted:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    for start in range(0, max(lengths), block):
        parts = [list(_parts(stream, start, start + block)) for stream in streams]
        sent = np.zeros(block, np.uint8)
        for name, place, own in parts[jax.process_index()]:
            with (folder / name).open("rb") as file:
                file.seek(place)
                file.readinto(memoryview(sent)[own])
        for stream, data in zip(parts, multihost_utils.process_allgather(sent), strict=True):
            for name, place, own in stream:
                if name in wanted:
                    with (folder / name).open("r+b") as file:
                        file.seek(place)
                        file.write(data[own])


def _parts(stream: Sequence[tuple[str, int]], start: int, stop: int) -> Iterator[tuple[str, int, slice]]:
    """The files in a block of a stream: a name, the place in the file, and the slice of the block."""
    end = 0
    for name, size in stream:
        begin, end = end, end + size
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield name, low - begin, slice(low - start, high - start)


def share_folder(folder: Path) -> None:
    """Bring all files of process 0's folder to hosts on whose disks they are missing or differ in size.

    All processes call it together. Small files are always sent, because they may differ in content alone.

    Raises:
        ConfigurationError: a host has a file that process 0 does not have.
    """
    if not on_own_disks(folder):
        return
    (there, *_) = gather_from_all(_sizes(folder))
    mine, first = _sizes(folder), jax.process_index() == 0
    lacking = [name for name, size in there.items() if size < _LEAST or mine.get(name) != size]
    others = gather_from_all(sorted({*mine} - {*there}))
    if found := next((name for each in others for name in each), None):
        raise ConfigurationError(
            f"{folder / found} is on a host, and not on process 0's: it is another run's. Move it away"
        )
    exchange_files(folder, there if first else (), () if first else lacking)


def _sizes(folder: Path) -> dict[str, int]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}
