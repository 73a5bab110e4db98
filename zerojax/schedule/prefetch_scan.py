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
from zerojax.schedule.layer_update import probe
from zerojax.schedule.partition import inexact, with_float0
from zerojax.schedule.scan_backward import Kept, ScanArgs, run_backward
from zerojax.schedule.sharded import Sharded, read_by_unit
from zerojax.schedule.stacked import Index, cut_large, empty_layers, layer_at, pieces_away, put_layer
from zerojax.schedule.transforms import Pullback, TracedOnce, pullback, with_derivatives_of
from zerojax.schedule.unit import (
    Arrays,
    Body,
    as_layer,
    call_gathered,
    kept_for_backward,
    on_operands,
    refuse_mapped,
    take_apart,
)
from zerojax.schedule.weight_prefetcher import Fetching, WeightPrefetcher
from zerojax.sharding.param_tree import Path
from zerojax.weights.gather import to_full
from zerojax.weights.weight import Weight, Weights


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

    def in_breadth(size: int, mapped: tuple[ScanArgs], args: ScanArgs) -> tuple[_Results, Flags]:
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
    x, (_, state), refreshed, probe = run(ScanArgs(unit, x, (seeds, state), shared))
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
        def alone(whole: Weights, x: Arrays, state: Arrays, shared: Arrays) -> _Ran:
            return *body(whole, x, state, shared), None

        def keeping(whole: Weights, x: Arrays, state: Arrays, shared: Arrays) -> _Ran:
            (x, after), vjp = pullback(body, whole, x, state, shared)
            _, own_x, own_state, _ = vjp.args_res
            return x, after, vjp.replace(args_res=[None, own_x, own_state, None])

        self.body = body
        self.run = TracedOnce(alone)
        self.run_keeping = TracedOnce(keeping)


_Ran = tuple[Arrays, Arrays, Pullback | None]
_Run = TracedOnce[Weights, Arrays, Arrays, Arrays, _Ran]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(layer: _Layer, args: ScanArgs) -> _Results:
    return _forward(layer.run, args)[0]


def _one_by_one(layer: _Layer, args: ScanArgs) -> tuple[Arrays, Arrays]:
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


def _forward(run: _Run, args: ScanArgs) -> tuple[_Results, Kept]:
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
        if isinstance(index, int) and any(w.layout.frozen for w in weights):
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
    return _Results(x, states, refreshed, given), Kept(residuals, kept, residual, carry.whole)


def _scan_fwd(layer: _Layer, args: ScanArgs) -> tuple[_Results, tuple[ScanArgs, Kept]]:
    def plain(result: tuple[_Results, Kept], args: ScanArgs) -> tuple[_Results, Kept]:
        results, kept = result
        x, state = _one_by_one(layer, _after_update(args, results.refreshed))
        return results._replace(x=x, state=state), kept

    function = functools.partial(_forward, layer.run_keeping)
    results, kept = with_derivatives_of(plain, function)(args)
    return results, (_after_update(args, results.refreshed), kept)


def _after_update(args: ScanArgs, refreshed: Weights) -> ScanArgs:
    """The arguments of a scan over the weights as the forward pass has left them."""
    unit = args.unit
    weights = (*refreshed, *unit.weights[len(refreshed) :])
    return args._replace(unit=replace(unit, weights=weights, copies=None))


def _scan_bwd(layer: _Layer, residuals: tuple[ScanArgs, Kept], cotangents: _Results) -> tuple[ScanArgs]:
    args, kept = residuals
    given = (cotangents.x, cotangents.state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)

    def plain(result: Arrays, kept: Kept, given: list[Array], args: ScanArgs, facts: list[Array]) -> Arrays:
        del result, kept, facts

        def run(sinks: Values, x: Arrays, state: Arrays, shared: Arrays) -> tuple[Arrays, Arrays]:
            return _one_by_one(layer, ScanArgs(replace(args.unit, sinks=sinks), x, state, shared))

        _, vjp = pullback(run, args.unit.sinks, args.x, args.state, args.shared)
        sums, of_x, of_state, of_shared = vjp(with_float0(given, shapes))
        return sums, of_x, inexact(of_state), inexact(of_shared)

    function = functools.partial(run_backward, shapes)
    sums, of_x, *rest = with_derivatives_of(plain, function)(kept, inexact(given), args, cotangents.probe)
    of_state, of_shared = map(with_float0, rest, (args.state, args.shared))
    return (ScanArgs(args.unit.cotangent(sums), of_x, of_state, of_shared),)


_scan.defvjp(_scan_fwd, _scan_bwd)
