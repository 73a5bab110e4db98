"""The prefetching scan: a stack of equal units, gathered ahead of the layer at work and reduced behind it.

One ``custom_vjp`` around the whole scan, since no compiler moves a collective across a loop's iterations by
itself. In the order of the program:

- forward, layer i: the ``WeightPrefetcher`` takes a stage of layers i + 1 to i + 3, then layer i computes.
- the last layer's weights stay for the backward pass, which begins with them.
- backward, layer i: the ``WeightPrefetcher`` takes a stage of layers i - 1 to i - 3 and the
  ``GradientQueue`` one of layers i + 1 to i + 3, then layer i's vjp computes and its gradients are encoded.

Within an iteration none of these depends on another, so that the scheduler can run them side by side, and
what crosses nodes is there when it begins: between two crossings lies nothing but the end of the loop.
Carried from one iteration to the next are one layer's weights, one layer's payload and one layer's arrivals,
forward, and backward what each of a gradient's hops sends and brings. Where a pass does not cross nodes,
weights are gathered one layer ahead and gradients summed one behind. Layers for which nothing is left to
fetch, or nothing yet to send, stand outside the loops.

Derivatives of that schedule, which a loss with a gradient of its own asks for, are those of the same layers
one after another (``_one_by_one``), of any order, with each layer's hops in line with its compute.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from zerojax.comm.collectives import UnitComm, Values
from zerojax.matmul.operand import with_values
from zerojax.schedule.breadth_first import (
    all_batched,
    broadcast_unbatched,
    map_microbatches,
    with_batching_rule,
)
from zerojax.schedule.gradient_queue import GradientQueue, InFlight
from zerojax.schedule.partition import inexact, partition, with_float0
from zerojax.schedule.stacked import empty_layers, layer_at, put_layer
from zerojax.schedule.unit import (
    Body,
    Sharded,
    as_layer,
    call_gathered,
    on_operands,
    refuse_mapped,
    scales_of,
    take_apart,
    taken,
)
from zerojax.schedule.weight_prefetcher import Fetching, WeightPrefetcher
from zerojax.sharding.wire_format import Seed


def scan_units(
    body: Body, weights: Sequence[Sharded], x: Any, state: Any, shared: Any
) -> tuple[Any, Any, Values | None]:
    """Run ``x, state[i] = body(weights[i], x, state[i], shared)`` for every layer i.

    Args:
        body: a pure function of one layer's whole weights; it may close over nothing that is traced.
        weights: the stacked parameters.
        x: floating-point activations, whose shapes and dtypes every layer keeps.
        state: each layer's other state, stacked; no gradient flows through it.
        shared: arrays that every layer is given alike.

    Returns:
        The last layer's ``x``; the new state, stacked; and where the weights have a ``copy``, these copies
        as the gathers brought them up to date, stacked, else None.
    """
    comm, (sources, sinks, seeds), copies = take_apart(taken(list(weights)))
    on_whole = on_operands(body, comm.leaves)

    def one(whole: Values, x: Any, own: Any, shared: Any) -> tuple[Any, Any]:
        scales, state = own
        x, state = on_whole(whole, scales, x, state, shared)
        return x, (scales, state)

    body = as_layer(one, comm.strategy)

    def in_breadth(size: int, mapped: Any, *args: Any) -> tuple[Any, Any]:
        """Every layer for all micro-batches, one after another; each layer's state has them, too."""
        *weights, x, state, shared = args
        *weights_mapped, x_mapped, state_mapped, shared_mapped = mapped
        refuse_mapped(weights_mapped)
        x, state = broadcast_unbatched(size, x_mapped, x), broadcast_unbatched(size, state_mapped, state)
        state = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), state)
        turns = map_microbatches(body, (all_batched(x, True), all_batched(state, True), shared_mapped))
        out: Any = _scan(comm, _Layer(turns), *weights, x, state, shared)
        x, state, copies = out
        state = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), state)
        return (x, state, copies), (
            all_batched(x, True),
            all_batched(state, True),
            all_batched(copies, False),
        )

    run = with_batching_rule(in_breadth, functools.partial(_scan, comm, _Layer(body)))
    x, (_, state), copies = run(sources, sinks, seeds, copies, x, (scales_of(weights), state), shared)
    return x, state, copies


class _Layer:
    """A layer's body, traced once for all layers: ``run(whole, x, state, shared) -> (x, state, residual)``.

    Attributes:
        body: the function.
        run: the same, with None for the residual.
        run_keeping: with the body's vjp for the residual, without the arrays that all layers share or that
            are gathered again.
    """

    def __init__(self, body: Body) -> None:
        def keeping(whole: Values, x: Any, state: Any, shared: Any) -> tuple[Any, Any, Any]:
            vjp: Any
            (x, after), vjp = jax.vjp(body, whole, x, state, shared)
            _, own_x, own_state, _ = vjp.args_res
            return x, after, vjp.replace(args_res=[None, own_x, own_state, None])

        self.body = body
        self.run = _TracedOnce(lambda *args: (*body(*args), None))
        self.run_keeping = _TracedOnce(keeping)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan(
    comm: UnitComm,
    layer: _Layer,
    sources: Values,
    sinks: Values,
    seeds: Seed,
    copies: Values | None,
    x: Any,
    state: Any,
    shared: Any,
) -> tuple[Any, Any, Values | None]:
    del sinks, seeds
    x, states, copies, *_ = _forward(comm, layer.run, sources, copies, x, state, shared)
    return x, states, copies


def _one_by_one(
    comm: UnitComm,
    layer: _Layer,
    fresh: Values | None,
    sources: Values,
    sinks: Values,
    seeds: Seed,
    x: Any,
    state: Any,
    shared: Any,
) -> tuple[Any, Any]:
    """The same activations and state, layer after layer, each with its own gather: for derivatives.

    ``fresh`` are delta's copies, up to date already, where there are any.
    """
    if fresh is not None:
        strategy = dataclasses.replace(comm.strategy, source="secondary")
        comm = dataclasses.replace(comm, strategy=strategy)
        sources = tuple(with_values(source, copy) for source, copy in zip(sources, fresh, strict=True))
    sources = lax.stop_gradient(sources)  # gradients go to the sinks, and kernels that encode have none

    def body(whole: Values, inputs: Any) -> tuple[Any, Any]:
        x, state, shared = inputs
        return layer.body(whole, x, jax.tree.map(lax.stop_gradient, state), shared)

    def one(x: Any, own: Any) -> tuple[Any, Any]:
        source, sink, seed, state = own
        return call_gathered(comm, body, source, sink, seed, (x, state, shared))

    return lax.scan(one, x, (sources, sinks, seeds, state))


def _with_derivatives_of(plain: Any, function: Any) -> Any:
    """``function``, differentiated as ``plain(result, *args)``, which computes the same by other means."""

    @jax.custom_vjp
    def run(*args: Any) -> Any:
        return function(*args)

    def forward(*args: Any) -> tuple[Any, Any]:
        result = run(*args)  # not `function`: this, too, may be differentiated
        return result, (args, result)

    def backward(residuals: Any, cotangents: Any) -> Any:
        (args, result), cotangents = _after(residuals, cotangents)
        return jax.vjp(functools.partial(plain, result), *args)[1](cotangents)

    run.defvjp(forward, backward)
    return run


def _after(values: Any, others: Any) -> Any:
    """Both pytrees, so that nothing is made of the values before the others are there.

    XLA:CPU may otherwise run loops that don't depend on each other at once, and mix up their collectives.
    """
    arrays, float0, combine = partition((values, others), lambda x: x.dtype != jax.dtypes.float0)
    return combine(lax.optimization_barrier(arrays), float0)


class _ForwardCarry(NamedTuple):
    """From one layer of the forward pass to the next.

    Attributes:
        x: activations.
        fetching: the weights of later layers.
        own: this layer's secondary partitions, where the backward pass begins with those.
        whole: this layer's weights.
        stacks: what earlier layers leave: their new state, their vjp's residuals, their ``own``.
    """

    x: Any
    fetching: Fetching
    own: Values | None
    whole: Values
    stacks: tuple[Any, Any, Values | None]


def _forward(
    comm: UnitComm,
    run: "_TracedOnce",
    sources: Values,
    copies: Values | None,
    x: Any,
    state: Any,
    shared: Any,
) -> tuple[Any, Any, Values | None, Any, Any]:
    """Every layer in order, each gathered while those before it run.

    Returns the activations, the stacked state, the copies, and what the backward pass needs: of all layers
    but the last, stacked, and of the last.
    """
    strategy, last = comm.strategy, comm.leaves[0].layers - 1
    weights = WeightPrefetcher(comm, strategy.source, sources, end=last, step=1)
    keep = copies is None and strategy.source != strategy.keep

    def layer(carry: _ForwardCarry, index: Any, *, crossing: bool) -> _ForwardCarry:
        fetching, secondary = weights.advance(carry.fetching, index, crossing=crossing)
        whole = comm.to_whole(secondary)
        x, after, residual = run(carry.whole, carry.x, layer_at(state, index), shared)
        stacks = put_layer(carry.stacks, (after, residual, carry.own), index)
        return _ForwardCarry(x, fetching, secondary if keep else None, whole, stacks)

    fetching, secondary = weights.start(0, copies)
    whole = comm.to_whole(secondary)
    _, *one = run.shapes(whole, x, layer_at(state, 0), shared)
    # Filled by hand, in place: a scan would stack what its own iterations leave, and no more.
    own = secondary if keep else None
    carry = _ForwardCarry(x, fetching, own, whole, empty_layers((*one, own), last))
    looped = max(last - 1, 0) if weights.crosses else last
    if looped:
        carry, _ = lax.scan(
            lambda c, i: (layer(c, i, crossing=weights.crosses), None), carry, jnp.arange(looped)
        )
    for index in range(looped, last):
        carry = layer(carry, index, crossing=False)
    copies, (states, residuals, kept) = carry.fetching.copies, carry.stacks
    x, after, residual = run(carry.whole, carry.x, layer_at(state, last), shared)
    states = jax.tree.map(lambda most, one: jnp.concatenate([most, one[None]]), states, after)
    return x, states, copies, (residuals, kept if copies is None else copies), (residual, carry.whole)


def _scan_fwd(comm: UnitComm, layer: _Layer, *args: Any) -> tuple[tuple[Any, Any, Values | None], Any]:
    def function(
        sources: Values, sinks: Values, seeds: Seed, copies: Values | None, x: Any, state: Any, shared: Any
    ) -> Any:
        del sinks, seeds
        return _forward(comm, layer.run_keeping, sources, copies, x, state, shared)

    def plain(
        result: Any,
        sources: Values,
        sinks: Values,
        seeds: Seed,
        copies: Values | None,
        x: Any,
        state: Any,
        shared: Any,
    ) -> Any:
        del copies
        _, _, fresh, *kept = result
        own = _one_by_one(comm, layer, fresh, sources, sinks, seeds, x, state, shared)
        return *own, fresh, *kept

    x, states, fresh, *kept = _with_derivatives_of(plain, function)(*args)
    sources, sinks, seeds, _, *inputs = args
    return (x, states, fresh), ((fresh, sources, sinks, seeds, *inputs), kept)


def _scan_bwd(comm: UnitComm, layer: _Layer, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    args, kept = residuals
    cotangent, state_cotangents, _ = cotangents
    # No gradient flows through the state; its cotangents only say which shapes zeros must have.
    after = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state_cotangents)

    def function(
        kept: Any,
        cotangent: Any,
        fresh: Values | None,
        sources: Values,
        sinks: Values,
        seeds: Seed,
        x: Any,
        state: Any,
        shared: Any,
    ) -> Any:
        del fresh, sinks, x, state
        return _backward(comm, after, kept, cotangent, sources, seeds, shared)

    def plain(
        result: Any,
        kept: Any,
        cotangent: Any,
        fresh: Values | None,
        sources: Values,
        sinks: Values,
        seeds: Seed,
        x: Any,
        state: Any,
        shared: Any,
    ) -> Any:
        del result, kept

        def run(sinks: Values, x: Any, shared: Any) -> Any:
            return _one_by_one(comm, layer, fresh, sources, sinks, seeds, x, state, shared)[0]

        sums, of_x, of_shared = jax.vjp(run, sinks, x, shared)[1](cotangent)
        return sums, of_x, inexact(of_shared)

    sums, of_x, of_shared = _with_derivatives_of(plain, function)(kept, cotangent, *args)
    return None, sums, None, None, of_x, None, with_float0(of_shared, args[-1])


class _BackwardCarry(NamedTuple):
    """From one layer of the backward pass to the one before it.

    Attributes:
        cotangent: of the activations.
        of_shared: of what is floating-point in ``shared``, summed so far.
        fetching: the weights of earlier layers.
        whole: this layer's weights.
        in_flight: the gradients of later layers.
        sums: those that have arrived, of all layers.
    """

    cotangent: Any
    of_shared: list[Any]
    fetching: Fetching
    whole: Values
    in_flight: InFlight
    sums: Values


def _backward(
    comm: UnitComm,
    after: Any,
    kept: Any,
    cotangent: Any,
    sources: Values,
    seeds: Seed,
    shared: Any,
) -> tuple[Values, Any, list[Any]]:
    """Every layer's vjp in reverse order, each gathered again, and its gradients sent, beside the others'.

    Args:
        comm: of one layer.
        after: shapes of a layer's new state.
        kept: what ``_forward`` kept.
        cotangent: of its activations.
        sources: the weights where the forward pass found them, with ``seeds``.
        seeds: see ``sources``.
        shared: what every layer was given alike.

    Returns:
        The sinks' sums; the cotangents of the first layer's activations and of what is floating-point in
        ``shared``.
    """
    (stacked, copies), (last_residual, last_whole) = kept
    # Keeps the gathers of a short stack from being merged with those of the forward pass.
    sources, copies, cotangent = lax.optimization_barrier((sources, copies, cotangent))
    no_state = jax.tree.map(_zeros, after)
    strategy, last = comm.strategy, comm.leaves[0].layers - 1
    kept = sources if strategy.source == strategy.keep else copies
    weights = WeightPrefetcher(comm, strategy.keep, kept, end=0, step=-1)
    queue = GradientQueue(comm, seeds, last)

    def run(residual: Any, whole: Values, cotangent: Any) -> tuple[Values, Any, Any]:
        _, x, state, _ = residual.args_res
        vjp = residual.replace(args_res=[whole, x, state, shared])
        grads, before, _, of_shared = vjp((cotangent, no_state))
        return grads, before, inexact(of_shared)

    def layer(carry: _BackwardCarry, index: Any, *, crossing: bool) -> _BackwardCarry:
        fetching, secondary = weights.advance(carry.fetching, index, crossing=crossing)
        whole = comm.to_whole(secondary)
        sent, sums = queue.advance(carry.in_flight, carry.sums, index + 1)
        grads, cotangent, more = run(layer_at(stacked, index), carry.whole, carry.cotangent)
        of_shared = jax.tree.map(jnp.add, carry.of_shared, more)
        return _BackwardCarry(cotangent, of_shared, fetching, whole, queue.enqueue(grads, index, sent), sums)

    # Filled in place, layer by layer: to join parts afterwards would hold all gradients twice.
    sums = tuple(strategy.zero_sink(leaf) for leaf in comm.leaves)
    fetching, whole = Fetching(None, (), ()), last_whole
    if last > 0:
        fetching, secondary = weights.start(last - 1)
        whole = comm.to_whole(secondary)
    grads, cotangent, of_shared = run(last_residual, last_whole, cotangent)
    carry = _BackwardCarry(cotangent, of_shared, fetching, whole, queue.enqueue(grads, last), sums)
    # The loop takes the layers from `top` - 1 down to `stop`: those before it leave something for every hop.
    stop = min(2 if weights.crosses else 1, last)
    top = max(last - max(queue.hops - 1, 0), stop)
    for index in range(last - 1, top - 1, -1):
        carry = layer(carry, index, crossing=weights.crosses)
    if top > stop:
        carry, _ = lax.scan(
            lambda c, i: (layer(c, i, crossing=weights.crosses), None),
            carry._replace(in_flight=queue.prime(carry.in_flight)),
            jnp.arange(stop, top),
            reverse=True,
        )
    for index in range(stop - 1, 0, -1):
        carry = layer(carry, index, crossing=False)
    cotangent, of_shared, _, whole, in_flight, sums = carry
    if last > 0:
        sent, sums = queue.advance(in_flight, sums, 1)
        grads, cotangent, more = run(layer_at(stacked, 0), whole, cotangent)
        of_shared = jax.tree.map(jnp.add, of_shared, more)
        in_flight = queue.enqueue(grads, 0, sent)
    return queue.drain(in_flight, sums), cotangent, of_shared


_scan.defvjp(_scan_fwd, _scan_bwd)


class _TracedOnce:
    """A pure function, traced for the first arguments that it is given and never again."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._traced: tuple[Any, Any] | None = None

    def __call__(self, *args: Any) -> Any:
        self.shapes(*args)
        assert self._traced is not None
        call, shapes = self._traced
        return jax.tree.unflatten(jax.tree.structure(shapes), call(*jax.tree.leaves(args)))

    def shapes(self, *args: Any) -> Any:
        """Shapes and dtypes of what the function returns."""
        if self._traced is None:
            closed, shapes = jax.make_jaxpr(self._function, return_shape=True)(*args)
            self._traced = jaxpr_as_fun(closed), shapes
        return self._traced[1]


def _zeros(shape: jax.ShapeDtypeStruct) -> Any:
    """Zeros to be a cotangent; those of integers are of dtype float0, which JAX has no arrays of."""
    return (np if shape.dtype == jax.dtypes.float0 else jnp).zeros(shape.shape, shape.dtype)
