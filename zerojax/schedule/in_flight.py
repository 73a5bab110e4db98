"""Fetches a stack's weights ahead of the layer that computes, and sends its gradients on behind it.

If weights cross nodes, each part of that hop has an iteration of the scan to itself. While layer i computes,
layer i + 1's weights are decoded and gathered within the node, layer i + 2's cross the nodes, and layer
i + 3's are encoded. The backward pass fetches layers in reverse order. If weights cross no nodes, layer
i + 1's are gathered.

If gradients cross nodes, each hop has an iteration of the backward pass to itself, and so has the sum. While
layer i computes, layer i + 1's gradients are sent over their first hop, layer i + 2's over their second, and
layer i + 3's are summed. If every node holds the master weights, layer i + 3's sums are sent on to all nodes,
and layer i + 4's are decoded. If gradients cross no nodes, layer i + 1's are sent over all hops at once.
Where sums update their layer, hops within a node have iterations to themselves as well, so that an update
never waits.

Within an iteration nothing waits for anything else.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.comm.reduction import GradientReduction, Payload, Values
from zerojax.schedule.layers import Place
from zerojax.sharding.wire_format import Seed
from zerojax.weights import Payloads, Weights, cross_nodes, decode, encode, to_secondary

Replicas = tuple[Payloads | None, ...]
"""Delta's replicas of each kind of layers, stacked; None for kinds without replicas."""


class Fetching(NamedTuple):
    """The weights on their way, carried from one layer to the next.

    Attributes:
        replicas: delta's replicas of all layers by kind, refreshed for the layers fetched so far; or None.
        payloads: the encoded weights that cross the nodes next.
        arrived: the weights that have crossed and are not yet decoded.
    """

    replicas: Replicas
    payloads: Payloads
    arrived: Payloads


@dataclass(frozen=True)
class WeightPrefetcher:
    """The order in which a pass fetches layers; callers hold the weights on their way (``Fetching``).

    Attributes:
        weights: for each kind, of all layers, stacked, each at its own level.
        step: 1 forward, to the last layer; -1 backward, to layer 0.
        separate_stream: see ``zerojax.comm.coalesced``.
        crosses: whether weights cross nodes.
    """

    weights: tuple[Weights, ...]
    step: Literal[1, -1]
    separate_stream: bool
    crosses: bool = field(init=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        vars(self).update(crosses=any(w.crosses_nodes for own in self.weights for w in own))

    def start(self, first: Place, replicas: Replicas | None = None) -> tuple[Fetching, Weights]:
        """Fetch the first layer's secondary partitions, and start on the next two layers.

        Delta's replicas of all layers are refreshed as their weights arrive.
        """
        replicas = replicas or (None,) * len(self.weights)
        payloads, arrived = (), ()
        if self.crosses:
            arrived = self._cross(self._encode(replicas, first), replicas, first)
        replicas, secondary = self._receive(replicas, arrived, first)
        second = first.ahead(self.step)
        if self.crosses and first != second:
            arrived = self._cross(self._encode(replicas, second), replicas, second)
            payloads = self._encode(replicas, first.ahead(2 * self.step))
        return Fetching(replicas, payloads, arrived), secondary

    def advance(self, fetching: Fetching, place: Place, *, crossing: bool) -> tuple[Fetching, Weights]:
        """Move every layer's weights one stage on.

        The layer at ``place`` computes; ``crossing`` says whether a layer is left that has yet to cross
        nodes.

        Returns:
            ``fetching`` for the next layer, and the next layer's secondary partitions.
        """
        replicas, payloads, arrived = fetching
        replicas, secondary = self._receive(replicas, arrived, place + self.step)
        if crossing:
            arrived = self._cross(payloads, replicas, place.ahead(2 * self.step))
            # The last payload is never sent: encoding it costs less than peeling another layer off the loop.
            payloads = self._encode(replicas, place.ahead(3 * self.step))
        return Fetching(replicas, payloads, arrived), secondary

    def _encode(self, replicas: Replicas, place: Place) -> Payloads:
        return encode(place.of(self.weights), place.of(replicas))

    def _cross(self, payloads: Payloads, replicas: Replicas, place: Place) -> Payloads:
        return cross_nodes(
            payloads, delta=replicas[place.kind] is not None, separate_stream=self.separate_stream
        )

    def _receive(self, replicas: Replicas, arrived: Payloads, place: Place) -> tuple[Replicas, Weights]:
        """The replicas with this layer's refreshed, and this layer's secondary partitions."""
        weights = place.of(self.weights)
        if not self.crosses:
            return replicas, to_secondary(weights)
        secondary = decode(weights, arrived, place.of(replicas))
        if (own := replicas[place.kind]) is not None:
            # The trained weights that have replicas come first.
            replicas = place.put(replicas, tuple(w.values for w in secondary[: len(own)]))
        return replicas, secondary


InFlight = tuple[Payload | None, ...]
"""The gradients of successive layers: the payload that each hop sends next, and the one that has arrived."""


class Arrived(NamedTuple):
    """One layer's gradients, which have crossed every hop and are yet to be summed."""

    payload: Payload
    place: Place


@dataclass(frozen=True)
class GradientQueue:
    """The stages of one stack; callers hold the gradients in flight.

    Attributes:
        reductions: of one layer of each kind.
        seeds: for each kind, one per layer.
        last: the last layer, whose gradients come first.
        updates: whether sums update their layers.
        primes: whether callers ``prime`` the queue. If not, each layer's gradients arrive once, and no zeros.
        stages: the number of hops that are stages: all of them, or none if gradients do not cross nodes.
    """

    reductions: tuple[GradientReduction, ...]
    seeds: tuple[Seed, ...]
    last: Place
    updates: bool = False
    primes: bool = field(init=False)
    stages: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        staged = self.updates or self.reductions[0].crosses_nodes
        vars(self).update(
            primes=len(self.reductions) == 1 and not self.updates,
            stages=max(each.hops for each in self.reductions) if staged else 0,
        )

    def enqueue(self, grads: Values, place: Place, behind: InFlight | None = None) -> InFlight:
        """Encode a layer's whole gradients and put them before the ones that ``advance`` returned."""
        encoded = self.reductions[place.kind].encode(grads, self._seed(place))
        return (encoded, *((None,) * self.stages if behind is None else behind))

    def advance(self, in_flight: InFlight, first: Place) -> tuple[InFlight, Arrived | None]:
        """Move every layer's gradients one stage on.

        The gradients in flight belong to layer ``first`` and the layers after it.

        Returns:
            The gradients in flight without a first stage, for ``enqueue``; and the ones that had arrived, if
            any.
        """
        *waiting, payload = in_flight
        arrived = None
        if payload is not None:
            # The zeros of `prime` belong to no layer: they go where the last layer's sums replace them.
            place = first.ahead(self.stages) if self.primes else first + self.stages
            if not self.stages:
                for hop in range(self.reductions[place.kind].hops):
                    payload = self._send(payload, place, hop)
            arrived = Arrived(payload, place)
        both: tuple[Payload, ...] = ()
        if all(reduction.joins_hops for reduction in self.reductions):
            *others, payload, sums = waiting
            place = first + len(others)
            if payload is not None and sums is not None and place.kind == (place + 1).kind:
                waiting = others
                both = self.reductions[place.kind].send_both(payload, sums, self._seed(place))
        sent = [
            None if payload is None else self._send(payload, first + hop, hop)
            for hop, payload in enumerate(waiting)
        ]
        sent += both
        if any(reduction.sends_sums for reduction in self.reductions):
            # Off the loop XLA would join the gathers of several layers, and the first wait for the last.
            sent = lax.optimization_barrier(sent)
        return tuple(sent), arrived

    def prime(self, in_flight: InFlight) -> InFlight:
        """Fill the last stage with zeros if it is empty: a loop's carry has one structure throughout."""
        if in_flight[-1] is not None:
            return in_flight
        last_hop = self.stages - 1
        arrival = jax.eval_shape(lambda payload: self._send(payload, self.last, last_hop), in_flight[-2])
        return (*in_flight[:-1], jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrival))

    def sum(self, arrived: Arrived) -> Values:
        """The sums of gradients that have arrived, at ``grad_level``."""
        return self.reductions[arrived.place.kind].sum(arrived.payload)

    def drain(self, in_flight: InFlight) -> Iterator[Arrived]:
        """The gradients still in flight, as they arrive. Layer 0's are on the first stage, and come last."""
        first = Place(self.last.order, 0)
        for done in range(self.stages + 1):
            sent, arrived = self.advance(in_flight, first + -done)
            if arrived is not None:
                yield arrived
            in_flight = (None, *sent)

    def _send(self, payload: Payload, place: Place, hop: int) -> Payload:
        reduction = self.reductions[place.kind]
        # Layers of another kind may have one more hop.
        return reduction.send(payload, self._seed(place), hop) if hop < reduction.hops else payload

    def _seed(self, place: Place) -> Seed:
        return self.seeds[place.kind][place.index]
