"""Fetches a stack's weights ahead of the computing layer: the counterpart of ``gradient_queue``.

If weights cross nodes, each part of that hop has an iteration of the scan to itself: while layer i computes,
layer i + 1's weights are decoded and gathered within the node, layer i + 2's cross the nodes, and layer
i + 3's are encoded. None of these waits for another. Otherwise layer i + 1's are gathered. The backward pass
fetches layers in reverse order.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from zerojax.schedule.order import Place
from zerojax.weights.gather import Payloads, cross_nodes, crosses_nodes, decode, encode, to_secondary
from zerojax.weights.weight import Weights

Copies = tuple[Payloads | None, ...]
"""Delta's copies of each kind of layers, stacked; None where weights have none."""


class Fetching(NamedTuple):
    """The weights on their way, carried from one layer to the next.

    Attributes:
        copies: delta's copies of all layers, updated for those fetched so far; or None; by kind.
        payloads: the encoded weights that cross the nodes next.
        arrived: the weights that have crossed, not yet decoded.
    """

    copies: Copies
    payloads: Payloads
    arrived: Payloads


@dataclass(frozen=True)
class WeightPrefetcher:
    """The order in which a pass fetches layers; callers hold the weights on their way (``Fetching``).

    Attributes:
        weights: of all layers of each kind, stacked, each at its own level.
        step: 1 forward, to the last layer; -1 backward, to layer 0.
        own_stream: see ``zerojax.comm.coalesced``.
    """

    weights: tuple[Weights, ...]
    step: Literal[1, -1]
    own_stream: bool

    @property
    def crosses(self) -> bool:
        """Whether weights cross nodes."""
        return any(map(crosses_nodes, self.weights))

    def start(self, first: Place, copies: Copies | None = None) -> tuple[Fetching, Weights]:
        """Fetch the first layer's secondary partitions, and start on the next two layers.

        Delta's copies of all layers are updated as their weights arrive.
        """
        copies = copies or (None,) * len(self.weights)
        payloads, arrived = (), ()
        if self.crosses:
            arrived = self._cross(self._encode(copies, first), copies, first)
        copies, secondary = self._receive(copies, arrived, first)
        second = first.ahead(self.step)
        if self.crosses and first != second:
            arrived = self._cross(self._encode(copies, second), copies, second)
            payloads = self._encode(copies, first.ahead(2 * self.step))
        return Fetching(copies, payloads, arrived), secondary

    def advance(self, fetching: Fetching, place: Place, *, crossing: bool) -> tuple[Fetching, Weights]:
        """Move every layer's weights one stage on.

        The layer at the place computes; ``crossing`` says whether a layer is left that has yet to cross
        nodes.

        Returns:
            ``fetching`` for the next layer, and the next layer's secondary partitions.
        """
        copies, payloads, arrived = fetching
        copies, secondary = self._receive(copies, arrived, place + self.step)
        if crossing:
            arrived = self._cross(payloads, copies, place.ahead(2 * self.step))
            # The last payload is never sent: encoding it costs less than peeling another layer off the loop.
            payloads = self._encode(copies, place.ahead(3 * self.step))
        return Fetching(copies, payloads, arrived), secondary

    def _encode(self, copies: Copies, place: Place) -> Payloads:
        return encode(place.of(self.weights), place.of(copies))

    def _cross(self, payloads: Payloads, copies: Copies, place: Place) -> Payloads:
        return cross_nodes(payloads, delta=copies[place.kind] is not None, own_stream=self.own_stream)

    def _receive(self, copies: Copies, arrived: Payloads, place: Place) -> tuple[Copies, Weights]:
        """The copies, with this layer's updated, and this layer's secondary partitions."""
        weights = place.of(self.weights)
        if not self.crosses:
            return copies, to_secondary(weights)
        secondary = decode(weights, arrived, place.of(copies))
        if (own := copies[place.kind]) is not None:
            # The trained weights that have copies come first.
            copies = place.put(copies, tuple(w.values for w in secondary[: len(own)]))
        return copies, secondary
