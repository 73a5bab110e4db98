"""Converts an array between its stored and its canonical form, on its devices.

If a leaf's first dimension divides by the number of devices, the canonical form is cut along it, just as the
owners hold the leaf, and nothing is sent. Other leaves are small or have odd sizes. They are gathered and cut
again one at a time, so that no device holds more than one whole leaf.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from zerojax.comm.in_order import on_mesh
from zerojax.optim.low_precision import as_moment
from zerojax.sharding.layout import OWNED, ParamLayout, from_stored, to_stored
from zerojax.sharding.memory import to_device
from zerojax.sharding.mesh import LOCAL, NODE
from zerojax.train.spec import TrainSpec


def convert(
    train_spec: TrainSpec,
    leaf: ParamLayout,
    x: Array,
    like: jax.ShapeDtypeStruct | Array,
    *,
    by_node: bool,
    to_nodes: bool,
) -> Array:
    """Convert one array to its canonical or stored form, whichever ``like`` has.

    ``leaf`` is the array's layout, ``x`` the array in the other form, and ``like`` the wanted array or its
    description. With ``by_node`` the first axis of ``x`` is the nodes, with ``to_nodes`` the first axis of
    the result. The dtype of a moment may differ between the two forms. One function is compiled per layout
    and mesh.
    """
    # The compiled function is cached, so it must not capture an array.
    source, target, whole, dtype = _spec(x), _spec(like), like.shape, like.dtype

    def on_device(part: Array) -> Array:
        # A node's own arrays are laid out as if the node were all devices.
        layout = leaf.in_node if by_node or leaf.in_every_node else leaf
        shape = whole[1:] if to_nodes else whole
        cut = _cut_rows if _is_cut_by_rows(layout) else _gather_and_cut
        have = PartitionSpec(*source[1:]) if by_node else source
        want = PartitionSpec(*target[1:]) if to_nodes else target
        part = as_moment(to_device(part), dtype)
        done = cut(layout, have, want, shape)(part[0] if by_node else part)
        return done[None] if to_nodes else done

    def make() -> Callable[[Array], Array]:
        return jax.jit(on_mesh(on_device, train_spec.mesh, in_specs=source, out_specs=target))

    layout = f"{leaf.unsharded_shape} {leaf.stack} {leaf.shard} {leaf.parts} {leaf.in_every_node}"
    key = f"canonical {layout} {x.shape} {x.sharding.memory_kind} {source} {like.shape} {dtype} {target}"
    # One at a time, to bound the memory, and because XLA:CPU starts and runs programs on the same few
    # threads: a process that starts 32 at once deadlocks when another process lags behind.
    return jax.block_until_ready(jax.device_put(train_spec.once_on_mesh(key, make)(x), like.sharding))


def _is_cut_by_rows(leaf: ParamLayout) -> bool:
    """Whether each device owns a range of the first dimension of a layer."""
    return leaf.padded == leaf.size and bool(leaf.shape) and leaf.shape[0] % leaf.world.size == 0


def _cut_rows(
    leaf: ParamLayout, source: PartitionSpec, target: PartitionSpec, like: tuple[int, ...]
) -> Callable[[Array], Array]:
    """The conversion on a device for a leaf cut by rows: both forms have the same order of numbers."""
    axis = len(leaf.stack)
    have, want = _axes(source, axis), _axes(target, axis)
    shape = (*like[:axis], -1, *like[axis + 1 :])

    def on_device(part: Array) -> Array:
        for name in (NODE, LOCAL):  # owners are numbered along nodes first
            if name in have and name not in want:
                part = lax.all_gather(part, name, axis=axis, tiled=True)
        part = part.reshape(shape)
        for name in (LOCAL, NODE):
            if name in want and name not in have:
                part = _own_part(part, name, axis)
        return part

    return on_device


def _gather_and_cut(
    leaf: ParamLayout, source: PartitionSpec, target: PartitionSpec, like: tuple[int, ...]
) -> Callable[[Array], Array]:
    """The conversion on a device for any other leaf: gather it and cut out the device's part.

    XLA's partitioner would gather for this reshape as well, but with a warning.
    """
    to_form = from_stored if like == leaf.unsharded_shape else to_stored

    def on_device(part: Array) -> Array:
        for axis in range(part.ndim):
            if names := _axes(source, axis):
                part = lax.all_gather(part, names, axis=axis, tiled=True)
        whole = to_form(part, leaf).reshape(like)
        for axis in range(whole.ndim):
            if names := _axes(target, axis):
                whole = _own_part(whole, names, axis)
        return whole

    return on_device


def _own_part(x: Array, names: str | tuple[str, ...], axis: int) -> Array:
    size = x.shape[axis] // lax.axis_size(names)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, axis)


def mean_over_nodes(train_spec: TrainSpec, x: Array) -> Array:
    """The mean over the first axis of ``x``, the nodes. Integers count something: their largest is taken."""
    reduce = jnp.mean if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.max
    to = train_spec.sharding(PartitionSpec(*_spec(x)[1:]))
    return jax.jit(functools.partial(reduce, axis=0), out_shardings=to)(x)


def abstract_part(
    spec: TrainSpec, leaf: ParamLayout, dtype: Any = jnp.float32, nodes: tuple[int, ...] = ()
) -> jax.ShapeDtypeStruct:
    """The description in canonical form of an array laid out like a weight, or like some of its layers.

    ``nodes`` is (number of nodes,) if each node has its own array.
    """
    if not nodes:
        if leaf.in_every_node:
            return spec.abstract(leaf.unsharded_shape, dtype, _canonical_spec(leaf.in_node, (LOCAL,)))
        return spec.abstract(leaf.unsharded_shape, dtype, _canonical_spec(leaf))
    own = PartitionSpec(NODE, *_canonical_spec(leaf.in_node, (LOCAL,)))
    return spec.abstract((*nodes, *leaf.unsharded_shape), dtype, own)


def in_each_node(spec: TrainSpec, x: jax.ShapeDtypeStruct, nodes: int) -> jax.ShapeDtypeStruct:
    """The description of an array that each of ``nodes`` nodes has, along a first axis."""
    return spec.abstract((nodes, *x.shape), x.dtype, PartitionSpec(None, *_spec(x)))


def _canonical_spec(leaf: ParamLayout, owners: tuple[str, ...] = OWNED) -> PartitionSpec:
    """The partition by rows if the owners hold rows; else over as many devices as divide one dimension."""
    if _is_cut_by_rows(leaf):
        return leaf.spec(owners)
    world = leaf.world
    for axes, parts in ((owners, world.size), (LOCAL, world.local), (NODE, world.nodes)):
        for number, extent in enumerate(leaf.unsharded_shape):
            if parts > 1 and extent and extent % parts == 0:
                return PartitionSpec(*(None,) * number, axes)
    return PartitionSpec()


def _axes(spec: PartitionSpec, axis: int) -> tuple[str, ...]:
    """The mesh axes that shard a dimension."""
    names = spec[axis] if axis < len(spec) else None
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _spec(x: Array | jax.ShapeDtypeStruct) -> PartitionSpec:
    assert isinstance(x.sharding, NamedSharding)  # as everything in a state is placed
    return x.sharding.spec
