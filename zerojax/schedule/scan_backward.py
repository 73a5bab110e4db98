"""The backward pass of the prefetching scan (``zerojax.schedule.prefetch_scan``).

If gradients update their layers (``zerojax.schedule.layer_update``), a layer is updated as soon as its sums
have arrived. That is before the vjp of the layer that computes, and the update is stored beside that vjp.
"""

from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from zerojax.comm.reduction import GradientQueue, GradientReduction, InFlight
from zerojax.schedule.layer_update import LayerState, UpdatedLayers, weights_of
from zerojax.schedule.sum_storage import SeparateSums, Stored, SumStorage
from zerojax.schedule.transforms import Pullback, floats, partition, with_float0
from zerojax.schedule.unit import Arrays, Sinks, Unit
from zerojax.sharding.layers import Index, Order, Place, by_dma, over_layers, uncut
from zerojax.sharding.layout import Values
from zerojax.sharding.memory import in_host
from zerojax.weights import Fetching, WeightPrefetcher, Weights, gradients_of, to_full


class ScanArgs(NamedTuple):
    """The traced arguments of the scan, their cotangents, or their flags in breadth.

    Attributes:
        units: for each kind, the parameters of all its layers.
        x: the first layer's activations.
        state: for each kind, the layers' other state, stacked.
        shared: arrays that every layer receives.
    """

    units: tuple[Unit, ...]
    x: Arrays
    state: tuple[Arrays, ...]
    shared: Arrays


class Kept(NamedTuple):
    """The forward pass's results that the backward pass needs, besides the scan's arguments.

    Attributes:
        order: of the layers.
        residuals: for each kind, stacked. The last layer has no row, or an unused one.
        gathered: for each kind, the secondary partitions from which weights are gathered again, stacked.
        last_residual: the residual of the last layer.
        last_whole: the last layer's weights.
    """

    order: Order
    residuals: tuple[Pullback | None, ...]
    gathered: tuple[Weights, ...]
    last_residual: Pullback | None
    last_whole: Weights


class _Carry(NamedTuple):
    """Carried from one layer of the backward pass to the one before it.

    Attributes:
        cotangent: of the activations.
        of_state: for each kind, the cotangents of the floating-point arrays in ``state``, for all layers.
        of_shared: the cotangents of the floating-point arrays in ``shared``, summed so far.
        fetching: the weights of earlier layers.
        whole: this layer's weights.
        in_flight: the gradients of later layers.
        stored: for each kind, the residuals on the device of this layer and earlier ones, and the sums that
            have arrived.
        from_host: this layer's other residuals.
    """

    cotangent: Arrays
    of_state: tuple[list[Array], ...]
    of_shared: list[Array]
    fetching: Fetching
    whole: Weights
    in_flight: InFlight
    stored: tuple[Stored, ...]
    from_host: list[Array]


Cotangents = tuple[tuple[Sinks, ...], Arrays, tuple[list[Array], ...], list[Array]]


def run_backward(
    shapes: tuple[Arrays, tuple[Arrays, ...]],
    kept: Kept,
    given: list[Array],
    args: ScanArgs,
    facts: tuple[list[Array], ...],
) -> Cotangents:
    """Run every layer's vjp in reverse order, gathering weights and sending gradients meanwhile.

    Args:
        shapes: shapes of the cotangents of the forward pass's results: activations and stacked state.
        kept: see ``Kept``.
        given: these cotangents, without the ones of integers.
        args: the scan's arguments.
        facts: the cotangents of the probes, if there are any.

    Returns:
        The sinks' sums, or the updated ``LayerState``s; the cotangents of the first layer's activations, and
        of the floating-point arrays in ``state`` and in ``shared``.
    """
    if all(unit.update is None for unit in args.units):
        return _BackwardPass(shapes, kept, given, args, facts, 0).run()

    def run(zero: Index, carried: tuple[tuple[Sinks, ...], list[Array]]) -> tuple[Any, list[Array]]:
        units = tuple(map(_with_sinks, args.units, carried[0]))
        sinks, *cotangents = _BackwardPass(shapes, kept, given, args._replace(units=units), facts, zero).run()
        return sinks, floats(cotangents)

    like = (shapes[0], tuple(map(floats, args.state)), floats(args.shared))
    empty = [lax.empty(x.shape, x.dtype) for x in floats(like)]
    sinks, cotangents = by_dma(run, (tuple(unit.sinks for unit in args.units), empty))
    return (sinks, *with_float0(cotangents, like))


def _with_sinks(unit: Unit, sinks: Sinks) -> Unit:
    """The unit with other sinks, and with the weights that are read from them."""
    if unit.update is None:
        return replace(unit, sinks=sinks)
    states = cast(tuple[LayerState, ...], sinks)
    return replace(unit, sinks=states, weights=weights_of(states, unit.weights))


class _BackwardPass:
    """One backward pass through a stack: its weights, the storage of their sums, and the queues between."""

    def __init__(
        self,
        shapes: tuple[Arrays, tuple[Arrays, ...]],
        kept: Kept,
        given: list[Array],
        args: ScanArgs,
        facts: tuple[list[Array], ...],
        zero: Index,
    ) -> None:
        """See ``run_backward``; ``zero`` comes from ``by_dma``."""
        strategy, self.order = args.units[0].strategy, kept.order
        weights = tuple(
            _stood_in(unit, gathered) for unit, gathered in zip(args.units, kept.gathered, strict=True)
        )
        self.updates = any(unit.update is not None for unit in args.units)
        if not self.updates:
            # Keeps XLA from merging the gathers of a short stack with the forward pass's gathers.
            weights, given = lax.optimization_barrier((weights, given))
        self.cotangent, after = with_float0(given, shapes)
        self.like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), after)
        self.after = tuple(map(floats, after))
        self.kept, self.state, self.shared = kept, args.state, args.shared
        self.cuts = strategy.residuals_in_host > 0
        self.last = self.order.last
        self.some_frozen = any(w.layout.frozen for own in weights for w in own)
        self.prefetcher = WeightPrefetcher(weights, step=-1, separate_stream=strategy.separate_stream)
        self.queue = GradientQueue(
            tuple(GradientReduction.of(strategy, [w.layout for w in own]) for own in weights),
            tuple(unit.seed for unit in args.units),
            Place(self.order, self.last),
            self.updates,
        )
        parts = [partition(residuals, in_host) for residuals in kept.residuals]
        self.on_host, self.on_device, self.join = zip(*parts, strict=True)
        each = zip(args.units, self.queue.reductions, self.on_device, self.order.counts, facts, strict=True)
        self.storage = tuple(
            _storage(unit, reduction, residuals, count - self.order.uniform, probed, zero)
            for unit, reduction, residuals, count, probed in each
        )

    def run(self) -> Cotangents:
        """Run the pass; see ``run_backward``."""
        order, last, prefetcher, queue = self.order, self.last, self.prefetcher, self.queue
        last_whole, last_residual = self.kept.last_whole, self.kept.last_residual
        assert last_residual is not None
        fetching, whole, from_host = Fetching((), (), ()), last_whole, []
        at_last = Place(order, last)
        if last > 0:
            before = Place(order, last - 1)
            from_host = before.of(self.on_host)
            fetching, secondary = prefetcher.start(before)
            whole = to_full(secondary)
        grads, cotangent, of_last, of_shared = self._vjp(last_residual, last_whole, self.cotangent, at_last)
        of_state = tuple([lax.empty(x.shape, x.dtype) for x in floats(own)] for own in self.state)
        of_state = at_last.put(of_state, of_last)
        stored = tuple(map(lambda storage, x: storage.start(x), self.storage, self.on_device))
        in_flight = queue.enqueue(grads, at_last)
        carry = _Carry(cotangent, of_state, of_shared, fetching, whole, in_flight, stored, from_host)
        # Two periods of updated layers per iteration: half of the state is read beside one, and written
        # beside the other.
        turn = order.period * (2 if self.updates else 1)
        layers = range(last - 1, 0, -1)
        carry = over_layers(
            self._layer,
            carry,
            order,
            layers,
            self._looped(),
            turn,
            enter=lambda carry: carry._replace(in_flight=queue.prime(carry.in_flight)),
        )
        if last > 0:
            carry = self._compute(carry, Place(order, 0))
        stored, first = carry.stored, None
        for arrived in queue.drain(carry.in_flight):
            if order.uniform and arrived.place.number == 0:
                first = queue.sum(arrived)
            else:
                stored = self._write(stored, queue.sum(arrived), arrived.place)
        sums = tuple(storage.collect(own, first) for storage, own in zip(self.storage, stored, strict=True))
        return sums, carry.cotangent, carry.of_state, carry.of_shared

    def _looped(self) -> range:
        """The layers of the loop."""
        order, queue = self.order, self.queue
        stop = min(2 if self.prefetcher.crosses else 1, self.last)
        # The layers peeled off before it fill every hop.
        filled = queue.stages + order.period if self.updates else queue.stages - queue.primes
        top = max(self.last - max(filled, 0), stop)
        if order.uniform:
            return range(top - 1, stop - 1, -1)
        if order.first_periodic:
            stop = max(stop, order.first_periodic + 3)  # fetches of the loop stay inside the periodic part
        if self.updates:
            # Nothing is fetched after the first layer of a kind, so it is updated outside of the loop.
            stop = max(stop, max(map(order.kinds.index, set(order.kinds))))
        return range(top - 1, stop - 1, -1)

    def _layer(self, carry: _Carry, place: Place) -> _Carry:
        """Run a layer's vjp, and move weights and gradients one stage on."""
        ahead = self.prefetcher
        if self.updates:
            # Weights that updates encode are read from the arrays to which updates write.
            now = zip(self.storage, carry.stored, ahead.weights, strict=True)
            encoded = (kind.weights(x, w) if isinstance(kind, UpdatedLayers) else w for kind, x, w in now)
            ahead = replace(ahead, weights=tuple(encoded))
        fetching, secondary = ahead.advance(carry.fetching, place)
        if self.updates:
            # Reads come before writes. Otherwise the compiler would copy the stacks.
            read = (fetching.payloads, secondary)
            (payloads, secondary), stored = lax.optimization_barrier((read, carry.stored))
            fetching, carry = fetching._replace(payloads=payloads), carry._replace(stored=stored)
        on_host = self.on_host
        if place.peeled and (any(on_host) or self.some_frozen):
            # The layers that are peeled off would all be fetched at once, and wait on the device.
            (secondary, on_host), cotangent = lax.optimization_barrier(
                ((secondary, on_host), carry.cotangent)
            )
            carry = carry._replace(cotangent=cotangent)
        whole = to_full(secondary)
        from_host = (place + -1).of(on_host)
        return self._compute(carry, place)._replace(fetching=fetching, whole=whole, from_host=from_host)

    def _compute(self, carry: _Carry, place: Place) -> _Carry:
        """Run a layer's vjp, and move the gradients one stage on; the weights stay where they are."""
        queue = self.queue
        sent, arrived = queue.advance(carry.in_flight, place + 1)
        stored, cotangent = carry.stored, carry.cotangent
        storage = None if arrived is None else self.storage[arrived.place.kind]
        if arrived is not None and isinstance(storage, UpdatedLayers):
            own, at = arrived.place, arrived.place.index
            before = stored[own.kind]
            new = storage.update(before, queue.sum(arrived), at)
            # Copies then begin after the last vjp, and have the next one to run beside.
            before, new, cotangent = storage.after(before, new, cotangent)
            stored = own.replaced(stored, storage.put(before, new, at))
        residuals = tuple(each.residuals for each in stored)
        residual = self.join[place.kind](carry.from_host, place.of(residuals))
        done = self._vjp(residual, carry.whole, cotangent, place)
        if arrived is not None and not isinstance(storage, UpdatedLayers):
            # Sums overwrite this layer's residuals: without the barrier the compiler would copy those first.
            done, payload = lax.optimization_barrier((done, arrived.payload))
            stored = self._write(stored, queue.sum(arrived._replace(payload=payload)), arrived.place)
        grads, cotangent, own, more = done
        return carry._replace(
            cotangent=cotangent,
            of_state=place.put(carry.of_state, own),
            of_shared=jax.tree.map(jnp.add, carry.of_shared, more),
            in_flight=queue.enqueue(grads, place, sent),
            stored=stored,
        )

    def _write(self, stored: tuple[Stored, ...], sums: Values, place: Place) -> tuple[Stored, ...]:
        kind = place.kind
        return place.replaced(stored, self.storage[kind].write(stored[kind], sums, place.index))

    def _vjp(
        self, residual: Pullback, whole: Weights, cotangent: Arrays, place: Place
    ) -> tuple[Values, Arrays, list[Array], list[Array]]:
        residual = uncut(residual) if self.cuts else residual
        _, state, x, _ = residual.args_res
        vjp = residual.replace(args_res=[whole, state, x, self.shared])
        of_layer = cotangent, with_float0(place.of(self.after), self.like[place.kind])
        of_whole, of_state, before, of_shared = vjp(of_layer)
        return gradients_of(of_whole), before, floats(of_state), floats(of_shared)


def _stood_in(unit: Unit, gathered: Weights) -> Weights:
    """A unit's weights, with the secondary partitions that the forward pass kept in place of lower levels."""
    stand_in = iter(gathered)
    return tuple(w if w.reaches(unit.strategy.keep) else next(stand_in) for w in unit.weights)


def _storage(
    unit: Unit,
    reduction: GradientReduction,
    residuals: list[Array],
    rows: int,
    facts: list[Array],
    zero: Index,
) -> SumStorage | SeparateSums | UpdatedLayers:
    """The storage for gradient sums of the layers of a kind."""
    if unit.update is not None:
        states = tuple(sink for sink in unit.sinks if isinstance(sink, LayerState))
        return UpdatedLayers(states, unit.weights, unit.update, facts[0], zero)
    arrays = tuple(sink for sink in unit.sinks if not isinstance(sink, LayerState))
    if unit.strategy.reads_layers:
        return SeparateSums(arrays)
    return SumStorage(residuals, arrays, rows, reduction.sum_dtypes)
