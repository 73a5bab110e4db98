"""Snapshots: the state of a run in memory of the launcher, for a restart that reads no disk.

A snapshot holds the same arrays as a checkpoint. Each process keeps the shards of its devices, as they are,
so only the same job on the same mesh can continue from them, bit for bit. If the launcher asks for it, each
process also keeps a copy of the shards of a process on another host, for the case that the host is lost.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, UInt8

from zerojax.comm.gather import gather_from_all
from zerojax.errors import ConfigurationError, RunError, error_line
from zerojax.formatting import size
from zerojax.multihost.background import Worker
from zerojax.multihost.snapshot_memory import (
    Checksums,
    Generation,
    Intervals,
    SnapshotMemory,
    copy_bytes,
)
from zerojax.run.checkpoints.canonical import with_stored
from zerojax.run.checkpoints.entries import Entry, entries_of
from zerojax.run.checkpoints.manifest import DamagedError, Manifest, Record, parse_manifest
from zerojax.run.checkpoints.snapshot_moves import FromCopies, FromNode, Move, moved, of_neighbours
from zerojax.run.checkpoints.store import fit_beside_training
from zerojax.sharding.cuda_driver import copy_to_host, page_locked
from zerojax.sharding.host_memory import memory_limits, shortage
from zerojax.sharding.layout import from_stored, to_stored
from zerojax.sharding.memory import in_host
from zerojax.sharding.mesh import NODE, node_leaders, on_gpus
from zerojax.train.state import TrainState, check_there
from zerojax.validation.untrusted import dump_checked

_SHARE = 0.02
"""The most that training may wait for snapshots, as a share of its time."""

Places = Mapping[str, UInt8[np.ndarray, " bytes"]]
"""Where a generation has its arrays, by name."""
Fill = Callable[[Places], None]


@dataclass(frozen=True)
class Snapshot(Manifest):
    """A snapshot to resume from: the manifest of this process's part, and the part itself.

    ``files`` has an entry for each array and index, instead of a checkpoint's files.

    Attributes:
        generation: this process's part; None if it lacks it.
        move: how processes that lack their parts get them; None if none does.
        copy: the part of a process on another host; None if this process has none, or none is needed.
    """

    generation: Generation | None = field(kw_only=True, compare=False)
    move: Move | None = field(default=None, kw_only=True)
    copy: "Snapshot | None" = field(default=None, kw_only=True, compare=False)

    @property
    def held(self) -> dict[str, UInt8[np.ndarray, " bytes"]] | None:
        """The bytes of this process's part, by name; None if it lacks it."""
        return None if self.generation is None else self.generation.arrays(self.files)

    def restore(self, state: TrainState) -> TrainState:
        """The snapshot's arrays in a state; ``state``, filled or abstract, gives the spec.

        On another number of nodes, and if all nodes get the state of one, error feedback begins with zeros.

        Raises:
            RunError: the arrays have other sizes.
        """
        other_nodes = self.record.mesh[0] != state.spec.world.nodes
        without_feedback = other_nodes or isinstance(self.move, FromNode)
        held = [self.held]
        if isinstance(self.move, FromCopies):
            held.append(None if self.copy is None else self.copy.held)
        placed = dict[str, Array]()
        for name, entry in entries_of(state).items():
            if without_feedback and name.startswith("residual/"):
                continue
            arrays = [_placed(entry.x, _parts(entry, name, one, other_nodes=other_nodes)) for one in held]
            placed[name] = arrays[0] if self.move is None else moved(self.move, *arrays)
        return jax.block_until_ready(with_stored(state, placed))


class Snapshots:
    """The snapshots that this process takes and finds. All processes of a run take them at the same steps."""

    say: Callable[[str], object] = print
    """Prints a line, from another thread."""

    def __init__(self, memory: SnapshotMemory, intervals: Intervals, mesh: Mesh) -> None:
        self._memory, self._intervals, self._mesh = memory, intervals, mesh
        self._oldest = [*range(intervals.own)]  # numbers of own generations, the oldest first
        self._kept: int | None = None  # the own generation of the newest copy
        self._next_copy = intervals.own  # the generation for it
        self._copied = -math.inf
        self._worker = Worker("snapshot", 2)
        self._locks = ExitStack()
        self._begun = time.monotonic()
        self._pause = self._written = 0.0
        self._beside_training: bool | None = None
        self._intact: dict[tuple[int, str], bool] = {}  # by place and text, whether a snapshot's arrays fit
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

        If there is none, the newest that they can have: from copies in other hosts' memory, or, if each node
        holds the whole state, from one process.

        Args:
            config: the settings, spelled out. A snapshot of a run with other settings does not count; the
                number of nodes may differ if each node holds the whole state.
            at_least: the step of the newest checkpoint, if there is one; an older snapshot does not count.
        """
        self._refresh()
        now = _settings(config)

        def found(generations: Sequence[Generation]) -> dict[int, Snapshot]:
            every = (one for one in map(_read, generations) if one is not None)
            return {
                one.step: one
                for one in every
                if _settings(one.record.config) == now and (at_least is None or one.step >= at_least)
            }

        own, copies = found(self._own), found(self._copies)
        steps = gather_from_all([[*own], [*copies]])
        copied = set.intersection(*({*mine} & {*theirs} for mine, theirs in steps))
        self._keep(max(copied, default=None), own, copies)
        everywhere = set.intersection(*({*mine} for mine, _ in steps))
        anywhere = set.union(*({*mine} for mine, _ in steps))
        # An older one that all have is not sent, and keeps all error feedback.
        for candidates, enough in ((everywhere, all), (anywhere, any)):
            for step in sorted(candidates, reverse=True):
                intact = gather_from_all(step in own and self._is_intact(own[step]))
                if enough(intact) and (one := self._chosen(step, own, copies, intact, now)):
                    return one
        return None

    def _chosen(
        self,
        step: int,
        own: Mapping[int, Snapshot],
        copies: Mapping[int, Snapshot],
        intact: list[bool],
        settings: Any,
    ) -> Snapshot | None:
        """The snapshot of a step that some processes have intact, if the others can get it."""
        mine = own[step] if intact[jax.process_index()] else None
        generation = None if mine is None else mine.generation
        self._use(generation)
        if all(intact):
            return mine
        leaders, copy = node_leaders(self._mesh), None
        if not _each_leads(len(intact), leaders):
            return None
        if settings["zero"].get("state_spread") == "node":
            move = FromNode(leaders.index(intact.index(True)))
        elif move := self._from_copies(copies.get(step), [intact[leader] for leader in leaders], leaders):
            copy = copies.get(step)
            self._keep(step, own, copies)
        else:
            return None
        source = intact.index(True)
        text = gather_from_all(generation and generation.text() if jax.process_index() == source else None)
        manifest = parse_manifest(text[source])
        return Snapshot(**vars(manifest), generation=generation, move=move, copy=copy)

    def _from_copies(
        self, copy: Snapshot | None, by_node: Sequence[bool], leaders: Sequence[int]
    ) -> FromCopies | None:
        """How nodes without a snapshot get it from copies; None if a copy is missing or damaged."""
        if not (distance := self._intervals.distance):
            return None
        has_copy = gather_from_all(copy is not None and self._is_intact(copy))
        lacking = tuple(node for node, there in enumerate(by_node) if not there)
        keepers = (leaders[(node + distance) % len(leaders)] for node in lacking)
        return FromCopies(lacking, distance) if all(has_copy[keeper] for keeper in keepers) else None

    def _use(self, newest: Generation | None) -> None:
        """Overwrite a generation last."""
        self._oldest.sort(key=lambda number: self._memory.generations[number] is newest)

    def _keep(self, step: int | None, own: Mapping[int, Snapshot], copies: Mapping[int, Snapshot]) -> None:
        """Overwrite neither this process's part of a step nor the copy here, until there is a newer copy."""
        if step in own:
            self._kept = [one is own[step].generation for one in self._memory.generations].index(True)
        if step in copies:
            first, second = self._intervals.own, self._intervals.own + 1
            self._next_copy = second if copies[step].generation is self._memory.generations[first] else first

    @property
    def _own(self) -> list[Generation]:
        return self._memory.generations[: self._intervals.own]

    @property
    def _copies(self) -> list[Generation]:
        return self._memory.generations[self._intervals.own :]

    def check(self) -> None:
        """Look whether the newest snapshot is intact, so that ``choose`` knows it at once.

        A process that stands by does it while the processes before it end.
        """
        self._refresh()
        found = filter(None, map(_read, self._own))
        if newest := max(found, key=lambda one: one.step, default=None):
            self._is_intact(newest)

    def _refresh(self) -> None:
        """Map and lock the memory again if another process has changed its size."""
        if self._memory.update():
            self._locks.close()
            self._lock()

    def _is_intact(self, one: Snapshot) -> bool:
        assert one.generation is not None
        key = one.generation.start, one.generation.text() or ""
        if key not in self._intact:
            self._intact[key] = one.generation.is_intact(one.files)
        return self._intact[key]

    def reserve(self, step: int, state: TrainState, record: Record) -> None:
        """Make room for snapshots of a state, which is of a step; all processes call it together.

        Raises:
            ConfigurationError: the host has no room, or no copies for other hosts can be made.
        """
        if self._intervals.copy_seconds:
            self._check_copies(state)
        sizes = _sizes(_arrays(state))
        arrays, count = sum(sizes.values()), len(sizes)
        wanted = self._memory.size_for(arrays, count)
        if short := shortage(gather_from_all((max(0, wanted - self._memory.held), memory_limits()))):
            what, less = ("two snapshots", "--snapshot-seconds 0, so that a restart uses checkpoints")
            if self._copies:
                what, less = "three snapshots and two copies for another host", "--copy-seconds 0"
            raise ConfigurationError(
                f"{what} of the state of {short.processes} processes take {size(short.needed)} of "
                f"this host's memory, and {size(short.free)} are free. Launch with {less}, "
                "or use a host or container with more memory."
            )
        if self._memory.size != wanted:  # a new job, or another number of nodes
            jax.block_until_ready(_arrays(state))
            dropped = self._memory.size > 0
            self._locks.close()
            self._memory.resize(arrays, count)
            self._worker.put(self._memory.touch)
            self._worker.put(self._lock)
            if dropped:  # the snapshot from which this run continues, and would again
                self.wait()
                self._begun = time.monotonic()
                last = self._memory.generations[self._oldest[-1]]
                self._write(last, step, _arrays(state), record)

    def _check_copies(self, state: TrainState) -> None:
        if state.spec.zero.state_spread == "node":
            raise ConfigurationError(
                'with state_spread = "node" every host has the whole state: leave out --copy-seconds'
            )
        if not _each_leads(jax.process_count(), node_leaders(self._mesh)):
            raise ConfigurationError(
                f"--copy-seconds needs a process for each node, and {jax.process_count()} processes have "
                f"{self._mesh.shape[NODE]} nodes: leave out --mesh.nodes, or --copy-seconds"
            )
        if not self._intervals.distance:
            self.say("no host keeps another's state: --copy-seconds needs nodes on two hosts")

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
        after = max(self._intervals.seconds - self._written, self._pause / _SHARE)
        return time.monotonic() - self._begun >= after

    def take(self, step: int, state: TrainState, record: Record) -> None:
        """Start a snapshot of the state after a step, which has ended; all processes call it together.

        Process zero has logged the steps. Training continues when the arrays are copied on the devices. If
        there is no room for copies, or if arrays are in host memory, it waits until all is written. It also
        waits while other hosts get copies.

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
        # Process zero has logged the steps once it gathers. Without this wait another process could have a
        # snapshot of steps whose lines process zero loses as it dies.
        copies_are_due = any(gather_from_all(bool(self._copies) and self._copy_is_due))
        number = next(number for number in self._oldest if number != self._kept)
        generation = self._memory.generations[number]
        self._use(generation)
        if self._beside_training:
            copies = _copies(arrays)
            self._worker.put(lambda: self._write(generation, step, copies, record))
        else:
            self._write(generation, step, arrays, record)
        if not (first and self._beside_training):  # which compiles the copies
            self._pause = time.monotonic() - self._begun
        if copies_are_due:
            self._copy_to_other_hosts(step, _arrays(state), record)
            self._kept = number

    def _write(self, generation: Generation, step: int, arrays: dict[str, Array], record: Record) -> None:
        held = self._fill(generation, step, record, _sizes(arrays), functools.partial(_copy, arrays))
        first, self._written = not self._written, time.monotonic() - self._begun
        if first:
            self.say(f"the first snapshot, of step {step}: {size(held)} in {self._written:.1f} s")

    def _fill(
        self, generation: Generation, step: int, record: Record, sizes: Mapping[str, int], fill: Fill
    ) -> int:
        """Write a generation; returns the bytes of its arrays."""

        def describe(files: Checksums) -> str:
            return dump_checked(asdict(Manifest(step, time.time(), record, files)))

        try:
            return generation.write(sizes, fill, describe)
        except Exception as error:
            raise RunError(
                f"cannot keep a snapshot of step {step} in memory: {error_line(error)}. Launch with "
                "--snapshot-seconds 0 to do without."
            ) from error

    @property
    def _copy_is_due(self) -> bool:
        return time.monotonic() - self._copied >= self._intervals.copy_seconds

    def _copy_to_other_hosts(self, step: int, arrays: Mapping[str, Array], record: Record) -> None:
        """Copy each process's part to the memory of a process on another host, array by array."""
        begun, first = time.monotonic(), self._copied == -math.inf

        def fill(places: Places) -> None:
            for name, x in arrays.items():
                theirs = {name: of_neighbours(x, self._intervals.distance)}
                _copy(theirs, {part: places[part] for part in _part_names(name, x)})

        generation = self._memory.generations[self._next_copy]
        held = self._fill(generation, step, record, _sizes(arrays), fill)
        gather_from_all(None)  # all have theirs
        self._next_copy = 2 * self._intervals.own + 1 - self._next_copy
        self._copied = time.monotonic()
        if first:
            self.say(f"another host has a copy of step {step}: {size(held)} in {self._copied - begun:.1f} s")

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


def _each_leads(processes: int, leaders: Sequence[int]) -> bool:
    """Whether each process leads one node, and none leads two."""
    return sorted(leaders) == [*range(processes)]


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


def _copy(arrays: dict[str, Array], places: Places) -> None:
    """Copy this process's parts of arrays to their places, beside steps, and then drop the arrays."""
    parts = _shards(jax.block_until_ready(arrays))
    on_gpu = {name for name, x in parts.items() if on_gpus(x.devices()) and not in_host(x)}
    copy_to_host([(parts[name], places[name]) for name in on_gpu])
    for name in parts.keys() - on_gpu:
        copy_bytes(np.asarray(parts[name]), places[name])
    arrays.clear()


def _parts(
    entry: Entry, name: str, held: Mapping[str, np.ndarray] | None, *, other_nodes: bool
) -> list[np.ndarray]:
    """This process's parts of an array, flat and in their dtype; zeros if it holds none.

    The padding of a weight depends on the number of nodes. With ``other_nodes`` the snapshot is of another
    number, so weights that every node holds are padded again if it differs. One node holds all weights.
    """
    x, leaf = entry.x, entry.leaf
    names, wanted = _part_names(name, x), _shard_bytes(x)
    if held is None:
        return [np.zeros(wanted // x.dtype.itemsize, x.dtype) for _ in names]
    parts = [held[part].view(x.dtype) for part in names if part in held]
    whole = leaf is not None and (leaf.in_every_node or leaf.world.nodes == 1)
    differs = any(part.nbytes != wanted for part in parts)
    if other_nodes and differs and leaf is not None and whole and len(parts) == len(names):
        rows = np.concatenate([part.reshape(leaf.layers, -1) for part in parts], axis=1)
        rows = to_stored(from_stored(rows, leaf), leaf).reshape(leaf.layers, -1)
        parts = [part.reshape(-1) for part in np.split(rows, len(names), axis=1)]
        differs = any(part.nbytes != wanted for part in parts)
    if differs or len(parts) != len(names):
        raise RunError(f"the snapshot in memory has no {name} of this run's size: launch the run again")
    return parts


def _placed(like: Array, parts: Sequence[np.ndarray]) -> Array:
    """An array with the shape, dtype and sharding of ``like``, from this process's parts."""
    shape, sharding = like.shape, like.sharding
    # JAX would use the memory itself on CPUs, and a later snapshot overwrites it.
    copied = parts if on_gpus(sharding.device_set) else [part.copy() for part in parts]
    shards = [part.reshape(sharding.shard_shape(shape)) for part in copied]
    by_index = dict(zip(_indices(like), shards, strict=True))
    return jax.make_array_from_callback(shape, sharding, lambda index: by_index[index or ()])
