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
from zerojax.schedule.stacked import Index
from zerojax.sharding.wire_format import Seed

InFlight = tuple[Payload | None, ...]
"""The gradients of successive layers: the payload that each hop sends next, and the one that has arrived."""


class Arrived(NamedTuple):
    """One layer's gradients, which have crossed every hop and are yet to be summed, and its index."""

    payload: Payload
    layer: Index


@dataclass(frozen=True)
class GradientQueue:
    """The stages of one stack; callers hold the gradients in flight.

    Attributes:
        reduction: of one layer.
        seeds: one per layer.
        last: the index of the last layer, whose gradients come first.
        updates: whether sums update their layers. Callers then do not ``prime``, and each layer arrives once.
    """

    reduction: GradientReduction
    seeds: Seed
    last: int
    updates: bool = False

    @property
    def stages(self) -> int:
        """How many hops are stages of their own: all; or none, if gradients do not cross nodes."""
        reduction = self.reduction
        apart = self.updates or reduction.strategy.reduces_between_nodes(reduction.world)
        return reduction.hops if apart else 0

    def enqueue(self, grads: Values, index: Index, behind: InFlight | None = None) -> InFlight:
        """Encode a layer's whole gradients and put them before those that ``advance`` returned."""
        encoded = self.reduction.encode(grads, self.seeds[index])
        return (encoded, *((None,) * self.stages if behind is None else behind))

    def advance(self, in_flight: InFlight, first: Index) -> tuple[InFlight, Arrived | None]:
        """Move every layer's gradients one stage on.

        In flight are the gradients of layer ``first`` and those after it.

        Returns:
            The gradients in flight without a first stage, for ``enqueue``; and those that had arrived, if
            any had.
        """
        *waiting, payload = in_flight
        arrived = None
        if payload is not None:
            index = first + self.stages
            if not self.updates:
                # The zeros of `prime` belong to no layer: they go where the last layer's sums replace them.
                index = jnp.minimum(index, self.last)
            if not self.stages:
                for hop in range(self.reduction.hops):
                    payload = self._send(payload, index, hop)
            arrived = Arrived(payload, index)
        both: tuple[Payload, ...] = ()
        if self.reduction.joins_hops:
            *others, payload, sums = waiting
            if payload is not None and sums is not None:
                waiting = others
                both = self.reduction.send_both(payload, sums, self.seeds[first + len(others)])
        sent = [
            None if payload is None else self._send(payload, first + hop, hop)
            for hop, payload in enumerate(waiting)
        ]
        sent += both
        if self.reduction.sends_sums:
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
        return self.reduction.sum(arrived.payload)

    def drain(self, in_flight: InFlight) -> Iterator[Arrived]:
        """The gradients still in flight, as they arrive; layer 0's are on the first stage, and come last."""
        for done in range(self.stages + 1):
            sent, arrived = self.advance(in_flight, -done)
            if arrived is not None:
                yield arrived
            in_flight = (None, *sent)

    def _send(self, payload: Payload, index: Index, hop: int) -> Payload:
        return self.reduction.send(payload, self.seeds[index], hop)
