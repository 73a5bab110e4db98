"""The prefetching scan runs a stack of equal units, gathering ahead of the computing layer, reducing behind.

One ``custom_vjp`` covers the whole scan, because XLA moves no collective from one iteration of a loop to
another. In program order:

- forward, layer i: the ``WeightPrefetcher`` moves layers i + 1 to i + 3 one stage on, then layer i computes.
- The last layer's weights are kept: the backward pass begins with them.
- backward, layer i: the ``WeightPrefetcher`` moves layers i - 1 to i - 3 one stage on and the
  ``GradientQueue`` layers i + 1 to i + 3, then layer i's vjp computes and its gradients are encoded.

Within an iteration none of these depends on another, so the scheduler can run them side by side. A payload
that crosses nodes is ready when the iteration begins: between two crossings lies only the end of the loop.
The forward loop carries one layer's weights, one layer's payload and one layer's arrivals; the backward loop
carries as well what each hop of the gradients sends and receives. A pass that does not cross nodes gathers
weights one layer ahead and sums gradients one layer behind. Layers with nothing left to fetch, or nothing
yet to send, are peeled off the loops.

With ``ShardingStrategy.residuals_in_host`` that part of what layers keep for the backward pass is in host
memory. Layer i's part is copied there while layer i computes, as far as it is ready, and comes back while the
backward pass computes layer i + 1.

Where gradients update their layers (``zerojax.schedule.layer_update``), layers whose sums have arrived are
updated before layer i's vjp, and stored beside it.

If the loss itself contains a gradient, this schedule must be differentiated. Derivatives of any order are
taken through the same layers run one after another (``_one_by_one``), without overlap of hops and compute.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from zerojax.comm.reduction import Values
from zerojax.errors import ConfigurationError
from zerojax.schedule.breadth_first import (
    Flags,
    all_batched,
    broadcast_unbatched,
    map_microbatches,
    with_batching_rule,
)
from zerojax.schedule.gradient_queue import GradientQueue, InFlight
from zerojax.schedule.layer_update import LayerState, UpdatedLayers, probe, weights_of
from zerojax.schedule.partition import floats, inexact, partition, with_float0
from zerojax.schedule.sharded import Sharded, read_by_unit
from zerojax.schedule.stacked import (
    Index,
    by_dma,
    cut_large,
    empty_layers,
    layer_at,
    pieces_away,
    put_layer,
    uncut,
)
from zerojax.schedule.sum_storage import SeparateSums, Stored, SumStorage
from zerojax.schedule.transforms import Pullback, TracedOnce, pullback, with_derivatives_of
from zerojax.schedule.unit import (
    Arrays,
    Body,
    Sinks,
    Unit,
    as_layer,
    call_gathered,
    gradients_of,
    kept_for_backward,
    on_operands,
    reduction_of,
    refuse_mapped,
    take_apart,
)
from zerojax.schedule.weight_prefetcher import Fetching, WeightPrefetcher
from zerojax.sharding.memory import in_host
from zerojax.sharding.param_tree import Path
from zerojax.weights.gather import to_full
from zerojax.weights.weight import Weight, Weights


class _ScanArgs(NamedTuple):
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


class _Results(NamedTuple):
    """What the scan returns.

    Attributes:
        x: the last layer's activations.
        state: each layer's new state, stacked.
        refreshed: the trained weights at "secondary", stacked, if the scan updated delta's copies; else none.
        probe: for ``with_facts``, if the backward pass updates the layers; else none.
    """

    x: Arrays
    state: Arrays
    refreshed: Weights
    probe: list[Array]


def scan_units(
    body: Callable[[Sequence[Array], Arrays, Arrays, Arrays], tuple[Arrays, Arrays]],
    weights: Sequence[Sharded],
    x: Arrays,
    state: Arrays,
    shared: Arrays,
) -> tuple[Arrays, Arrays, dict[Path, Weight], list[Array]]:
    """Run ``x, state[i] = body(weights[i], x, state[i], shared)`` for every layer i.

    ``body`` is a pure function of one layer's whole weights, and closes over nothing that is traced. ``x``
    are floating-point activations, whose shapes and dtypes every layer keeps, ``state`` is stacked, and every
    layer receives what is ``shared``.

    Returns:
        The last layer's ``x``; the new state, stacked; by path, stacked, the weights that have a ``copy``,
        with the copy that the gathers updated as their values; and the probe of a stack that is updated.
    """
    unit, seeds = take_apart(read_by_unit(list(weights)))
    run_on = on_operands(body, weights)

    def one(whole: Weights, x: Arrays, own: Arrays, shared: Arrays) -> tuple[Arrays, Arrays]:
        seeds, state = own
        x, state = run_on(whole, seeds, x, state, shared)
        return x, (seeds, state)

    layer = as_layer(one, unit.strategy)

    def in_breadth(size: int, mapped: tuple[_ScanArgs], args: _ScanArgs) -> tuple[_Results, Flags]:
        """Run all micro-batches through a layer before the next layer; ``state`` has their axis, too."""
        (given,) = mapped
        refuse_mapped(given.unit)
        x, state = broadcast_unbatched(size, (given.x, given.state), (args.x, args.state))
        state = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), state)
        turns = map_microbatches(layer, (all_batched(x, True), all_batched(state, True), given.shared))
        out = cast(_Results, _scan(_Layer(turns), args._replace(x=x, state=state)))
        x, state, refreshed, probe = out
        state = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), state)
        flags = _Results(*all_batched((x, state), True), *all_batched((refreshed, probe), False))
        return _Results(x, state, refreshed, probe), flags

    run = with_batching_rule(in_breadth, functools.partial(_scan, _Layer(layer)))
    x, (_, state), refreshed, probe = run(_ScanArgs(unit, x, (seeds, state), shared))
    return x, state, {w.layout.path: w for w in refreshed}, probe


class _Layer:
    """A layer's body, traced once for all layers: ``run(whole, x, state, shared) -> (x, state, residual)``.

    Attributes:
        body: the function.
        run: the same, with None for the residual.
        run_keeping: with the body's vjp for the residual, less the arrays that all layers share and those
            that are gathered again.
    """

    def __init__(self, body: Body) -> None:
        def alone(
            whole: Weights, x: Arrays, state: Arrays, shared: Arrays
        ) -> tuple[Arrays, Arrays, Pullback | None]:
            return *body(whole, x, state, shared), None

        def keeping(
            whole: Weights, x: Arrays, state: Arrays, shared: Arrays
        ) -> tuple[Arrays, Arrays, Pullback | None]:
            (x, after), vjp = pullback(body, whole, x, state, shared)
            _, own_x, own_state, _ = vjp.args_res
            return x, after, vjp.replace(args_res=[None, own_x, own_state, None])

        self.body = body
        self.run = TracedOnce(alone)
        self.run_keeping = TracedOnce(keeping)


_Run = TracedOnce[Weights, Arrays, Arrays, Arrays, tuple[Arrays, Arrays, Pullback | None]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(layer: _Layer, args: _ScanArgs) -> _Results:
    return _forward(layer.run, args).results


def _one_by_one(layer: _Layer, args: _ScanArgs) -> tuple[Arrays, Arrays]:
    """The scan's activations and state, computed layer after layer with a gather each: for derivatives."""
    if args.unit.update is not None:
        raise ConfigurationError(
            "the loss contains a gradient, which is differentiated through a Stack, and its layers are "
            "updated in their backward pass: set update_in_backward=False."
        )
    # Gradients go to the sinks, and kernels that encode have none.
    unit = replace(args.unit, weights=lax.stop_gradient(args.unit.weights))

    def body(whole: Weights, inputs: Arrays) -> Arrays:
        return layer.body(whole, *inputs)

    def one(x: Arrays, own: Arrays) -> Arrays:
        unit, state = own
        return call_gathered(body, unit, (x, state, args.shared))

    return lax.scan(one, args.x, (unit, args.state))


class _ForwardCarry(NamedTuple):
    """Carried from one layer of the forward pass to the next.

    Attributes:
        x: activations.
        fetching: the weights of later layers.
        kept: this layer's secondary partitions that the backward pass gathers from, unless it finds them
            among the scan's arguments or the copies.
        whole: this layer's weights.
        stacks: the earlier layers' new state, residuals and ``kept``, stacked.
    """

    x: Arrays
    fetching: Fetching
    kept: Weights
    whole: Weights
    stacks: tuple[Arrays, Pullback | None, Weights]


class _Kept(NamedTuple):
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


class _Forward(NamedTuple):
    """What the forward pass returns, and what it keeps."""

    results: _Results
    kept: _Kept


def _forward(run: _Run, args: _ScanArgs) -> _Forward:
    """Run every layer in order, gathering each while those before it compute."""
    unit, x, state, shared = args
    weights, copies, strategy = unit.weights, unit.copies, unit.strategy
    last = weights[0].layout.layers - 1
    prefetcher = WeightPrefetcher(weights, end=last, step=1, own_stream=strategy.own_stream)

    def cut(residual: Pullback | None) -> Pullback | None:
        share = strategy.residuals_in_host
        return cut_large(residual, share) if share else residual

    def kept_of(secondary: Weights) -> Weights:
        if copies is not None:
            return ()
        given = zip(weights, kept_for_backward(strategy, weights, secondary), strict=True)
        return tuple(kept for own, kept in given if kept is not own)

    def layer(carry: _ForwardCarry, index: Index, *, crossing: bool) -> _ForwardCarry:
        fetching, secondary = prefetcher.advance(carry.fetching, index, crossing=crossing)
        if isinstance(index, int) and _some_frozen(weights):
            # Else frozen weights, which come from nothing in the loop, would be gathered before it.
            secondary, x = lax.optimization_barrier((secondary, carry.x))
            carry = carry._replace(x=x)
        whole = to_full(secondary, strategy.weight_dtype)
        x, after, residual = run(carry.whole, carry.x, layer_at(state, index), shared)
        stacks = put_layer(carry.stacks, (after, cut(residual), carry.kept), index)
        return _ForwardCarry(x, fetching, kept_of(secondary), whole, stacks)

    fetching, secondary = prefetcher.start(0, copies)
    whole = to_full(secondary, strategy.weight_dtype)
    _, after, residual = run.shapes(whole, x, layer_at(state, 0), shared)
    # Filled in place by hand: lax.scan would stack the results of its own iterations, not of peeled ones.
    kept = kept_of(secondary)
    pieces = jax.eval_shape(cut, residual)
    residuals = empty_layers(pieces, last, pieces_away(pieces))
    stacks = (empty_layers(after, last), residuals, empty_layers(kept, last))
    carry = _ForwardCarry(x, fetching, kept, whole, stacks)
    looped = max(last - 1, 0) if prefetcher.crosses else last
    if looped:
        # By the loop's own counter: only slices at such an index become copies by DMA.
        carry = lax.fori_loop(0, looped, lambda i, c: layer(c, i, crossing=prefetcher.crosses), carry)
    for index in range(looped, last):
        carry = layer(carry, index, crossing=False)
    states, residuals, kept = carry.stacks
    x, after, residual = run(carry.whole, carry.x, layer_at(state, last), shared)
    states = jax.tree.map(lambda most, one: jnp.concatenate([most, one[None]]), states, after)
    fresh = carry.fetching.copies or ()  # of the trained weights that cross nodes, which come first
    refreshed = tuple(w.replace(copy, "secondary") for w, copy in zip(weights, fresh, strict=False))
    given = [] if unit.update is None else [probe()]
    return _Forward(_Results(x, states, refreshed, given), _Kept(residuals, kept, residual, carry.whole))


def _some_frozen(weights: Weights) -> bool:
    return any(w.layout.frozen for w in weights)


def _scan_fwd(layer: _Layer, args: _ScanArgs) -> tuple[_Results, tuple[_ScanArgs, _Kept]]:
    def plain(result: _Forward, args: _ScanArgs) -> _Forward:
        refreshed = result.results.refreshed
        x, state = _one_by_one(layer, _after_update(args, refreshed))
        return _Forward(result.results._replace(x=x, state=state), result.kept)

    function = functools.partial(_forward, layer.run_keeping)
    results, kept = with_derivatives_of(plain, function)(args)
    return results, (_after_update(args, results.refreshed), kept)


def _after_update(args: _ScanArgs, refreshed: Weights) -> _ScanArgs:
    """The arguments of a scan over the weights as the forward pass has left them."""
    unit = args.unit
    weights = (*refreshed, *unit.weights[len(refreshed) :])
    return args._replace(unit=replace(unit, weights=weights, copies=None))


def _scan_bwd(layer: _Layer, residuals: tuple[_ScanArgs, _Kept], cotangents: _Results) -> tuple[_ScanArgs]:
    args, kept = residuals
    given = (cotangents.x, cotangents.state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)

    def plain(result: Arrays, kept: _Kept, given: list[Array], args: _ScanArgs, facts: list[Array]) -> Arrays:
        del result, kept, facts

        def run(sinks: Values, x: Arrays, state: Arrays, shared: Arrays) -> tuple[Arrays, Arrays]:
            return _one_by_one(layer, _ScanArgs(replace(args.unit, sinks=sinks), x, state, shared))

        _, vjp = pullback(run, args.unit.sinks, args.x, args.state, args.shared)
        sums, of_x, of_state, of_shared = vjp(with_float0(given, shapes))
        return sums, of_x, inexact(of_state), inexact(of_shared)

    function = functools.partial(_backward, shapes)
    sums, of_x, *rest = with_derivatives_of(plain, function)(kept, inexact(given), args, cotangents.probe)
    of_state, of_shared = map(with_float0, rest, (args.state, args.shared))
    return (_ScanArgs(args.unit.cotangent(sums), of_x, of_state, of_shared),)


class _BackwardCarry(NamedTuple):
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


_Backward = tuple[Sinks, Arrays, list[Array], list[Array]]


def _backward(
    shapes: tuple[Arrays, Arrays],
    kept: _Kept,
    given: list[Array],
    args: _ScanArgs,
    facts: list[Array],
) -> _Backward:
    """Run every layer's vjp in reverse order, gathering weights and sending gradients meanwhile.

    ``shapes`` are those of the cotangents of what ``_forward`` returned, activations and stacked state,
    ``given`` the cotangents themselves, less those of integers, and ``facts`` that of the probe, if there is
    one.

    Returns:
        The sinks' sums, or what has become of the ``LayerState``s; the cotangents of the first layer's
        activations, and of the floating-point arrays in ``state`` and in ``shared``.
    """
    if args.unit.update is None:
        return _by_layers(shapes, kept, given, args, facts, 0)

    def run(zero: Index, carried: tuple[Sinks, list[Array]]) -> tuple[Sinks, list[Array]]:
        states = cast(tuple[LayerState, ...], carried[0])
        unit = replace(args.unit, sinks=states, weights=weights_of(states, args.unit.weights))
        sinks, *cotangents = _by_layers(shapes, kept, given, args._replace(unit=unit), facts, zero)
        return sinks, inexact(cotangents)

    like = (shapes[0], floats(args.state), floats(args.shared))
    empty = [lax.empty(x.shape, x.dtype) for x in floats(like)]
    sinks, cotangents = by_dma(run, (args.unit.sinks, empty))
    return (sinks, *with_float0(cotangents, like))


def _by_layers(
    shapes: tuple[Arrays, Arrays],
    kept: _Kept,
    given: list[Array],
    args: _ScanArgs,
    facts: list[Array],
    zero: Index,
) -> _Backward:
    """See ``_backward``; ``zero`` is that of ``by_dma``."""
    unit, shared = args.unit, args.shared
    strategy = unit.strategy
    stacked, gathered, last_residual, last_whole = kept
    assert stacked is not None
    assert last_residual is not None
    # Secondary partitions that the forward pass kept stand in for weights at lower levels.
    stand_in = iter(gathered)
    weights = tuple(w if w.reaches(strategy.keep) else next(stand_in) for w in unit.weights)
    if unit.update is None:
        # Keeps the gathers of a short stack from being merged with those of the forward pass.
        weights, given = lax.optimization_barrier((weights, given))
    cotangent, after = with_float0(given, shapes)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), after)
    after = inexact(after)
    last = weights[0].layout.layers - 1
    prefetcher = WeightPrefetcher(weights, end=0, step=-1, own_stream=strategy.own_stream)
    queue = GradientQueue(reduction_of(strategy, weights), unit.seed, last, unit.update is not None)

    def run(
        residual: Pullback, whole: Weights, cotangent: Arrays, index: Index
    ) -> tuple[Values, Arrays, list[Array], list[Array]]:
        _, x, state, _ = residual.args_res
        vjp = residual.replace(args_res=[whole, x, state, shared])
        of_whole, before, of_state, of_shared = vjp((cotangent, with_float0(layer_at(after, index), like)))
        return gradients_of(of_whole), before, inexact(of_state), inexact(of_shared)

    def compute(carry: _BackwardCarry, index: Index) -> _BackwardCarry:
        """Run a layer's vjp, and move the gradients one stage on; the weights stay where they are."""
        sent, arrived = queue.advance(carry.in_flight, index + 1)
        stored, cotangent = carry.stored, carry.cotangent
        if arrived is not None and updates is not None:
            new = updates.update(stored, queue.sum(arrived), arrived.layer)
            # Copies then begin after the last vjp, and have the next one to run beside.
            stored, new, cotangent = updates.after(stored, new, cotangent)
            stored = updates.put(stored, new, arrived.layer)
        residual = uncut(join(carry.from_host, layer_at(stored.residuals, index)))
        done = run(residual, carry.whole, cotangent, index)
        if arrived is not None and updates is None:
            # Sums overwrite this layer's residuals: without the barrier the compiler would copy those first.
            done, arrived = lax.optimization_barrier((done, arrived))
            stored = storage.write(stored, queue.sum(arrived), arrived.layer)
        grads, cotangent, own, more = done
        return carry._replace(
            cotangent=cotangent,
            of_state=put_layer(carry.of_state, own, index),
            of_shared=jax.tree.map(jnp.add, carry.of_shared, more),
            in_flight=queue.enqueue(grads, index, sent),
            stored=stored,
        )

    def layer(carry: _BackwardCarry, index: Index, *, crossing: bool) -> _BackwardCarry:
        ahead = prefetcher
        if updates is not None:
            ahead = replace(prefetcher, weights=updates.weights(carry.stored))
        fetching, secondary = ahead.advance(carry.fetching, index, crossing=crossing)
        if updates is not None:
            # Reads come before writes: else the compiler would copy the stacks.
            read = (fetching.payloads, secondary)
            (payloads, secondary), stored = lax.optimization_barrier((read, carry.stored))
            fetching, carry = fetching._replace(payloads=payloads), carry._replace(stored=stored)
        stacks = on_host
        if isinstance(index, int) and (on_host or _some_frozen(weights)):
            # The layers that are peeled off would all be fetched at once, and wait on the device.
            (secondary, stacks), cotangent = lax.optimization_barrier(((secondary, on_host), carry.cotangent))
            carry = carry._replace(cotangent=cotangent)
        whole = to_full(secondary, strategy.weight_dtype)
        from_host = layer_at(stacks, index - 1)
        return compute(carry, index)._replace(fetching=fetching, whole=whole, from_host=from_host)

    on_host, on_device, join = partition(stacked, in_host)
    arrays = tuple(sink for sink in unit.sinks if not isinstance(sink, LayerState))
    storage = SeparateSums(arrays) if strategy.reads_layers else SumStorage(on_device, arrays)
    updates = None
    if unit.update is not None:
        states = tuple(sink for sink in unit.sinks if isinstance(sink, LayerState))
        updates = storage = UpdatedLayers(states, weights, unit.update, facts[0], zero)
    fetching, whole, from_host = Fetching(None, (), ()), last_whole, []
    if last > 0:
        from_host = layer_at(on_host, last - 1)
        fetching, secondary = prefetcher.start(last - 1)
        whole = to_full(secondary, strategy.weight_dtype)
    grads, cotangent, own, of_shared = run(last_residual, last_whole, cotangent, last)
    of_state = put_layer(empty_layers(own, last + 1), own, last)
    in_flight, stored = queue.enqueue(grads, last), storage.start(on_device)
    carry = _BackwardCarry(cotangent, of_state, of_shared, fetching, whole, in_flight, stored, from_host)
    # The loop runs layers `top` - 1 down to `stop`: the layers peeled off before it fill every hop.
    stop = min(2 if prefetcher.crosses else 1, last)
    filled = queue.stages + 1 if updates else max(queue.stages - 1, 0)
    top = max(last - filled, stop)
    for index in range(last - 1, top - 1, -1):
        carry = layer(carry, index, crossing=prefetcher.crosses)
    turn = 2 if updates else 1  # layers: beside one half of the state is read, beside the other written
    if turns := (top - stop) // turn:

        def take_turn(i: Array, carry: _BackwardCarry) -> _BackwardCarry:
            for index in range(turn):
                carry = layer(carry, top - 1 - index - turn * i, crossing=prefetcher.crosses)
            return carry

        carry = carry if updates else carry._replace(in_flight=queue.prime(carry.in_flight))
        carry = lax.fori_loop(0, turns, take_turn, carry)
    for index in range(top - 1 - turns * turn, stop - 1, -1):
        carry = layer(carry, index, crossing=prefetcher.crosses)
    for index in range(stop - 1, 0, -1):
        carry = layer(carry, index, crossing=False)
    if last > 0:
        carry = compute(carry, 0)
    stored = carry.stored
    *others, first = queue.drain(carry.in_flight)
    for arrived in others:
        stored = storage.write(stored, queue.sum(arrived), arrived.layer)
    return storage.collect(stored, queue.sum(first)), carry.cotangent, carry.of_state, carry.of_shared


_scan.defvjp(_scan_fwd, _scan_bwd)
