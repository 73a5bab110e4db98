"""The backward pass of the prefetching scan (``zerojax.schedule.prefetch_scan``).

Where gradients update their layers (``zerojax.schedule.layer_update``), layers whose sums have arrived are
updated before layer i's vjp, and stored beside it.
"""

from dataclasses import replace
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from zerojax.comm.reduction import Values
from zerojax.schedule.gradient_queue import GradientQueue, InFlight
from zerojax.schedule.layer_update import LayerState, UpdatedLayers, weights_of
from zerojax.schedule.partition import floats, inexact, partition, with_float0
from zerojax.schedule.stacked import Index, by_dma, empty_layers, layer_at, put_layer, uncut
from zerojax.schedule.sum_storage import SeparateSums, Stored, SumStorage
from zerojax.schedule.transforms import Pullback
from zerojax.schedule.unit import Arrays, Sinks, Unit, gradients_of, reduction_of
from zerojax.schedule.weight_prefetcher import Fetching, WeightPrefetcher
from zerojax.sharding.memory import in_host
from zerojax.weights.gather import to_full
from zerojax.weights.weight import Weights


class ScanArgs(NamedTuple):
    """The traced arguments of the scan, their cotangents, or their flags in breadth.

    Attributes:
        unit: of all layers.
        x: the first layer's activations.
        state: each layer's other state, stacked.
        shared: arrays that every layer receives.
    """

    unit: Unit
    x: Arrays
    state: Arrays
    shared: Arrays


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass, besides the scan's arguments.

    Attributes:
        residuals: of all layers but the last, stacked.
        gathered: the secondary partitions from which it gathers again, of all layers but the last, stacked.
        last_residual: the last layer's.
        last_whole: the last layer's weights.
    """

    residuals: Pullback | None
    gathered: Weights
    last_residual: Pullback | None
    last_whole: Weights


class _Carry(NamedTuple):
    """Carried from one layer of the backward pass to the one before it.

    Attributes:
        cotangent: of the activations.
        of_state: the cotangents of the floating-point arrays in ``state``, for all layers.
        of_shared: the cotangents of the floating-point arrays in ``shared``, summed so far.
        fetching: the weights of earlier layers.
        whole: this layer's weights.
        in_flight: the gradients of later layers.
        stored: the residuals of this layer and those before it that are on the device, and the sums that have
            arrived.
        from_host: this layer's other residuals.
    """

    cotangent: Arrays
    of_state: list[Array]
    of_shared: list[Array]
    fetching: Fetching
    whole: Weights
    in_flight: InFlight
    stored: Stored
    from_host: list[Array]


Cotangents = tuple[Sinks, Arrays, list[Array], list[Array]]


def run_backward(
    shapes: tuple[Arrays, Arrays], kept: Kept, given: list[Array], args: ScanArgs, facts: list[Array]
) -> Cotangents:
    """Run every layer's vjp in reverse order, gathering weights and sending gradients meanwhile.

    ``shapes`` are those of the cotangents of what the forward pass returned, activations and stacked state,
    ``given`` the cotangents themselves, less those of integers, and ``facts`` that of the probe, if there is
    one.

    Returns:
        The sinks' sums, or what has become of the ``LayerState``s; the cotangents of the first layer's
        activations, and of the floating-point arrays in ``state`` and in ``shared``.
    """

    if args.unit.update is None:
        return _BackwardPass(shapes, kept, given, args, facts, 0).run()

    def run(zero: Index, carried: tuple[Sinks, list[Array]]) -> tuple[Sinks, list[Array]]:
        states = cast(tuple[LayerState, ...], carried[0])
        unit = replace(args.unit, sinks=states, weights=weights_of(states, args.unit.weights))
        own = args._replace(unit=unit)
        sinks, *cotangents = _BackwardPass(shapes, kept, given, own, facts, zero).run()
        return sinks, inexact(cotangents)

    like = (shapes[0], floats(args.state), floats(args.shared))
    empty = [lax.empty(x.shape, x.dtype) for x in floats(like)]
    sinks, cotangents = by_dma(run, (args.unit.sinks, empty))
    return (sinks, *with_float0(cotangents, like))


class _BackwardPass:
    """One backward pass through a stack: its weights, where their sums go, and what carries them there."""

    def __init__(
        self,
        shapes: tuple[Arrays, Arrays],
        kept: Kept,
        given: list[Array],
        args: ScanArgs,
        facts: list[Array],
        zero: Index,
    ) -> None:
        """See ``run_backward``; ``zero`` is that of ``by_dma``."""
        unit, strategy = args.unit, args.unit.strategy
        assert kept.residuals is not None
        # Secondary partitions that the forward pass kept stand in for weights at lower levels.
        stand_in = iter(kept.gathered)
        weights = tuple(w if w.reaches(strategy.keep) else next(stand_in) for w in unit.weights)
        if unit.update is None:
            # Keeps the gathers of a short stack from being merged with those of the forward pass.
            weights, given = lax.optimization_barrier((weights, given))
        self.cotangent, after = with_float0(given, shapes)
        self.like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), after)
        self.after = inexact(after)
        self.kept, self.shared, self.weight_dtype = kept, args.shared, strategy.weight_dtype
        self.last = weights[0].layout.layers - 1
        self.some_frozen = any(w.layout.frozen for w in weights)
        self.prefetcher = WeightPrefetcher(weights, end=0, step=-1, own_stream=strategy.own_stream)
        self.queue = GradientQueue(
            reduction_of(strategy, weights), unit.seed, self.last, unit.update is not None
        )
        self.on_host, self.on_device, self.join = partition(kept.residuals, in_host)
        arrays = tuple(sink for sink in unit.sinks if not isinstance(sink, LayerState))
        self.storage = SeparateSums(arrays) if strategy.reads_layers else SumStorage(self.on_device, arrays)
        self.updates = None
        if unit.update is not None:
            states = tuple(sink for sink in unit.sinks if isinstance(sink, LayerState))
            self.updates = self.storage = UpdatedLayers(states, weights, unit.update, facts[0], zero)

    def run(self) -> Cotangents:
        """As ``run_backward``."""
        last, prefetcher, queue, storage = self.last, self.prefetcher, self.queue, self.storage
        last_whole, last_residual = self.kept.last_whole, self.kept.last_residual
        assert last_residual is not None
        fetching, whole, from_host = Fetching(None, (), ()), last_whole, []
        if last > 0:
            from_host = layer_at(self.on_host, last - 1)
            fetching, secondary = prefetcher.start(last - 1)
            whole = to_full(secondary, self.weight_dtype)
        grads, cotangent, own, of_shared = self._vjp(last_residual, last_whole, self.cotangent, last)
        of_state = put_layer(empty_layers(own, last + 1), own, last)
        in_flight, stored = queue.enqueue(grads, last), storage.start(self.on_device)
        carry = _Carry(cotangent, of_state, of_shared, fetching, whole, in_flight, stored, from_host)
        # The loop runs layers `top` - 1 down to `stop`: the layers peeled off before it fill every hop.
        stop = min(2 if prefetcher.crosses else 1, last)
        filled = queue.stages + 1 if self.updates else max(queue.stages - 1, 0)
        top = max(last - filled, stop)
        for index in range(last - 1, top - 1, -1):
            carry = self._layer(carry, index)
        # Of updated layers two a turn: beside one half of the state is read, beside the other written.
        turn = 2 if self.updates else 1
        if turns := (top - stop) // turn:

            def take_turn(i: Array, carry: _Carry) -> _Carry:
                for index in range(turn):
                    carry = self._layer(carry, top - 1 - index - turn * i)
                return carry

            carry = carry if self.updates else carry._replace(in_flight=queue.prime(carry.in_flight))
            carry = lax.fori_loop(0, turns, take_turn, carry)
        for index in range(top - 1 - turns * turn, 0, -1):
            carry = self._layer(carry, index)
        if last > 0:
            carry = self._compute(carry, 0)
        stored = carry.stored
        *others, first = queue.drain(carry.in_flight)
        for arrived in others:
            stored = storage.write(stored, queue.sum(arrived), arrived.layer)
        return storage.collect(stored, queue.sum(first)), carry.cotangent, carry.of_state, carry.of_shared

    def _layer(self, carry: _Carry, index: Index) -> _Carry:
        """Run a layer's vjp, and move weights and gradients one stage on."""
        ahead, updates = self.prefetcher, self.updates
        if updates is not None:
            ahead = replace(ahead, weights=updates.weights(carry.stored))
        crossing = ahead.crosses and not (isinstance(index, int) and index < 2)  # layer 1 has none to fetch
        fetching, secondary = ahead.advance(carry.fetching, index, crossing=crossing)
        if updates is not None:
            # Reads come before writes: else the compiler would copy the stacks.
            read = (fetching.payloads, secondary)
            (payloads, secondary), stored = lax.optimization_barrier((read, carry.stored))
            fetching, carry = fetching._replace(payloads=payloads), carry._replace(stored=stored)
        on_host = self.on_host
        if isinstance(index, int) and (on_host or self.some_frozen):
            # The layers that are peeled off would all be fetched at once, and wait on the device.
            (secondary, on_host), cotangent = lax.optimization_barrier(
                ((secondary, on_host), carry.cotangent)
            )
            carry = carry._replace(cotangent=cotangent)
        whole = to_full(secondary, self.weight_dtype)
        from_host = layer_at(on_host, index - 1)
        return self._compute(carry, index)._replace(fetching=fetching, whole=whole, from_host=from_host)

    def _compute(self, carry: _Carry, index: Index) -> _Carry:
        """Run a layer's vjp, and move the gradients one stage on; the weights stay where they are."""
        queue, updates = self.queue, self.updates
        sent, arrived = queue.advance(carry.in_flight, index + 1)
        stored, cotangent = carry.stored, carry.cotangent
        if arrived is not None and updates is not None:
            new = updates.update(stored, queue.sum(arrived), arrived.layer)
            # Copies then begin after the last vjp, and have the next one to run beside.
            stored, new, cotangent = updates.after(stored, new, cotangent)
            stored = updates.put(stored, new, arrived.layer)
        residual = uncut(self.join(carry.from_host, layer_at(stored.residuals, index)))
        done = self._vjp(residual, carry.whole, cotangent, index)
        if arrived is not None and updates is None:
            # Sums overwrite this layer's residuals: without the barrier the compiler would copy those first.
            done, arrived = lax.optimization_barrier((done, arrived))
            stored = self.storage.write(stored, queue.sum(arrived), arrived.layer)
        grads, cotangent, own, more = done
        return carry._replace(
            cotangent=cotangent,
            of_state=put_layer(carry.of_state, own, index),
            of_shared=jax.tree.map(jnp.add, carry.of_shared, more),
            in_flight=queue.enqueue(grads, index, sent),
            stored=stored,
        )

    def _vjp(
        self, residual: Pullback, whole: Weights, cotangent: Arrays, index: Index
    ) -> tuple[Values, Arrays, list[Array], list[Array]]:
        _, x, state, _ = residual.args_res
        vjp = residual.replace(args_res=[whole, x, state, self.shared])
        of_layer = cotangent, with_float0(layer_at(self.after, index), self.like)
        of_whole, before, of_state, of_shared = vjp(of_layer)
        return gradients_of(of_whole), before, inexact(of_state), inexact(of_shared)
