"""The queue of a stack's gradients, which move one stage towards their sums with every layer.

If gradients cross nodes, each hop has an iteration of the backward pass to itself, and so has the sum: while
layer i computes, layer i + 1's gradients take their first hop, layer i + 2's their second, and layer i + 3's
are summed; or sent on to all nodes, and layer i + 4's are decoded, if those hold the master weights. None of
these waits for another. Otherwise layer i + 1's gradients take all stages at once, unless their sums update
the layer: hops within a node then have iterations of their own as well, so that an update never waits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.comm.reduction import GradientReduction, Payload, Values
from zerojax.schedule.order import Place
from zerojax.sharding.wire_format import Seed

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
        seeds: by kind, one per layer.
        last: the last layer, whose gradients come first.
        updates: whether sums update their layers.
    """

    reductions: tuple[GradientReduction, ...]
    seeds: tuple[Seed, ...]
    last: Place
    updates: bool = False

    @property
    def primes(self) -> bool:
        """Whether callers ``prime``; else each layer arrives once."""
        return len(self.reductions) == 1 and not self.updates

    @property
    def stages(self) -> int:
        """How many hops are stages of their own: all; or none, if gradients do not cross nodes."""
        reduction = self.reductions[0]
        apart = self.updates or reduction.strategy.reduces_between_nodes(reduction.world)
        return max(each.hops for each in self.reductions) if apart else 0

    def enqueue(self, grads: Values, place: Place, behind: InFlight | None = None) -> InFlight:
        """Encode a layer's whole gradients and put them before those that ``advance`` returned."""
        encoded = self.reductions[place.kind].encode(grads, self._seed(place))
        return (encoded, *((None,) * self.stages if behind is None else behind))

    def advance(self, in_flight: InFlight, first: Place) -> tuple[InFlight, Arrived | None]:
        """Move every layer's gradients one stage on.

        In flight are the gradients of layer ``first`` and those after it.

        Returns:
            The gradients in flight without a first stage, for ``enqueue``; and those that had arrived, if
            any had.
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
        """The gradients still in flight, as they arrive; layer 0's are on the first stage, and come last."""
        first = self.last.order.at(0)
        for done in range(self.stages + 1):
            sent, arrived = self.advance(in_flight, first + -done)
            if arrived is not None:
                yield arrived
            in_flight = (None, *sent)

    def _send(self, payload: Payload, place: Place, hop: int) -> Payload:
        reduction = self.reductions[place.kind]
        # Of another kind, layers may have a hop more.
        return reduction.send(payload, self._seed(place), hop) if hop < reduction.hops else payload

    def _seed(self, place: Place) -> Seed:
        return self.seeds[place.kind][place.index]
