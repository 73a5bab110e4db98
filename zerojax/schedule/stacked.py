"""Reads and replaces single layers of stacked pytrees, in device or in host memory.

A stack in host memory (``zerojax.sharding.memory``) is read and written one layer at a time. ``layer_at``
copies the layer to the device, ``put_layer`` copies it to the host. In a loop XLA makes these copies by DMA,
beside the compute, if the index is the loop's own counter (``lax.fori_loop``). If an iteration both reads and
writes a stack, the later operation must depend on the earlier one. Otherwise XLA copies the whole stack in
each iteration.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Int, PyTree

from zerojax.sharding.layout import in_a_row
from zerojax.sharding.memory import to_device, to_host, to_memory_of

Index = int | Int[Array, ""]
"""Index of a layer, not negative: a number in layers that are peeled off a loop, traced inside the loop."""


def by_dma[T: PyTree[Array]](run: Callable[[Index, T], T], carried: T) -> T:
    """``run(zero, carried)``, in which copies of layers that are peeled off a loop are made by DMA, too.

    Otherwise kernels would make these copies, and the compute that should run beside them would wait. ``run``
    is the only iteration of a loop, and ``zero`` is the loop's counter, so that an index plus ``zero``
    depends on it.
    """
    first = (jnp.int32(0), carried)
    turns = lax.while_loop(lambda turn: turn[0] < 1, lambda turn: (turn[0] + 1, run(*turn)), first)
    return cast(tuple[Array, T], set_xla_metadata(turns, **_KEEP))[1]


def layer_at[T: PyTree[Array]](stacked: T, index: Index, axis: int = 0) -> T:
    """The layer at an index along the axis of layers, on the device."""

    def one(x: Array) -> Array:
        return to_device(lax.dynamic_index_in_dim(x, index, axis, False, allow_negative_indices=False))

    return jax.tree.map(one, stacked)


def put_layer[T: PyTree[Array]](stacked: T, layer: T, index: Index, axis: int = 0) -> T:
    """``stacked`` with one layer, or several consecutive layers, replaced in the memory where it is."""

    def one(x: Array, new: Array) -> Array:
        new = to_memory_of(new, x)
        return lax.dynamic_update_index_in_dim(x, new, index, axis, allow_negative_indices=False)

    return jax.tree.map(one, stacked, layer)


def put_layers[T: PyTree[Array]](stack: tuple[int, ...], stacked: T, some: T, first: Index) -> T:
    """``stacked`` with consecutive layers replaced, from ``first`` on, in the memory where it is.

    On a mesh, call it inside ``shard_map``: XLA's partitioner makes slices that move arrays to another
    memory.

    ``stack`` are the axes of layers of ``stacked``; ``some`` has as many. ``first`` counts all layers in a
    row.
    """

    def one(x: Array, new: Array) -> Array:
        rows = new.reshape(-1, *new.shape[len(stack) :])
        return put_layer(in_a_row(x, stack), rows, first).reshape(x.shape)

    return jax.tree.map(one, stacked, some)


def empty_layers[T: PyTree[Array]](one: T, layers: int, on_host: Sequence[bool] = ()) -> T:
    """A stack of ``layers`` layers like ``one``, uninitialised: on GPUs nothing is written.

    ``on_host`` says for each array whether its stack is in host memory; by default none is.
    """
    leaves, structure = jax.tree.flatten(one)
    stacks = [lax.empty((layers, *x.shape), x.dtype) for x in leaves]
    if on_host:
        stacks = [to_host(x) if away else x for x, away in zip(stacks, on_host, strict=True)]
    return jax.tree.unflatten(structure, stacks)


def large_floats(one: PyTree[Array]) -> tuple[bool, ...]:
    """Which of a layer's arrays are worth a copy to host memory and back.

    Activations are: floating-point arrays of at least a 64th of the largest one's bytes. Statistics of norms
    and attention, positions, choices of experts and random keys stay on the device. They take a percent of
    its memory, and each copy has a fixed cost.
    """
    leaves = jax.tree.leaves(one)
    sizes = [x.size * x.dtype.itemsize if jnp.issubdtype(x.dtype, jnp.floating) else 0 for x in leaves]
    return tuple(size > 0 and size * 64 >= max(sizes) for size in sizes)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["away", "here"], meta_fields=["shape"])
@dataclass(frozen=True)
class Cut[T]:
    """A layer's array in two flat pieces, which are stacked in different memories.

    Attributes:
        away: the piece for host memory, or the whole array in its own shape.
        here: the piece for the device; None if there is none.
        shape: the array's shape.
    """

    away: T
    here: T | None
    shape: tuple[int, ...]


def cut_large[T: PyTree](one: T, share: float) -> T:
    """A layer's arrays, with each of ``large_floats`` as a ``Cut``: a fraction ``share`` is for the host."""
    leaves, structure = jax.tree.flatten(one)

    def cut(x: Array) -> Cut[Array]:
        size = math.ceil(share * x.size / _MULTIPLE) * _MULTIPLE
        if size >= x.size:
            return Cut(x, None, x.shape)
        away, here = jnp.split(x.reshape(-1), [size])
        return Cut(away, here, x.shape)

    large = zip(leaves, large_floats(one), strict=True)
    return jax.tree.unflatten(structure, [cut(x) if away else x for x, away in large])


def pieces_away(one: PyTree) -> tuple[bool, ...]:
    """Which arrays of a pytree with ``Cut``s are for host memory."""

    def flags(x: object) -> PyTree[bool]:
        return (True, None if x.here is None else False) if isinstance(x, Cut) else False

    return tuple(jax.tree.leaves(jax.tree.map(flags, one, is_leaf=_is_cut)))


def uncut[T: PyTree](one: T) -> T:
    """The inverse of ``cut_large``."""

    def whole(x: Array | Cut[Array]) -> Array:
        if not isinstance(x, Cut):
            return x
        return x.away if x.here is None else jnp.concatenate([x.away, x.here]).reshape(x.shape)

    return jax.tree.map(whole, one, is_leaf=_is_cut)


def _is_cut(x: object) -> bool:
    return isinstance(x, Cut)


_KEEP = {"skip-simplify-while-loops_trip-count-one": "true"}
"""Without this, XLA replaces a loop of one iteration by its body."""
_MULTIPLE = 128
"""Elements: the layers of a stack in host memory begin at multiples of a cache line."""
