"""Gradients of a stack between its backward pass and their sums: one stage further with every layer.

Where gradients cross nodes each hop has an iteration of the backward pass of its own, and so has the sum:
while layer i is at work, layer i + 1's gradients take their first hop, layer i + 2's their second and layer
i + 3's are summed up. None of these waits for another. Elsewhere layer i + 1's take all stages at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.schedule.strategy import Payload, Route, Values
from zerojax.sharding.layout import Leaf
from zerojax.sharding.wire_format import Seed

Load = tuple[Payload | None, ...]
"""What lies on the belt, of successive layers: for each hop what it is to send, and what has arrived."""


def put_layer(stacked: Any, layer: Any, index: Any) -> Any:
    """One layer of a stacked pytree replaced."""
    return jax.tree.map(lambda x, one: lax.dynamic_update_index_in_dim(x, one, index, 0), stacked, layer)


@dataclass(frozen=True)
class Belt:
    """The stages of one stack; what lies on them is passed in and out.

    Attributes:
        route: of its weights and gradients.
        leaves: one layer's layouts.
        seeds: a layer's, by its index.
        last: the index of the last layer, whose gradients come first.
    """

    route: Route
    leaves: Sequence[Leaf]
    seeds: Seed
    last: int

    @property
    def hops(self) -> int:
        """How many hops are stages of their own; 0 where gradients do not cross nodes."""
        return self.route.hops(self.leaves) if self.route.reduces_between_nodes(self.leaves) else 0

    def put(self, grads: Values, index: Any, behind: Load | None = None) -> Load:
        """Encode a layer's whole gradients, to lie before what `advance` returned or on an empty belt."""
        encoded = self.route.encode(tuple(grads), self.leaves, self.seeds[index])
        return (encoded, *((None,) * self.hops if behind is None else behind))

    def advance(self, load: Load, sums: Values, first: Any) -> tuple[Load, Values]:
        """Take every layer's gradients one stage on.

        Args:
            load: all stages', of layer `first` and those after it.
            sums: of all layers, at the sink.
            first: a layer's index.

        Returns:
            The same without a first stage, for `put`; and the sums, with those of what had arrived.
        """
        *waiting, arrived = load
        if arrived is not None:
            # What `fill` made up goes where the last layer's sums, which are still to come, replace it.
            index = jnp.minimum(first + self.hops, self.last)
            summed = self._sum(arrived, index)
            sums = put_layer(sums, summed, index)
        sent = [
            None if payload is None else self._send(payload, first + hop, hop)
            for hop, payload in enumerate(waiting)
        ]
        return tuple(sent), sums

    def fill(self, load: Load) -> Load:
        """Zeros for what has not arrived yet: a loop carries the same in its first iteration and its last."""
        if load[-1] is not None:
            return load
        arrival = jax.eval_shape(lambda payload: self._send(payload, self.last, self.hops - 1), load[-2])
        return (*load[:-1], jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrival))

    def drain(self, load: Load, sums: Values) -> Values:
        """The sums when everything has been taken off; layer 0 is on the first stage."""
        for done in range(self.hops + 1):
            sent, sums = self.advance(load, sums, -done)
            load = (None, *sent)
        return sums

    def _send(self, payload: Payload, index: Any, hop: int) -> Payload:
        return self.route.send(payload, self.leaves, self.seeds[index], hop)

    def _sum(self, arrived: Payload, index: Any) -> Values:
        if self.hops:
            return self.route.sum(arrived, self.leaves)
        return self.route.deliver(arrived, self.leaves, self.seeds[index])
