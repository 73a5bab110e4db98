"""The layers of a stack: their order, and reading and replacing single ones, in device or in host memory.

The layers may be of several kinds, and layers of one kind are stacked together. Most stacks of several kinds
repeat a period, such as three layers of one kind and one of another. A loop over such a stack runs one period
per iteration, in which the kind of every layer is static. Layers before the first period, and layers that are
peeled off a loop, are compiled one by one.

A stack in host memory (``zerojax.sharding.memory``) is read and written one layer at a time. ``layer_at``
copies the layer to the device, ``put_layer`` copies it to the host. In a loop XLA makes these copies by DMA,
beside the compute, if the index is the loop's own counter (``lax.fori_loop``). If an iteration both reads and
writes a stack, the later operation must depend on the earlier one. Otherwise XLA copies the whole stack in
each iteration.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Int, PyTree

from zerojax.sharding.layout import in_a_row
from zerojax.sharding.memory import in_host, to_device, to_host

Index = int | Int[Array, ""]
"""Index of a layer, not negative: a number in layers that are peeled off a loop, traced inside the loop."""
_KEEP = {"skip-simplify-while-loops_trip-count-one": "true"}
"""Without this, XLA replaces a loop of one iteration by its body."""
ONE_TURN = "one_turn"
"""The name scope of a while loop of one iteration."""
_MULTIPLE = 128
"""Elements: the layers of a stack in host memory begin at multiples of a cache line."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Order:
    """The kinds of a stack's layers.

    Attributes:
        kinds: the kind of each layer, numbered from 0.
        last: the number of the last layer.
        uniform: whether all layers are of one kind.
        counts: the number of layers of each kind.
        first_periodic: the first layer of the part in which kinds repeat.
        period: the number of layers after which kinds repeat.
    """

    kinds: tuple[int, ...]
    last: int = field(init=False, compare=False)
    uniform: bool = field(init=False, compare=False)
    counts: tuple[int, ...] = field(init=False, compare=False)
    first_periodic: int = field(init=False, compare=False)
    period: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        kinds, repeats = self.kinds, (0, len(self.kinds))
        for period in range(1, len(kinds)):
            first = len(kinds) - period
            while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
                first -= 1
            # With the fewest layers before the first period and in one.
            repeats = min(repeats, (first, period), key=lambda pair: (sum(pair), pair))
        vars(self).update(
            last=len(kinds) - 1,
            uniform=len(set(kinds)) == 1,
            counts=tuple(kinds.count(kind) for kind in range(max(kinds) + 1)),
            first_periodic=repeats[0],
            period=repeats[1],
        )


@dataclass(frozen=True)
class Place:
    """A layer in a stack's order.

    Attributes:
        order: of the stack.
        number: the layer's number; in a loop, its number in the first iteration. It may lie outside of the
            stack, where the order continues periodically.
        turn: the number of periods from ``number`` to the layer; traced inside a loop.
        bound: 1 replaces a layer behind the stack by the last one of its kind, -1 a layer before it by the
            first.
        peeled: whether the layer is outside of loops.
        inside: the number of a layer of the stack that is whole periods away.
        periods: the number of periods from it to ``number``.
        kind: the layer's kind.
    """

    order: Order
    number: int
    turn: Index = 0
    bound: Literal[-1, 0, 1] = 0
    peeled: bool = field(init=False, compare=False)
    inside: int = field(init=False, compare=False)
    periods: int = field(init=False, compare=False)
    kind: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        last, period = self.order.last, self.order.period
        periods = max(-((last - self.number) // period), 0) - max(-(self.number // period), 0)
        inside = self.number - periods * period
        kind = self.order.kinds[inside]
        vars(self).update(peeled=isinstance(self.turn, int), inside=inside, periods=periods, kind=kind)

    def __add__(self, layers: int) -> "Place":
        return replace(self, number=self.number + layers)

    def ahead(self, layers: int) -> "Place":
        """The place ``layers`` later, or earlier if negative. Outside of the stack it is some layer in it."""
        there = self + layers
        if not self.peeled:
            return replace(there, bound=1 if layers > 0 else -1)
        return replace(there, number=min(max(there.number, 0), self.order.last))

    @property
    def index(self) -> Index:
        """The layer's index in the stack of its kind."""
        order, kind, periods = self.order, self.kind, self.periods
        before = order.kinds[: self.inside].count(kind)
        if order.uniform:
            index = self.turn + (before + periods)
        else:
            repeated = order.kinds[order.last + 1 - order.period :].count(kind)
            index = (self.turn + periods) * repeated + before
        if self.bound > 0:
            return jnp.minimum(index, order.counts[kind] - 1)
        return jnp.maximum(index, 0) if self.bound < 0 else index

    def of[T: PyTree[Array]](self, stacks: tuple[T, ...]) -> T:
        """The layer's values, from the stacked values of each kind."""
        return layer_at(stacks[self.kind], self.index)

    def put[T: PyTree[Array]](self, stacks: tuple[T, ...], layer: T) -> tuple[T, ...]:
        """``stacks`` with the layer's values replaced."""
        return self.replaced(stacks, put_layer(stacks[self.kind], layer, self.index))

    def replaced[T](self, kinds: tuple[T, ...], own: T) -> tuple[T, ...]:
        """``kinds`` with another value for the layer's kind."""
        return (*kinds[: self.kind], own, *kinds[self.kind + 1 :])


def over_layers[C: PyTree[Array]](
    run: Callable[[C, Place], C],
    carry: C,
    order: Order,
    layers: range,
    looped: range,
    turn: int,
    enter: Callable[[C], C] = lambda carry: carry,
) -> C:
    """Run ``carry = run(carry, place)`` for all ``layers``, as many of ``looped`` as fit in a loop.

    ``layers`` count up or down, and ``looped`` is a periodic part of them. An iteration has ``turn`` layers,
    a multiple of the order's period. ``enter`` changes the carry that enters the loop.
    """
    turns = len(looped) // turn
    if turns < 2 and not order.uniform:
        turns = 0
    first = layers.index(looped[0]) if turns else 0
    for number in layers[:first]:
        carry = run(carry, Place(order, number))
    if turns:

        def take_turn(iteration: Array, carry: C) -> C:
            periods = iteration if turn == order.period else turn // order.period * iteration
            for number in looped[:turn]:
                carry = run(carry, Place(order, number, periods if layers.step > 0 else -periods))
            return carry

        # By the loop's own counter: only slices at such an index become copies by DMA.
        carry = lax.fori_loop(0, turns, take_turn, enter(carry))
    for number in layers[first + turns * turn :]:
        carry = run(carry, Place(order, number))
    return carry


def by_dma[T: PyTree[Array]](run: Callable[[Index, T], T], carried: T) -> T:
    """``run(zero, carried)``, in which copies of layers that are peeled off a loop are made by DMA, too.

    Otherwise kernels would make these copies, and the compute that should run beside them would wait. ``run``
    is the only iteration of a loop, and ``zero`` is the loop's counter, so that an index plus ``zero``
    depends on it.
    """
    first = (jnp.int32(0), carried)
    with jax.named_scope(ONE_TURN):
        turns = lax.while_loop(lambda turn: turn[0] < 1, lambda turn: (turn[0] + 1, run(*turn)), first)
    return cast(tuple[Array, T], set_xla_metadata(turns, **_KEEP))[1]


def layer_at[T: PyTree[Array]](stacked: T, index: Index, axis: int = 0) -> T:
    """The layer at an index along the axis of layers, on the device."""
    at = functools.partial(lax.dynamic_index_in_dim, index=index, axis=axis, keepdims=False)
    return jax.tree.map(lambda x: to_device(at(x, allow_negative_indices=False)), stacked)


def put_layer[T: PyTree[Array]](stacked: T, layer: T, index: Index, axis: int = 0) -> T:
    """``stacked`` with one layer, or several consecutive layers, replaced in the memory where it is."""

    def one(x: Array, new: Array) -> Array:
        new = to_host(new) if in_host(x) else to_device(new)
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
