"""The schedule of a stack of equal units: gathers ahead of the layer at work, reductions behind it.

One ``custom_vjp`` around the whole scan, since no compiler moves a collective across a loop's
iterations by itself. In the order of the program:

- forward, layer i: layer i + 2 crosses the nodes; decode layer i + 1 (which brings delta's copy of it up to
  date) and gather it within the node; encode layer i + 3 for the next crossing; run layer i.
- the last layer's weights stay for the backward pass, which begins with them.
- backward, layer i: the same for i - 2, i - 1 and i - 3 (without hpZ); layer i + 1's gradients take their hop
  within the node, layer i + 2's that between nodes; sum layer i + 3's up; run layer i's vjp; encode its
  gradients.

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from zerojax.schedule.breadth_first import all_of, mapped_by, one_after_another, spread
from zerojax.schedule.float0 import inexact, with_float0
from zerojax.schedule.gradient_queue import Belt, put_layer
from zerojax.schedule.remat import rematerialised
from zerojax.schedule.strategy import Route, Values
from zerojax.schedule.unit import Body, Sharded, call_gathered, refuse_mapped, take_apart, taken
from zerojax.sharding.layout import Leaf
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
    route, leaves, (sources, sinks, seeds), copies = take_apart(taken(list(weights)))
    body = jax.named_scope("layer")(rematerialised(body, route.remat))

    def in_breadth(size: int, mapped: Any, *args: Any) -> tuple[Any, Any]:
        """Every layer for all micro-batches, one after another; each layer's state has them, too."""
        *weights, x, state, shared = args
        *weights_mapped, x_mapped, state_mapped, shared_mapped = mapped
        refuse_mapped(weights_mapped)
        x, state = spread(size, x_mapped, x), spread(size, state_mapped, state)
        state = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), state)
        turns = one_after_another(body, (all_of(x, True), all_of(state, True), shared_mapped))
        out: Any = _scan(route, leaves, _Layer(turns), *weights, x, state, shared)
        x, state, copies = out
        state = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), state)
        return (x, state, copies), (all_of(x, True), all_of(state, True), all_of(copies, False))

    run = mapped_by(in_breadth, functools.partial(_scan, route, leaves, _Layer(body)))
    return run(sources, sinks, seeds, copies, x, state, shared)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scan(
    route: Route,
    leaves: tuple[Leaf, ...],
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
    x, states, copies, *_ = _forward(route, leaves, layer.run, sources, copies, x, state, shared)
    return x, states, copies


def _one_by_one(
    route: Route,
    leaves: tuple[Leaf, ...],
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
        route, sources = dataclasses.replace(route, source="secondary"), fresh
    sources = lax.stop_gradient(sources)  # gradients go to the sinks, and kernels that encode have none

    def body(whole: Values, inputs: Any) -> tuple[Any, Any]:
        x, state, shared = inputs
        return layer.body(whole, x, jax.tree.map(lax.stop_gradient, state), shared)

    def one(x: Any, own: Any) -> tuple[Any, Any]:
        source, sink, seed, state = own
        return call_gathered(route, leaves, body, source, sink, seed, (x, state, shared))

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
    arrays, tree = jax.tree.flatten((values, others))
    held = iter(lax.optimization_barrier(inexact(arrays)))
    return jax.tree.unflatten(tree, [x if x.dtype == jax.dtypes.float0 else next(held) for x in arrays])


def _forward(
    route: Route,
    leaves: tuple[Leaf, ...],
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
    last = sources[0].shape[0] - 1
    crosses = route.crosses_nodes(route.source, leaves)
    keep = copies is None and route.source != route.keep

    def encode(copies: Values | None, index: Any) -> Values:
        return route.encode_weights(_at(sources, index), _at(copies, index), leaves)

    def cross(payload: Values) -> Values:
        return route.cross_nodes(payload, leaves, delta=copies is not None)

    def settle(copies: Values | None, arrived: Values, index: Any) -> tuple[Values | None, Values]:
        if not crosses:
            return copies, route.to_secondary(route.source, _at(sources, index), leaves)
        fresh = route.decode_weights(arrived, _at(copies, index), leaves)
        return (None if copies is None else put_layer(copies, fresh, index)), fresh

    def layer(carry: Any, index: Any, *, crossing: bool) -> Any:
        x, copies, payload, arrived, own, whole, stacks = carry
        copies, secondary = settle(copies, arrived, index + 1)
        if crossing:
            arrived = cross(payload)
            # The last one encoded is never sent: that costs less than a layer outside the loop.
            payload = encode(copies, jnp.minimum(index + 3, last))
        next_whole = route.to_whole(secondary, leaves)
        x, after, residual = run(whole, x, _at(state, index), shared)
        stacks = put_layer(stacks, (after, residual, own), index)
        return x, copies, payload, arrived, secondary if keep else None, next_whole, stacks

    payload, arrived = (), ()
    if crosses:
        arrived = cross(encode(copies, 0))
    copies, secondary = settle(copies, arrived, 0)
    if crosses and last > 0:
        arrived = cross(encode(copies, 1))
        payload = encode(copies, min(2, last))
    whole = route.to_whole(secondary, leaves)
    _, *one = run.shapes(whole, x, _at(state, 0), shared)
    # Filled by hand, in place: a scan would stack what its own iterations leave, and no more.
    own = secondary if keep else None
    stacks = _empty((*one, own), last)
    carry = (x, copies, payload, arrived, own, whole, stacks)
    looped = max(last - 1, 0) if crosses else last
    if looped:
        carry, _ = lax.scan(lambda c, i: (layer(c, i, crossing=crosses), None), carry, jnp.arange(looped))
    for index in range(looped, last):
        carry = layer(carry, index, crossing=False)
    x, copies, *_, whole, (states, residuals, kept) = carry
    x, after, residual = run(whole, x, _at(state, last), shared)
    states = jax.tree.map(lambda most, one: jnp.concatenate([most, one[None]]), states, after)
    return x, states, copies, (residuals, kept if copies is None else copies), (residual, whole)


def _scan_fwd(
    route: Route, leaves: tuple[Leaf, ...], layer: _Layer, *args: Any
) -> tuple[tuple[Any, Any, Values | None], Any]:
    def function(
        sources: Values, sinks: Values, seeds: Seed, copies: Values | None, x: Any, state: Any, shared: Any
    ) -> Any:
        del sinks, seeds
        return _forward(route, leaves, layer.run_keeping, sources, copies, x, state, shared)

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
        own = _one_by_one(route, leaves, layer, fresh, sources, sinks, seeds, x, state, shared)
        return *own, fresh, *kept

    x, states, fresh, *kept = _with_derivatives_of(plain, function)(*args)
    sources, sinks, seeds, _, *inputs = args
    return (x, states, fresh), ((fresh, sources, sinks, seeds, *inputs), kept)


def _scan_bwd(
    route: Route, leaves: tuple[Leaf, ...], layer: _Layer, residuals: Any, cotangents: Any
) -> tuple[Any, ...]:
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
        return _backward(route, leaves, after, kept, cotangent, sources, seeds, shared)

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
            return _one_by_one(route, leaves, layer, fresh, sources, sinks, seeds, x, state, shared)[0]

        sums, of_x, of_shared = jax.vjp(run, sinks, x, shared)[1](cotangent)
        return sums, of_x, inexact(of_shared)

    sums, of_x, of_shared = _with_derivatives_of(plain, function)(kept, cotangent, *args)
    return None, sums, None, None, of_x, None, with_float0(of_shared, args[-1])


def _backward(
    route: Route,
    leaves: tuple[Leaf, ...],
    after: Any,
    kept: Any,
    cotangent: Any,
    sources: Values,
    seeds: Seed,
    shared: Any,
) -> tuple[Values, Any, list[Any]]:
    """Every layer's vjp in reverse order, each gathered again, and its gradients sent, beside the others'.

    Args:
        route: as of the forward pass, with ``leaves``.
        leaves: see ``route``.
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
    last = sources[0].shape[0] - 1

    kept = sources if route.source == route.keep else copies
    crosses = route.crosses_nodes(route.keep, leaves)
    belt = Belt(route, leaves, seeds, last)

    def encode_weights(index: Any) -> Values:
        return route.encode_weights(_at(kept, index), None, leaves)

    def cross(payload: Values) -> Values:
        return route.cross_nodes(payload, leaves, delta=False)

    def settle(arrived: Values, index: Any) -> Values:
        if crosses:
            return route.decode_weights(arrived, None, leaves)
        return route.to_secondary(route.keep, _at(kept, index), leaves)

    def run(residual: Any, whole: Values, cotangent: Any) -> tuple[Values, Any, Any]:
        _, x, state, _ = residual.args_res
        vjp = residual.replace(args_res=[whole, x, state, shared])
        grads, before, _, of_shared = vjp((cotangent, no_state))
        return grads, before, inexact(of_shared)

    # Filled in place, layer by layer: to join parts afterwards would hold all gradients twice.
    sums = tuple(route.zero_sink(leaf) for leaf in leaves)
    payload, arrived = (), ()
    whole = last_whole
    if last > 0:
        if crosses:
            arrived = cross(encode_weights(last - 1))
        whole = route.to_whole(settle(arrived, last - 1), leaves)
        if crosses and last > 1:
            arrived = cross(encode_weights(last - 2))
            payload = encode_weights(max(last - 3, 0))
    grads, cotangent, of_shared = run(last_residual, last_whole, cotangent)

    def layer(carry: Any, index: Any, *, crossing: bool) -> Any:
        cotangent, of_shared, payload, arrived, whole, load, sums = carry
        secondary = settle(arrived, index - 1)
        if crossing:
            arrived = cross(payload)
            payload = encode_weights(jnp.maximum(index - 3, 0))
        next_whole = route.to_whole(secondary, leaves)
        sent, sums = belt.advance(load, sums, index + 1)
        grads, cotangent, more = run(_at(stacked, index), whole, cotangent)
        of_shared = jax.tree.map(jnp.add, of_shared, more)
        return cotangent, of_shared, payload, arrived, next_whole, belt.put(grads, index, sent), sums

    carry = (cotangent, of_shared, payload, arrived, whole, belt.put(grads, last), sums)
    # The loop takes the layers from `top` - 1 down to `stop`: those before it leave something for every hop.
    stop = min(2 if crosses else 1, last)
    top = max(last - max(belt.hops - 1, 0), stop)
    for index in range(last - 1, top - 1, -1):
        carry = layer(carry, index, crossing=crosses)
    if top > stop:
        *others, load, sums = carry
        carry, _ = lax.scan(
            lambda c, i: (layer(c, i, crossing=crosses), None),
            (*others, belt.fill(load), sums),
            jnp.arange(stop, top),
            reverse=True,
        )
    for index in range(stop - 1, 0, -1):
        carry = layer(carry, index, crossing=False)
    cotangent, of_shared, _, _, whole, load, sums = carry
    if last > 0:
        sent, sums = belt.advance(load, sums, 1)
        grads, cotangent, more = run(_at(stacked, 0), whole, cotangent)
        of_shared = jax.tree.map(jnp.add, of_shared, more)
        load = belt.put(grads, 0, sent)
    return belt.drain(load, sums), cotangent, of_shared


_scan.defvjp(_scan_fwd, _scan_bwd)


def _at(stacked: Any, index: Any) -> Any:
    """One layer of a stacked pytree."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)


def _empty(one: Any, layers: int) -> Any:
    """Room for what so many layers leave: on GPUs memory that nobody has written yet."""
    return jax.tree.map(lambda x: lax.empty((layers, *x.shape), x.dtype), one)


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
