"""Fetches a stack's weights ahead of the computing layer: the counterpart of ``gradient_queue``.

If weights cross nodes, each part of that hop has an iteration of the scan to itself: while layer i computes,
layer i + 1's weights are decoded and gathered within the node, layer i + 2's cross the nodes, and layer
i + 3's are encoded. None of these waits for another. Otherwise layer i + 1's are gathered. The backward pass
fetches layers in reverse order.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from zerojax.comm.collectives import UnitComm, Values
from zerojax.schedule.stacked import layer_at, put_layer
from zerojax.sharding.strategy import Level


class Fetching(NamedTuple):
    """The weights on their way, carried from one layer to the next.

    Attributes:
        copies: delta's copies of all layers, updated for those fetched so far; or None.
        payload: the encoded weights that cross the nodes next.
        arrived: the weights that have crossed, not yet decoded.
    """

    copies: Values | None
    payload: Values
    arrived: Values


@dataclass(frozen=True)
class WeightPrefetcher:
    """The order in which a pass fetches layers; callers hold the weights on their way (``Fetching``).

    Attributes:
        comm: of one layer.
        level: the level of ``sources``.
        sources: the trained weights, stacked.
        frozen: the secondary partitions of the frozen ones, stacked.
        end: the index of the last layer to be fetched.
        step: 1 forward, -1 backward.
    """

    comm: UnitComm
    level: Level
    sources: Values
    frozen: Values
    end: int
    step: Literal[1, -1]

    @property
    def crosses(self) -> bool:
        """Whether weights cross nodes."""
        return self.comm.crosses_nodes(self.level)

    def start(self, first: int, copies: Values | None = None) -> tuple[Fetching, Values]:
        """Fetch the first layer's secondary partitions, and start on the next two layers."""
        payload, arrived = (), ()
        if self.crosses:
            arrived = self._cross(self._encode(copies, first), copies)
        copies, secondary = self._receive(copies, arrived, first)
        if self.crosses and first != self.end:
            arrived = self._cross(self._encode(copies, first + self.step), copies)
            payload = self._encode(copies, self._ahead(first, 2))
        return Fetching(copies, payload, arrived), secondary

    def advance(self, fetching: Fetching, index: Any, *, crossing: bool) -> tuple[Fetching, Values]:
        """Move every layer's weights one stage on.

        Args:
            fetching: as ``start`` or this method returned.
            index: of the layer that computes.
            crossing: whether a layer is left that has yet to cross nodes.

        Returns:
            ``fetching`` for the next layer, and the next layer's secondary partitions.
        """
        copies, payload, arrived = fetching
        copies, secondary = self._receive(copies, arrived, index + self.step)
        if crossing:
            arrived = self._cross(payload, copies)
            # The last payload is never sent: encoding it costs less than peeling another layer off the loop.
            payload = self._encode(copies, self._ahead(index, 3))
        return Fetching(copies, payload, arrived), secondary

    def _ahead(self, index: Any, layers: int) -> Any:
        """The index of the layer that comes ``layers`` later, at most the last."""
        ahead = index + layers * self.step
        if isinstance(index, int):
            return min(ahead, self.end) if self.step > 0 else max(ahead, self.end)
        return (jnp.minimum if self.step > 0 else jnp.maximum)(ahead, self.end)

    def _encode(self, copies: Values | None, index: Any) -> Values:
        return self.comm.encode_weights(layer_at(self.sources, index), layer_at(copies, index))

    def _cross(self, payload: Values, copies: Values | None) -> Values:
        return self.comm.cross_nodes(payload, delta=copies is not None)

    def _receive(self, copies: Values | None, arrived: Values, index: Any) -> tuple[Values | None, Values]:
        """The copies, with this layer's updated, and this layer's secondary partitions."""
        frozen = layer_at(self.frozen, index)
        if not self.crosses:
            return copies, self.comm.to_secondary(self.level, layer_at(self.sources, index), frozen)
        fresh = self.comm.decode_weights(arrived, layer_at(copies, index))
        secondary = self.comm.to_secondary("secondary", fresh, frozen)
        return (None if copies is None else put_layer(copies, fresh, index)), secondary
