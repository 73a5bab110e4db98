"""The schedule of a stack of equal units: gathers ahead of the layer at work, reductions one layer behind.

One ``custom_vjp`` around the whole scan, since no compiler moves a collective across a loop's
iterations by itself. In the order of the program:

- forward, layer i: the node hop of layer i + 2 (which brings delta's copy of it up to date), the local hop
  of layer i + 1; run layer i.
- the last layer's weights stay for the backward pass, which begins with them.
- backward, layer i: the node hop of layer i - 2 (without hpZ), the local hop of layer i - 1; deliver layer
  i + 1's gradients (both hops); run layer i's vjp; encode its gradients.

Within an iteration none of these depends on another, so that the scheduler can run them side by side: what
hops between nodes have to themselves is a whole layer. Carried from one iteration to the next are one layer's
weights, the secondary partitions of up to two, and one layer's encoded gradients. Where a pass has no node
hop, all is gathered one layer ahead. The layers for which nothing is left to fetch stand outside the loops.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array

from zerojax.codec import Seed
from zerojax.layout import Leaf
from zerojax.remat import rematerialised
from zerojax.route import Route, Values
from zerojax.unit import Body, Sharded, take_apart


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
    route, leaves, (sources, sinks, seeds) = take_apart(weights)
    copies = None if weights[0].copy is None else tuple(weight.copy for weight in weights)
    body = jax.named_scope("layer")(rematerialised(body, route.remat))
    return _scan(route, leaves, body, sources, sinks, seeds, copies, x, state, shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scan(
    route: Route,
    leaves: tuple[Leaf, ...],
    body: Body,
    sources: Values,
    sinks: Values,
    seeds: Seed,
    copies: Values | None,
    x: Any,
    state: Any,
    shared: Any,
) -> tuple[Any, Any, Values | None]:
    del sinks, seeds

    def run(whole: Values, x: Any, state: Any) -> tuple[Any, Any, None]:
        return *body(whole, x, state, shared), None

    x, states, copies, *_ = _forward(route, leaves, run, sources, copies, x, state)
    return x, states, copies


def _forward(
    route: Route,
    leaves: tuple[Leaf, ...],
    run: Any,
    sources: Values,
    copies: Values | None,
    x: Any,
    state: Any,
) -> tuple[Any, Any, Values | None, Any, Any]:
    """Every layer in order, each gathered while those before it run.

    Returns the activations, the stacked state, the copies, and what the backward pass needs: of all layers
    but the last, stacked, and of the last.
    """
    last = sources[0].shape[0] - 1
    lead = min(route.lead(route.source, leaves), max(last, 1))
    keep = copies is None and route.source != route.keep

    def fetch(copies: Values | None, index: Any) -> tuple[Values | None, Values]:
        if copies is None:
            return None, route.to_secondary(route.source, _at(sources, index), leaves)
        fresh = route.to_updated(_at(sources, index), _at(copies, index), leaves)
        return _put(copies, fresh, index), fresh

    def layer(carry: Any, index: Any, *, fetching: bool) -> Any:
        x, copies, queue, whole, stacks = carry
        if fetching:
            copies, further = fetch(copies, index + lead)
            queue = (*queue, further)
        next_whole = route.to_whole(queue[1], leaves)
        x, after, residual = run(whole, x, _at(state, index))
        stacks = _put(stacks, (after, residual, queue[0] if keep else None), index)
        return x, copies, queue[1:], next_whole, stacks

    first: list[Values] = []
    for index in range(lead):
        copies, secondary = fetch(copies, index)
        first.append(secondary)
    queue = tuple(first)
    whole = route.to_whole(queue[0], leaves)
    run, (_, *one) = _trace_once(run, whole, x, _at(state, 0))
    # Filled by hand, in place: a scan would stack what its own iterations leave, and no more.
    stacks = _empty((*one, queue[0] if keep else None), last)
    carry = (x, copies, queue, whole, stacks)
    fetching = last - lead + 1
    if fetching:  # none where the stack has but one layer
        carry, _ = lax.scan(lambda c, i: (layer(c, i, fetching=True), None), carry, jnp.arange(fetching))
    for index in range(fetching, last):
        carry = layer(carry, index, fetching=False)
    x, copies, _, whole, (states, residuals, kept) = carry
    x, after, residual = run(whole, x, _at(state, last))
    states = jax.tree.map(lambda most, one: jnp.concatenate([most, one[None]]), states, after)
    return x, states, copies, (residuals, kept if copies is None else copies), (residual, whole)


def _scan_fwd(
    route: Route,
    leaves: tuple[Leaf, ...],
    body: Body,
    sources: Values,
    sinks: Values,
    seeds: Seed,
    copies: Values | None,
    x: Any,
    state: Any,
    shared: Any,
) -> tuple[tuple[Any, Any, Values | None], Any]:
    del sinks

    def run(whole: Values, x: Any, state: Any) -> tuple[Any, Any, Any]:
        vjp: Any
        (x, after), vjp = jax.vjp(body, whole, x, state, shared)
        # Weights are gathered again, and what all layers share is kept once.
        _, own_x, own_state, _ = vjp.args_res
        return x, after, vjp.replace(args_res=[None, own_x, own_state, None])

    x, states, copies, most, last = _forward(route, leaves, run, sources, copies, x, state)
    return (x, states, copies), (sources, seeds, shared, most, last)


def _scan_bwd(
    route: Route, leaves: tuple[Leaf, ...], body: Body, residuals: Any, cotangents: Any
) -> tuple[Any, ...]:
    del body
    sources, seeds, shared, (stacked, copies), (last_residual, last_whole) = residuals
    cotangent, state_cotangents, _ = cotangents
    # Keeps the gathers of a short stack from being merged with those of the forward pass.
    sources, copies, cotangent = lax.optimization_barrier((sources, copies, cotangent))
    # No gradient flows through the state; its cotangents only say which shapes zeros must have.
    no_state = jax.tree.map(_zero_like_one, state_cotangents)
    last = sources[0].shape[0] - 1

    def fetch(index: Any) -> Values:
        kept = sources if route.source == route.keep else copies
        return route.to_secondary(route.keep, _at(kept, index), leaves)

    def run(residual: Any, whole: Values, cotangent: Any) -> tuple[Values, Any, Any]:
        _, x, state, _ = residual.args_res
        vjp = residual.replace(args_res=[whole, x, state, shared])
        grads, before, _, of_shared = vjp((cotangent, no_state))
        return grads, before, _inexact(of_shared)

    def encode(grads: Values, index: Any) -> Values:
        return route.encode(grads, leaves, seeds[index])

    def deliver(payload: Values, index: Any) -> Values:
        return route.deliver(payload, leaves, seeds[index])

    def finish(sums: Values, of_shared: Any, cotangent: Any) -> tuple[Any, ...]:
        return None, sums, None, None, cotangent, None, _with_float0(of_shared, shared)

    # Filled in place, layer by layer: to join parts afterwards would hold all gradients twice.
    sums = tuple(route.zero_sink(leaf) for leaf in leaves)
    if last == 0:
        grads, cotangent, of_shared = run(last_residual, last_whole, cotangent)
        return finish(_put(sums, deliver(encode(grads, 0), 0), 0), of_shared, cotangent)

    lead = min(route.lead(route.keep, leaves), last)
    whole = route.to_whole(fetch(last - 1), leaves)
    queue = tuple(fetch(last - ahead) for ahead in range(2, lead + 1))
    grads, cotangent, of_shared = run(last_residual, last_whole, cotangent)

    def layer(carry: Any, index: Any, *, fetching: bool) -> Any:
        cotangent, of_shared, queue, whole, payload, sums = carry
        if fetching:
            queue = (*queue, fetch(index - lead))
        next_whole = route.to_whole(queue[0], leaves)
        sums = _put(sums, deliver(payload, index + 1), index + 1)
        grads, cotangent, more = run(_at(stacked, index), whole, cotangent)
        of_shared = jax.tree.map(jnp.add, of_shared, more)
        return cotangent, of_shared, queue[1:], next_whole, encode(grads, index), sums

    carry = (cotangent, of_shared, queue, whole, encode(grads, last), sums)
    carry, _ = lax.scan(
        lambda c, i: (layer(c, i, fetching=True), None), carry, jnp.arange(lead, last), reverse=True
    )
    for index in range(lead - 1, 0, -1):
        carry = layer(carry, index, fetching=False)
    cotangent, of_shared, _, whole, payload, sums = carry
    sums = _put(sums, deliver(payload, 1), 1)
    grads, cotangent, more = run(_at(stacked, 0), whole, cotangent)
    of_shared = jax.tree.map(jnp.add, of_shared, more)
    return finish(_put(sums, deliver(encode(grads, 0), 0), 0), of_shared, cotangent)


_scan.defvjp(_scan_fwd, _scan_bwd)


def _at(stacked: Any, index: Any) -> Any:
    """One layer of a stacked pytree."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)


def _put(stacked: Any, layer: Any, index: Any) -> Any:
    """One layer of a stacked pytree replaced."""
    return jax.tree.map(lambda x, one: lax.dynamic_update_index_in_dim(x, one, index, 0), stacked, layer)


def _empty(one: Any, layers: int) -> Any:
    """Room for what so many layers leave: on GPUs memory that nobody has written yet."""
    return jax.tree.map(lambda x: lax.empty((layers, *x.shape), x.dtype), one)


def _trace_once(function: Any, *args: Any) -> tuple[Any, Any]:
    """The same function for arguments like these, traced now and never again; and the shapes it returns."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    call, tree = jaxpr_as_fun(closed), jax.tree.structure(shapes)
    return lambda *args: jax.tree.unflatten(tree, call(*jax.tree.leaves(args))), shapes


def _zero_like_one(stacked: Any) -> Any:
    """Zeros for one layer of a stacked cotangent; integers have those of dtype float0."""
    if stacked.dtype == jax.dtypes.float0:
        return np.zeros(stacked.shape[1:], jax.dtypes.float0)
    return jnp.zeros(stacked.shape[1:], stacked.dtype)


def _inexact(cotangents: Any) -> list[Array]:
    """The cotangents that are more than float0, which a loop can't carry."""
    return [x for x in jax.tree.leaves(cotangents) if x.dtype != jax.dtypes.float0]


def _with_float0(cotangents: list[Array], primals: Any) -> Any:
    """Undo ``_inexact``: a cotangent for each of ``primals``."""
    given = iter(cotangents)

    def fill(primal: Array) -> Any:
        if jnp.issubdtype(primal.dtype, jnp.inexact):
            return next(given)
        return np.zeros(primal.shape, jax.dtypes.float0)

    return jax.tree.map(fill, primals)
