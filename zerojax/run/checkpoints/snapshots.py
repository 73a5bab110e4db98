"""Snapshots: the state of a run in memory of the launcher, for a restart that reads no disk.

A snapshot holds the same arrays as a checkpoint. Each process keeps the shards of its devices, as they are,
so only the same job on the same mesh can continue from them, bit for bit.
"""

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, UInt8

from zerojax.comm.gather import gather_from_all
from zerojax.errors import ConfigurationError, RunError, error_line
from zerojax.formatting import size
from zerojax.multihost.background import Worker
from zerojax.multihost.snapshot_memory import Checksums, Generation, SnapshotMemory, copy_bytes, file_size
from zerojax.run.checkpoints.canonical import with_stored
from zerojax.run.checkpoints.entries import Entry, entries_of
from zerojax.run.checkpoints.manifest import DamagedError, Manifest, Record, parse_manifest
from zerojax.run.checkpoints.store import fit_beside_training
from zerojax.sharding.cuda_driver import copy_to_host, page_locked
from zerojax.sharding.host_memory import memory_limits, shortage
from zerojax.sharding.layout import from_stored, to_stored
from zerojax.sharding.memory import in_host, to_device
from zerojax.sharding.mesh import NODE, node_leaders, on_gpus
from zerojax.train.state import TrainState, check_there
from zerojax.validation.untrusted import dump_checked

_SHARE = 0.02
"""The most that training may wait for snapshots, as a share of its time."""


@dataclass(frozen=True)
class Snapshot(Manifest):
    """A snapshot to resume from: the manifest of this process's part, and the part itself.

    ``files`` has an entry for each array and index, instead of a checkpoint's files.

    Attributes:
        generation: this process's part.
        source: the node whose parts go to all others, because one lacks its own; None if none does.
        lacks: whether this process lacks its part.
    """

    generation: Generation = field(kw_only=True, compare=False)
    source: int | None = field(default=None, kw_only=True)
    lacks: bool = field(default=False, kw_only=True)

    def restore(self, state: TrainState) -> TrainState:
        """The snapshot's arrays in a state; ``state``, filled or abstract, gives the spec.

        On another number of nodes, and if a node has no snapshot, error feedback begins with zeros.

        Raises:
            RunError: the arrays have other sizes.
        """
        held = {} if self.lacks else self.generation.arrays(self.files)
        other_nodes = self.record.mesh[0] != state.spec.world.nodes
        entries = {
            name: entry
            for name, entry in entries_of(state).items()
            if not ((other_nodes or self.source is not None) and name.startswith("residual/"))
        }
        placed = dict[str, Array]()
        for name, entry in entries.items():
            parts = _zeros(entry.x) if self.lacks else _parts(entry, name, held, other_nodes=other_nodes)
            x = _placed(entry.x, parts)
            placed[name] = x if self.source is None else _of_node(x, self.source)
        return jax.block_until_ready(with_stored(state, placed))


class Snapshots:
    """The snapshots that this process takes and finds. All processes of a run take them at the same steps."""

    say: Callable[[str], object] = print
    """Prints a line, from another thread."""

    def __init__(self, memory: SnapshotMemory, seconds: float, mesh: Mesh) -> None:
        self._memory, self._seconds, self._mesh = memory, seconds, mesh
        self._next = 0  # the generation to overwrite
        self._worker = Worker("snapshot", 2)
        self._locks = ExitStack()
        self._begun = time.monotonic()
        self._pause = self._written = 0.0
        self._beside_training: bool | None = None
        self._intact: dict[str, bool] = {}  # by a snapshot's text, whether its arrays fit
        self._lock()

    @classmethod
    def find(cls, mesh: Mesh) -> Self | None:
        """The snapshots that the launcher keeps of a run on a mesh; None if it keeps none.

        Locks the memory's pages for this process's GPUs. That takes seconds, so a process that stands by
        calls this before it waits.
        """
        return None if (kept := SnapshotMemory.find()) is None else cls(*kept, mesh)

    def _lock(self) -> None:
        """Lock the memory's pages. Its size is zero before the first start of a job."""
        if not self._memory.size:
            return
        try:
            self._locks.enter_context(page_locked(self._memory.whole, self._mesh))
        except RunError as error:
            raise RunError(
                f"cannot lock {size(self._memory.size)} of this host's memory for snapshots: {error}. Launch "
                "with --snapshot-seconds 0 to do without."
            ) from error
        self._memory.let_go()

    def choose(self, config: Mapping[str, Any], at_least: int | None) -> Snapshot | None:
        """The newest intact snapshot that all processes have; all call it together.

        If there is none and each node holds the whole state, the newest that one process has.

        Args:
            config: the settings, spelled out. A snapshot of a run with other settings does not count; the
                number of nodes may differ if each node holds the whole state.
            at_least: the step of the newest checkpoint, if there is one; an older snapshot does not count.
        """
        self._refresh()
        now = _settings(config)
        mine = {
            one.step: one
            for generation in self._memory.generations
            if (one := _read(generation)) is not None
            and _settings(one.record.config) == now
            and (at_least is None or one.step >= at_least)
        }
        steps = [{*some} for some in gather_from_all([*mine])]
        leaders = node_leaders(self._mesh)
        one_has_all = now["zero"].get("state_spread") == "node" and len({*leaders}) == len(steps)
        # An older one that all have keeps their error feedback, and is not sent.
        common, others = set.intersection(*steps), set.union(*steps) if one_has_all else set[int]()
        for candidates, enough in ((common, all), (others, any)):
            for step in sorted(candidates, reverse=True):
                intact = gather_from_all(step in mine and self._is_intact(mine[step]))
                if enough(intact):
                    return self._chosen(mine.get(step), intact, leaders)
        return None

    def _chosen(self, own: Snapshot | None, intact: list[bool], leaders: list[int]) -> Snapshot:
        """A snapshot that some processes have intact; the others get what the first of them has."""
        first, second = self._memory.generations
        generation = second if own is None else own.generation
        self._next = 1 if generation is first else 0
        if own is not None and all(intact):
            return own
        source, rank = intact.index(True), jax.process_index()
        text = gather_from_all(generation.text() if rank == source else None)[source]
        more = {"source": leaders.index(source), "lacks": not intact[rank]}
        return Snapshot(**vars(parse_manifest(text)), generation=generation, **more)

    def check(self) -> None:
        """Look whether the newest snapshot is intact, so that ``choose`` knows it at once.

        A process that stands by does it while the processes before it end.
        """
        self._refresh()
        found = filter(None, map(_read, self._memory.generations))
        if newest := max(found, key=lambda one: one.step, default=None):
            self._is_intact(newest)

    def _refresh(self) -> None:
        """Map and lock the memory again if another process has changed its size."""
        if self._memory.update():
            self._locks.close()
            self._lock()

    def _is_intact(self, one: Snapshot) -> bool:
        text = one.generation.text() or ""
        if text not in self._intact:
            self._intact[text] = one.generation.is_intact(one.files)
        return self._intact[text]

    def reserve(self, state: TrainState) -> None:
        """Make room for two snapshots of a state; all processes call it together.

        Raises:
            ConfigurationError: the host has no room.
        """
        sizes = _sizes(_arrays(state))
        arrays, count = sum(sizes.values()), len(sizes)
        needed = max(0, file_size(arrays, count) - self._memory.held)
        if short := shortage(gather_from_all((needed, memory_limits()))):
            raise ConfigurationError(
                f"two snapshots of the state of {short.processes} processes take {size(short.needed)} of "
                f"this host's memory, and {size(short.free)} are free. Launch with --snapshot-seconds 0, so "
                "that a restart uses checkpoints, or use a host or container with more memory."
            )
        if self._memory.size != file_size(arrays, count):  # a new job, or another number of nodes
            jax.block_until_ready(_arrays(state))
            self._locks.close()
            self._memory.resize(arrays, count)
            self._worker.put(self._memory.touch)
            self._worker.put(self._lock)

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being written, or its memory prepared."""
        return self._worker.left > 0

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next snapshot.

        True if a failure would now repeat the given seconds of work, unless waiting for snapshots would take
        more than 2% of the time.
        """
        after = max(self._seconds - self._written, self._pause / _SHARE)
        return time.monotonic() - self._begun >= after

    def take(self, step: int, state: TrainState, record: Record) -> None:
        """Start a snapshot of the state after a step, which has ended; all processes call it together.

        Training continues when the arrays are copied on the devices. If there is no room for copies, or if
        arrays are in host memory, it waits until all is written.

        Raises:
            RunError: the snapshot before it could not be written.
        """
        self.wait()
        self._begun = time.monotonic()
        check_there(state)
        arrays = _arrays(state)
        if first := self._beside_training is None:
            room = fit_beside_training([state]) and not any(map(in_host, arrays.values()))
            self._beside_training = all(gather_from_all(room))
        generation, self._next = self._memory.generations[self._next], 1 - self._next
        if self._beside_training:
            copies = _copies(arrays)
            self._worker.put(lambda: self._write(generation, step, copies, record))
        else:
            self._write(generation, step, arrays, record)
        if not (first and self._beside_training):  # which compiles the copies
            self._pause = time.monotonic() - self._begun

    def _write(self, generation: Generation, step: int, arrays: dict[str, Array], record: Record) -> None:
        def describe(files: Checksums) -> str:
            return dump_checked(asdict(Manifest(step, time.time(), record, files)))

        try:
            held = generation.write(_sizes(arrays), functools.partial(_copy, arrays), describe)
        except Exception as error:
            raise RunError(
                f"cannot keep a snapshot of step {step} in memory: {error_line(error)}. Launch with "
                "--snapshot-seconds 0 to do without."
            ) from error
        first, self._written = not self._written, time.monotonic() - self._begun
        if first:
            self.say(f"the first snapshot, of step {step}: {size(held)} in {self._written:.1f} s")

    def wait(self) -> None:
        """Wait until no snapshot is being written; errors as for ``take``."""
        while not self._worker.wait(1.0):
            pass
        if self._worker.error is not None:
            raise self._worker.error

    def close(self) -> None:
        """End the thread, once no snapshot is being written."""
        self._worker.put(self._locks.close)
        self._worker.close()


def _settings(config: Mapping[str, Any]) -> Any:
    """The settings on which a snapshot depends, as JSON has them."""
    found = json.loads(json.dumps(config))
    zero, mesh = found["zero"], found.get("mesh", {})
    # On one node delta keeps a replica beside the weights; on several the weights are their own replica.
    if zero.get("state_spread") == "node" and not (zero.get("weights_delta") and mesh.get("nodes") == 1):
        mesh.pop("nodes", None)
    return found


def _read(generation: Generation) -> Snapshot | None:
    """This process's part of a complete snapshot, whose arrays are not checked yet."""
    if (text := generation.text()) is None:
        return None
    try:
        return Snapshot(**vars(parse_manifest(text)), generation=generation)
    except DamagedError:
        return None


def _arrays(state: TrainState) -> dict[str, Array]:
    return {name: entry.x for name, entry in entries_of(state).items()}


@jax.jit
def _copies(arrays: dict[str, Array]) -> dict[str, Array]:
    """Copies of arrays, which stay valid when a step takes the arrays over."""
    return jax.tree.map(jnp.copy, arrays)


def _indices(x: Array) -> list[tuple[slice, ...]]:
    """The parts of an array that this process's devices hold, each once."""
    indices = x.sharding.addressable_devices_indices_map(x.shape).values()
    return [*dict.fromkeys(index or () for index in indices)]


def _shard_bytes(x: Array) -> int:
    return int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize


def _part_names(name: str, x: Array) -> list[str]:
    """The names of this process's parts of an array, in the order of ``_indices``."""
    return [f"{name}.{number}" for number in range(len(_indices(x)))]


def _sizes(arrays: Mapping[str, Array]) -> dict[str, int]:
    """The bytes of this process's parts of arrays, by their names."""
    return {part: _shard_bytes(x) for name, x in arrays.items() for part in _part_names(name, x)}


def _shards(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """This process's parts of arrays, on one device each, with their names."""
    parts: dict[str, Array] = {}
    for name, x in arrays.items():
        by_index = {shard.index: shard.data for shard in x.addressable_shards}
        own = (by_index[index] for index in _indices(x))
        parts |= zip(_part_names(name, x), own, strict=True)
    return parts


def _copy(arrays: dict[str, Array], places: Mapping[str, UInt8[np.ndarray, " bytes"]]) -> None:
    """Copy this process's parts of arrays to their places, beside steps, and then drop the arrays."""
    parts = _shards(jax.block_until_ready(arrays))
    on_gpu = {name for name, x in parts.items() if on_gpus(x.devices()) and not in_host(x)}
    copy_to_host([(parts[name], places[name]) for name in on_gpu])
    for name in parts.keys() - on_gpu:
        copy_bytes(np.asarray(parts[name]), places[name])
    arrays.clear()


def _parts(entry: Entry, name: str, held: Mapping[str, np.ndarray], *, other_nodes: bool) -> list[np.ndarray]:
    """This process's parts of an array, flat and in their dtype.

    The padding of a weight depends on the number of nodes. With ``other_nodes`` the snapshot is of another
    number, so weights that every node holds are padded again. One node holds all weights.
    """
    x, leaf = entry.x, entry.leaf
    names = _part_names(name, x)
    parts = [held[part].view(x.dtype) for part in names if part in held]
    whole = leaf is not None and (leaf.in_every_node or leaf.world.nodes == 1)
    if other_nodes and leaf is not None and whole and len(parts) == len(names):
        rows = np.concatenate([part.reshape(leaf.layers, -1) for part in parts], axis=1)
        rows = to_stored(from_stored(rows, leaf), leaf).reshape(leaf.layers, -1)
        parts = [part.reshape(-1) for part in np.split(rows, len(names), axis=1)]
    if len(parts) != len(names) or any(part.nbytes != _shard_bytes(x) for part in parts):
        raise RunError(f"the snapshot in memory has no {name} of this run's size: launch the run again")
    return parts


def _zeros(x: Array) -> list[np.ndarray]:
    """Zeros in place of this process's parts of an array."""
    return [np.zeros(_shard_bytes(x) // x.dtype.itemsize, x.dtype) for _ in _indices(x)]


def _of_node(x: Array, source: int) -> Array:
    """An array that each node holds whole, as one node has it; bit for bit, in the memory where it was."""
    assert isinstance(x.sharding, NamedSharding)
    mesh, spec = x.sharding.mesh, x.sharding.spec

    def of_source(own: Array) -> Array:
        # NCCL sums bytes, and neither NaN nor -0.0 changes.
        bits = lax.bitcast_convert_type(own, jnp.uint8) if own.dtype != bool else own.astype(jnp.uint8)
        bits = lax.psum(jnp.where(lax.axis_index(NODE) == source, bits, 0), NODE)
        return lax.bitcast_convert_type(bits, own.dtype) if own.dtype != bool else bits.astype(bool)

    move = jax.shard_map(of_source, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.device_put(jax.jit(move)(to_device(x)), x.sharding)


def _placed(like: Array, parts: Sequence[np.ndarray]) -> Array:
    """An array with the shape, dtype and sharding of ``like``, from this process's parts."""
    shape, sharding = like.shape, like.sharding
    # JAX would use the memory itself on CPUs, and a later snapshot overwrites it.
    copied = parts if on_gpus(sharding.device_set) else [part.copy() for part in parts]
    shards = [part.reshape(sharding.shard_shape(shape)) for part in copied]
    by_index = dict(zip(_indices(like), shards, strict=True))
    return jax.make_array_from_callback(shape, sharding, lambda index: by_index[index or ()])
