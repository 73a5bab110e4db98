"""Fetches a stack's weights ahead of the computing layer: the counterpart of ``gradient_queue``.

If weights cross nodes, each part of that hop has an iteration of the scan to itself: while layer i computes,
layer i + 1's weights are decoded and gathered within the node, layer i + 2's cross the nodes, and layer
i + 3's are encoded. None of these waits for another. Otherwise layer i + 1's are gathered. The backward pass
fetches layers in reverse order.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp

from zerojax.schedule.stacked import Index, layer_at, put_layer
from zerojax.weights.gather import Payloads, cross_nodes, crosses_nodes, decode, encode, to_secondary
from zerojax.weights.weight import Weights


class Fetching(NamedTuple):
    """The weights on their way, carried from one layer to the next.

    Attributes:
        copies: delta's copies of all layers, updated for those fetched so far; or None.
        payloads: the encoded weights that cross the nodes next.
        arrived: the weights that have crossed, not yet decoded.
    """

    copies: Payloads | None
    payloads: Payloads
    arrived: Payloads


@dataclass(frozen=True)
class WeightPrefetcher:
    """The order in which a pass fetches layers; callers hold the weights on their way (``Fetching``).

    Attributes:
        weights: of all layers, stacked, each at its own level.
        end: the index of the last layer to be fetched.
        step: 1 forward, -1 backward.
        own_stream: see ``zerojax.comm.coalesced``.
    """

    weights: Weights
    end: int
    step: Literal[1, -1]
    own_stream: bool

    @property
    def crosses(self) -> bool:
        """Whether weights cross nodes."""
        return crosses_nodes(self.weights)

    def start(self, first: int, copies: Payloads | None = None) -> tuple[Fetching, Weights]:
        """Fetch the first layer's secondary partitions, and start on the next two layers.

        Delta's copies of all layers are updated as their weights arrive.
        """
        payloads, arrived = (), ()
        if self.crosses:
            arrived = self._cross(self._encode(copies, first), copies)
        copies, secondary = self._receive(copies, arrived, first)
        if self.crosses and first != self.end:
            arrived = self._cross(self._encode(copies, first + self.step), copies)
            payloads = self._encode(copies, self._ahead(first, 2))
        return Fetching(copies, payloads, arrived), secondary

    def advance(self, fetching: Fetching, index: Index, *, crossing: bool) -> tuple[Fetching, Weights]:
        """Move every layer's weights one stage on.

        The layer of the index computes; ``crossing`` says whether a layer is left that has yet to cross
        nodes.

        Returns:
            ``fetching`` for the next layer, and the next layer's secondary partitions.
        """
        copies, payloads, arrived = fetching
        copies, secondary = self._receive(copies, arrived, index + self.step)
        if crossing:
            arrived = self._cross(payloads, copies)
            # The last payload is never sent: encoding it costs less than peeling another layer off the loop.
            payloads = self._encode(copies, self._ahead(index, 3))
        return Fetching(copies, payloads, arrived), secondary

    def _ahead(self, index: Index, layers: int) -> Index:
        """The index of the layer that comes ``layers`` later, at most the last."""
        ahead = index + layers * self.step
        if isinstance(index, int):
            return min(ahead, self.end) if self.step > 0 else max(ahead, self.end)
        return (jnp.minimum if self.step > 0 else jnp.maximum)(ahead, self.end)

    def _encode(self, copies: Payloads | None, index: Index) -> Payloads:
        return encode(layer_at(self.weights, index), layer_at(copies, index))

    def _cross(self, payloads: Payloads, copies: Payloads | None) -> Payloads:
        return cross_nodes(payloads, delta=copies is not None, own_stream=self.own_stream)

    def _receive(
        self, copies: Payloads | None, arrived: Payloads, index: Index
    ) -> tuple[Payloads | None, Weights]:
        """The copies, with this layer's updated, and this layer's secondary partitions."""
        weights = layer_at(self.weights, index)
        if not self.crosses:
            return copies, to_secondary(weights)
        secondary = decode(weights, arrived, layer_at(copies, index))
        if copies is not None:
            # The trained weights that have copies come first.
            copies = put_layer(copies, tuple(w.values for w in secondary[: len(copies)]), index)
        return copies, secondary
