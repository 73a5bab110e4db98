"""Breadth-first accumulation: all micro-batches of a step go through one layer before the next layer.

Depth-first, each micro-batch runs through the whole model before the next begins: weights are gathered for
each of them, and gradients cross the nodes at the end of the last, with no compute left to hide that.
Breadth-first, a layer's weights are gathered once for all micro-batches, and its gradients are complete and
on their way while earlier layers still compute (Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022, on
gradient accumulation). The activations kept for the backward pass are those of all micro-batches; the
working memory of a layer is that of one.

``jax.vmap`` maps the model over micro-batches. Functions called through ``with_batching_rule`` have batching
rules of their own: units run one micro-batch after another (``map_microbatches``).
"""

import contextlib
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from zerojax.schedule.partition import inexact, partition, with_float0

AXIS = "micro_batch"
_mapping = ContextVar("mapping", default=False)


def over_micro_batches(function: Callable[..., Any], *, out_axes: Any) -> Callable[..., Any]:
    """``jax.vmap`` over micro-batches, the leading axis of every argument."""

    def mapped(*args: Any) -> Any:
        # The axis name is part of jit's cache key: a trace in depth must not be used here.
        with _set(True):
            return jax.vmap(function, out_axes=out_axes, axis_name=AXIS)(*args)

    return mapped


def with_batching_rule(
    rule: Callable[..., tuple[Any, Any]], function: Callable[..., Any]
) -> Callable[..., Any]:
    """``function``, which is batched by ``rule`` within ``over_micro_batches``.

    Args:
        rule: called as ``rule(size, mapped, *args)``, where ``mapped`` has a bool for every array in
            ``args``: whether it has a leading axis of ``size`` micro-batches. Returns the result and the
            bools for it.
        function: of pytrees of arrays; it closes over nothing that is traced.
    """
    # Only there: a custom_vmap function that nothing maps has no gradient.
    if not _mapping.get():
        return function
    call = jax.custom_batching.custom_vmap(lambda _, *args: function(*args))
    call.def_vmap(lambda size, mapped, _, *args: rule(size, mapped[1:], *args))
    # For the same reason it gets an argument that is always mapped.
    return lambda *args: call(lax.axis_index(AXIS), *args)


def map_microbatches(body: Callable[..., Any], mapped: tuple[Any, ...]) -> Callable[..., Any]:
    """A function that runs ``body`` on one micro-batch after another.

    Args:
        body: called as ``body(weights, *args)``; it closes over nothing that is traced.
        mapped: for every array in ``args``, whether it has a leading axis of micro-batches.

    Returns:
        A function of the same arguments, whose results all have that axis. Gradients of arrays without it,
        such as the weights, are summed in fp32. The residuals are those of ``body``'s own rematerialisation
        policy; arguments are not kept twice.
    """
    flags = jax.tree.leaves(mapped)

    def alone(*args: Any) -> Any:
        with _set(False):
            return body(*args)

    @jax.custom_vjp
    def run(weights: Any, *args: Any) -> Any:
        each, common, join = partition(args, flags)
        return lax.map(lambda own: alone(weights, *join(own, common)), each)

    def forward(weights: Any, *args: Any) -> tuple[Any, Any]:
        each, common, join = partition(args, flags)

        def one(own: list[Array]) -> tuple[Any, Any]:
            vjp: Any
            out, vjp = jax.vjp(alone, weights, *join(own, common))
            return out, vjp.replace(args_res=[None] * (1 + len(args)))

        out, vjps = lax.map(one, each)
        return out, (weights, args, vjps)

    def backward(residuals: Any, cotangents: Any) -> Any:
        weights, args, vjps = residuals
        each, common, join = partition(args, flags)
        of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), cotangents)

        def one(sums: Any, given: Any) -> tuple[Any, list[Array]]:
            # Each iteration begins when the one before it is done. The two of a double-buffered loop, free
            # to run side by side, took 2% more memory in zero3 with nothing recomputed.
            sums, (own, vjp, cotangent) = lax.optimization_barrier((sums, given))
            held = vjp.replace(args_res=[weights, *join(own, common)])
            of_weights, *of_args = held(with_float0(cotangent, of_one))
            of_own, of_common, _ = partition(tuple(of_args), flags)
            return jax.tree.map(jnp.add, sums, (inexact(of_weights), inexact(of_common))), inexact(of_own)

        def floats(values: Any) -> list[Array]:
            return partition(values, lambda x: jnp.issubdtype(x.dtype, jnp.inexact))[0]

        summed = (floats(weights), floats(common))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), summed)
        sums, of_each = lax.scan(one, zeros, (each, vjps, inexact(cotangents)))
        of_weights, of_common = jax.tree.map(lambda x, like: x.astype(like.dtype), sums, summed)
        return with_float0(of_weights, weights), *join(
            with_float0(of_each, each), with_float0(of_common, common)
        )

    run.defvjp(forward, backward)
    return run


def broadcast_unbatched(size: int, mapped: Any, values: Any) -> Any:
    """Repeat the values that are not ``mapped`` along a new leading axis of ``size`` micro-batches."""
    return jax.tree.map(lambda own, x: x if own else jnp.broadcast_to(x, (size, *x.shape)), mapped, values)


def all_batched(values: Any, mapped: bool) -> Any:
    """The bools of a batching rule for values that all have the axis, or all lack it."""
    return jax.tree.map(lambda _: mapped, values)


@contextlib.contextmanager
def _set(mapping: bool) -> Generator[None]:
    before = _mapping.set(mapping)
    try:
        yield
    finally:
        _mapping.reset(before)
