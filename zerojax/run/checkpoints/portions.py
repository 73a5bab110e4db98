"""Writes and reads arrays in host memory in portions, without a second copy of all of them.

A portion is some layers of an array. The devices convert it and return it to a buffer in host memory, from
which it is compressed and written while the devices convert the next portions. At most ``UNDER_WAY`` bytes
are in flight. A save has to wait for the last portion, because the next update overwrites the arrays.

Orbax writes and reads only whole arrays, with all layers. Therefore Orbax writes a placeholder of one element
for each of these arrays, together with the rest of the checkpoint. This module replaces the placeholders with
the same library and format that Orbax uses, TensorStore and zarr3.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from zerojax.comm.in_order import on_mesh
from zerojax.comm.xla_options import compiler_options
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.run.checkpoints.conversion import abstract_part, convert
from zerojax.run.checkpoints.entries import Entry, entries_of
from zerojax.sharding.host_memory import SAVING
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.memory import in_host, to_device, to_host
from zerojax.train.fields import specs_of
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState

UNDER_WAY = SAVING // 4
"""Bytes of portions in flight; a larger portion is handled alone. Each takes up to four times its size: as it
is, compressed, and in the buffers of a file."""
_AT_ONCE = 8
"""Portions under way, so that several are compressed at once."""


class Portion(NamedTuple):
    """The layout of some layers of an array by themselves, and the index in the whole array where they begin.

    The index is in canonical form. An array that is not stacked is one portion.
    """

    leaf: ParamLayout
    start: tuple[int, ...]


def portions_of(leaf: ParamLayout, itemsize: int, at_least: int = 1) -> list[Portion]:
    """An array cut into portions of the same shape.

    A portion has at least ``at_least`` layers, if that number divides the layers evenly.
    """
    if not leaf.stack:
        return [Portion(leaf, (0,) * len(leaf.shape))]
    *outer, layers = leaf.stack
    fitting = (
        UNDER_WAY // _AT_ONCE // (leaf.owned * leaf.world.local * itemsize)
    )  # bytes of a layer in a node
    count = max(n for n in range(1, layers + 1) if layers % n == 0 and n <= max(1, at_least, fitting))
    some = dataclasses.replace(leaf, stack=(*(1 for _ in outer), count))
    return [
        Portion(some, (*map(int, np.unravel_index(first, leaf.stack)), *(0 for _ in leaf.shape)))
        for first in range(0, leaf.layers, count)
    ]


def write_in_portions(folder: Path, states: Mapping[str, TrainState], *, own_disks: bool = False) -> None:
    """Write the arrays that are in host memory to a checkpoint that Orbax wrote with placeholders.

    All processes call it together. With ``own_disks`` each writes all that its devices hold.

    Raises:
        ValueError: a file cannot be written.
    """
    context = ts.Context()  # one for all stores, or OCDBT does not copy between them
    writing = _Writing()
    kinds: set[str] = set()
    for prefix, state in states.items():
        for name, entry in entries_of(state).items():
            if in_host(entry.x):
                kind, _, name = name.partition("/")
                kinds.add(prefix + kind)
                _write(folder / (prefix + kind), name, state, entry, writing, context, own_disks)
    writing.finish(0)

    def merge_all() -> None:
        for kind in sorted(kinds):
            merge(folder / kind, context)

    if own_disks:
        merge_all()
    else:
        run_on_process_zero(merge_all)  # once all processes have written all


class _Writing:
    """Writes in flight, the oldest first, and their bytes."""

    def __init__(self) -> None:
        self._bytes = 0
        self._under_way: deque[tuple[int, ts.Future[None]]] = deque()

    def add(self, count: int, written: ts.Future[None]) -> None:
        written.force()  # otherwise it would start only when somebody waits for it
        self._bytes += count
        self._under_way.append((count, written))

    def finish(self, left: int) -> None:
        """Wait until at most ``left`` bytes are in flight."""
        while self._under_way and self._bytes > left:
            count, written = self._under_way.popleft()
            written.result()
            self._bytes -= count


def _write(
    folder: Path,
    name: str,
    state: TrainState,
    entry: Entry,
    writing: _Writing,
    context: ts.Context,
    own_disks: bool,
) -> None:
    """Write this process's part of an array."""
    leaf, x, by_node, dtype = _layout_of(entry), entry.x, entry.by_node, entry.dtype
    nodes = x.shape[:by_node]
    portions = portions_of(leaf, dtype.itemsize)
    like = abstract_part(state.spec, portions[0].leaf, dtype, nodes)
    assert like.sharding is not None
    part = like.sharding.shard_shape(like.shape)
    size = len(state.spec.mesh.local_devices) * math.prod(part) * dtype.itemsize
    creates = own_disks or jax.process_index() == 0
    store = _created(folder, name, (*nodes, *leaf.unsharded_shape), part, dtype, context, creates=creates)
    for portion in portions:
        writing.finish(UNDER_WAY - size)
        stored = _take(state.spec, portion, x, by_node)
        canonical = convert(state.spec, portion.leaf, stored, like, by_node=by_node, to_nodes=by_node)
        # NumPy reads page-locked memory in place. From a GPU's memory JAX copies at 0.5 GB/s.
        # Of equal shards the one with the lowest number remains.
        shards = sorted(to_host(canonical).addressable_shards, key=lambda shard: -shard.replica_id)
        for shard in {shard.index: shard for shard in shards}.values():
            if own_disks or shard.replica_id == 0:
                numbers = np.asarray(shard.data)
                box = _box(portion, shard.index, nodes)
                written = store[box].write(numbers, can_reference_source_data_indefinitely=True)
                writing.add(numbers.nbytes, written.commit)


def read_in_portions(folder: Path, name: str) -> Callable[[TrainState, Entry], Array]:
    """Open an array of a checkpoint, for ``from_canonical``.

    Returns:
        A function that reads the array straight into host memory, in stored form. If the file's chunks have
        more layers than a portion, it reads whole chunks.
    """
    store = ts.open(
        {"driver": "auto", "kvstore": _ocdbt(folder, name)}, open=True, read=True, context=ts.Context()
    ).result()

    def read(state: TrainState, entry: Entry) -> Array:
        spec, leaf, x, by_node, dtype = state.spec, _layout_of(entry), entry.x, entry.by_node, entry.dtype
        nodes, place = x.shape[:by_node], specs_of(x)
        chunk = store.chunk_layout.read_chunk.shape or ()
        at_least = (chunk[by_node + len(leaf.stack) - 1] if leaf.stack else None) or 1
        portions = portions_of(leaf, dtype.itemsize, at_least)
        like = abstract_part(spec, portions[0].leaf, dtype, nodes)
        assert like.sharding is not None
        mine = {index or () for index in like.sharding.addressable_devices_indices_map(like.shape).values()}

        def begin(portion: Portion) -> dict[tuple[slice, ...], ts.Future[np.ndarray]]:
            reading = {index: store[_box(portion, index, nodes)].read() for index in mine}
            for one in reading.values():
                one.force()  # otherwise it would start only when somebody waits for it
            return reading

        ahead = max(1, min(_AT_ONCE, UNDER_WAY // (like.size * like.dtype.itemsize)))
        reading = deque(begin(portion) for portion in portions[:ahead])
        whole: Array | None = None
        for number, portion in enumerate(portions):
            parts = reading.popleft()
            canonical = jax.make_array_from_callback(
                like.shape,
                like.sharding,
                # This state's dtype: a moment may have been saved in another.
                lambda index, parts=parts: parts[index or ()].result().astype(dtype, copy=False),
            )
            reading.extend(map(begin, portions[number + ahead : number + ahead + 1]))
            if not leaf.stack:
                return convert(spec, leaf, canonical, x, by_node=by_node, to_nodes=by_node)
            shape = (*nodes, *portion.leaf.stored_shape)
            stored = jax.ShapeDtypeStruct(shape, x.dtype, sharding=spec.sharding(place))
            part = convert(spec, portion.leaf, canonical, stored, by_node=by_node, to_nodes=by_node)
            whole = _place(spec, portion, whole, part, x, by_node)
        assert whole is not None
        return whole

    return read


def _layout_of(entry: Entry) -> ParamLayout:
    """The layout by which an entry is cut into portions: within a node if each node has its own array."""
    assert entry.leaf is not None  # only weights and arrays of their layout are in host memory
    return entry.leaf.in_node if entry.by_node else entry.leaf


def _take(spec: TrainSpec, portion: Portion, x: Array, by_node: bool) -> Array:
    """A portion of a stored stack, on the devices; an array that is not stacked stays where it is."""
    stack = portion.leaf.stack
    if not stack:
        return x
    own, start = specs_of(x), _start(portion, x.ndim, by_node)

    def take(x: Array, start: Array) -> Array:
        shape = (*x.shape[:by_node], *stack, *x.shape[by_node + len(stack) :])
        return to_device(lax.dynamic_slice(x, [*start], shape, allow_negative_indices=False))

    key = f"take {stack} {x.shape} {x.dtype} {x.sharding}"
    return _compiled(spec, key, take, (own, PartitionSpec()), spec.sharding(own))(x, start)


def _place(
    spec: TrainSpec, portion: Portion, whole: Array | None, part: Array, like: Array, by_node: bool
) -> Array:
    """The stack in host memory with a portion from the devices put in place.

    If ``whole`` is None, the rest of the result is undefined.
    """
    own, to, dtype = specs_of(like), like.sharding, like.dtype  # cached functions must not capture an array
    assert isinstance(to, NamedSharding)
    shape = to.shard_shape(like.shape)

    def begin() -> Array:
        return to_host(lax.empty(shape, dtype))

    def place(x: Array, part: Array, start: Array) -> Array:
        return lax.dynamic_update_slice(x, to_host(part), [*start], allow_negative_indices=False)

    key = f"{portion.leaf.stack} {like.shape} {like.dtype} {to}"
    if whole is None:
        whole = _compiled(spec, f"begin {key}", begin, (), to)()
    put = _compiled(spec, f"place {key}", place, (own, own, PartitionSpec()), to, donate=(0,))
    return put(whole, part, _start(portion, like.ndim, by_node))


def _start(portion: Portion, rank: int, by_node: bool) -> np.ndarray:
    """The index in the stored array at which a portion begins."""
    layers = portion.start[: len(portion.leaf.stack)]
    return np.array((*(0,) * by_node, *layers, *(0,) * (rank - by_node - len(layers))), np.int32)


def _compiled(
    spec: TrainSpec,
    key: str,
    run: Callable[..., Array],
    in_specs: tuple[PartitionSpec, ...],
    to: NamedSharding,
    *,
    donate: tuple[int, ...] = (),
) -> Callable[..., Array]:
    """``run`` on each device by itself. XLA's partitioner would move its slices to another memory."""

    def make() -> Callable[..., Array]:
        parts = on_mesh(run, spec.mesh, in_specs=in_specs, out_specs=to.spec)
        for_mesh = compiler_options(spec.mesh, host_memory=True)
        return jax.jit(parts, out_shardings=to, compiler_options=for_mesh, donate_argnums=donate)

    return spec.once(key, make)


def _box(portion: Portion, index: tuple[slice, ...], nodes: tuple[int, ...] = ()) -> tuple[slice, ...]:
    """The place of a device's part of a portion in the whole array, which may have an axis of nodes."""
    extents, start = (*nodes, *portion.leaf.unsharded_shape), (*(0 for _ in nodes), *portion.start)
    bounds = [
        s.indices(extent) for s, extent in zip(index or (slice(None),) * len(extents), extents, strict=True)
    ]
    return tuple(slice(at + a, at + b) for at, (a, b, _) in zip(start, bounds, strict=True))


def _created(
    folder: Path,
    name: str,
    shape: tuple[int, ...],
    chunk: tuple[int, ...],
    dtype: Any,
    context: ts.Context,
    *,
    creates: bool,
) -> ts.TensorStore:
    """An array in place of a placeholder, in this process's own folder."""
    mine = folder / f"ocdbt.process_{jax.process_index()}"
    spec = {
        "driver": "zarr3",
        "kvstore": _ocdbt(mine, name),
        "store_data_equal_to_fill_value": True,  # Orbax would report absent chunks as missing
        "metadata": {
            "shape": shape,
            "data_type": np.dtype(dtype).name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "fill_value": 0.0,
            "codecs": [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 3}}],
        },
    }
    if creates:
        return ts.open(spec, create=True, delete_existing=True, context=context).result()
    return ts.open(spec, open=True, assume_metadata=True, context=context).result()


def merge(folder: Path, context: ts.Context) -> None:
    """Make the common store refer to the stores of all processes, as Orbax does."""
    merging = ts.Transaction(atomic=True)
    whole = ts.KvStore.open(_ocdbt(folder), context=context).result().with_transaction(merging)
    for part in sorted(folder.glob("ocdbt.process_*")):
        ts.KvStore.open(_ocdbt(part), context=context).result().experimental_copy_range_to(whole).result()
    merging.commit_sync()


def _ocdbt(folder: Path, name: str = "") -> dict[str, Any]:
    base = {"driver": "file", "path": f"{folder.absolute()}/"}
    return {"driver": "ocdbt", "base": base, "path": f"{name.replace('/', '.')}/" if name else ""}
