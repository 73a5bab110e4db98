"""The order of a stack's layers, which may be of several kinds. Layers of one kind are stacked together.

Most stacks of several kinds repeat a period, such as three layers of one kind and one of another. A loop over
such a stack runs one period per iteration, in which the kind of every layer is static. Layers before the
first period, and layers that are peeled off a loop, are compiled one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from zerojax.schedule.stacked import Index, layer_at, put_layer


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

    def at(self, number: int, turn: Index = 0) -> "Place":
        """The layer with a number, or the one ``turn`` periods later."""
        return Place(self, number, turn)

    def within(self, number: int) -> tuple[int, int]:
        """A layer of the stack, and the number of periods from it to the layer with ``number``."""
        periods = max(-((self.last - number) // self.period), 0) - max(-(number // self.period), 0)
        return number - periods * self.period, periods

    def of_kind(self, kind: int) -> "Place":
        """The first layer of a kind."""
        return self.at(self.kinds.index(kind))


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
    """

    order: Order
    number: int
    turn: Index = 0
    bound: Literal[-1, 0, 1] = 0

    def __add__(self, layers: int) -> "Place":
        return replace(self, number=self.number + layers)

    def ahead(self, layers: int) -> "Place":
        """The place ``layers`` later, or earlier if negative. Outside of the stack it is some layer in it."""
        there = self + layers
        if not self.peeled:
            return replace(there, bound=1 if layers > 0 else -1)
        return replace(there, number=min(max(there.number, 0), self.order.last))

    @property
    def peeled(self) -> bool:
        """Whether the layer is outside of loops."""
        return isinstance(self.turn, int)

    @property
    def kind(self) -> int:
        """The layer's kind."""
        return self.order.kinds[self.order.within(self.number)[0]]

    @property
    def index(self) -> Index:
        """The layer's index in the stack of its kind."""
        order, kind = self.order, self.kind
        found, periods = order.within(self.number)
        before = order.kinds[:found].count(kind)
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
        carry = run(carry, order.at(number))
    if turns:

        def take_turn(iteration: Array, carry: C) -> C:
            periods = iteration if turn == order.period else turn // order.period * iteration
            for number in looped[:turn]:
                carry = run(carry, order.at(number, periods if layers.step > 0 else -periods))
            return carry

        # By the loop's own counter: only slices at such an index become copies by DMA.
        carry = lax.fori_loop(0, turns, take_turn, enter(carry))
    for number in layers[first + turns * turn :]:
        carry = run(carry, order.at(number))
    return carry
