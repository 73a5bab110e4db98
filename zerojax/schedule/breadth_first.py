"""Breadth-first accumulation: all micro-batches of a step go through one layer before the next layer.

In depth, a micro-batch runs through the whole model before the next one begins, so that weights are gathered
for each, and gradients can cross the nodes only when the last one has nothing left to hide that behind. In
breadth, a layer's weights are gathered once for all micro-batches, and its gradients are complete, and on
their way, while earlier layers still are at work (Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022,
on gradient accumulation). Activations that wait for the backward pass are those of all micro-batches; what
a layer needs while it is at work is that of one.

The model is mapped over micro-batches by ``jax.vmap``. Functions called through ``with_batching_rule`` say
themselves how they are mapped: units run for one micro-batch after another (``map_microbatches``).
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
    """``jax.vmap`` over micro-batches: those of every argument along its leading axis."""

    def mapped(*args: Any) -> Any:
        # The axis has a name for jit's sake, whose traces must not be taken for those of a model in depth.
        with _set(True):
            return jax.vmap(function, out_axes=out_axes, axis_name=AXIS)(*args)

    return mapped


def with_batching_rule(
    rule: Callable[..., tuple[Any, Any]], function: Callable[..., Any]
) -> Callable[..., Any]:
    """``function``; within ``over_micro_batches`` one whose mapping is what ``rule`` says.

    Args:
        rule: called as ``rule(size, mapped, *args)``, where ``mapped`` says of every array in ``args``
            whether it has a leading axis of ``size`` micro-batches; returns the result, and likewise of it.
        function: of pytrees of arrays; it closes over nothing that is traced.
    """
    # Not always: a function with such a rule has no gradient where nothing maps it.
    if not _mapping.get():
        return function
    call = jax.custom_batching.custom_vmap(lambda _, *args: function(*args))
    call.def_vmap(lambda size, mapped, _, *args: rule(size, mapped[1:], *args))
    # For the same reason an argument that is always mapped.
    return lambda *args: call(lax.axis_index(AXIS), *args)


def map_microbatches(body: Callable[..., Any], mapped: tuple[Any, ...]) -> Callable[..., Any]:
    """``body`` for one micro-batch after another, as a function of all.

    Args:
        body: called as ``body(weights, *args)``; it closes over nothing that is traced.
        mapped: of every array in ``args``, whether it has a leading axis of micro-batches.

    Returns:
        A function of the same arguments, whose results all have that axis. Gradients of what has none, as
        the weights, are summed in fp32. What a micro-batch's backward pass needs is kept as ``body``'s
        own rematerialisation says; arguments are not kept twice.
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
            # One iteration begins when the one before it is done: the two of a double-buffered loop, free to
            # run side by side, took 2% more memory in zero3 with nothing recomputed.
            sums, (own, vjp, cotangent) = lax.optimization_barrier((sums, given))
            held = vjp.replace(args_res=[weights, *join(own, common)])
            of_weights, *of_args = held(with_float0(cotangent, of_one))
            of_own, of_common, _ = partition(tuple(of_args), flags)
            return jax.tree.map(jnp.add, sums, (inexact(of_weights), inexact(of_common))), inexact(of_own)

        floats = [_floats(weights), _floats(common)]
        zeros = jax.tree.map(_zero_sum, tuple(floats))
        sums, of_each = lax.scan(one, zeros, (each, vjps, inexact(cotangents)))
        of_weights, of_common = jax.tree.map(lambda x, like: x.astype(like.dtype), list(sums), floats)
        return with_float0(of_weights, weights), *join(
            with_float0(of_each, each), with_float0(of_common, common)
        )

    run.defvjp(forward, backward)
    return run


def broadcast_unbatched(size: int, mapped: Any, values: Any) -> Any:
    """Values with a leading axis of ``size`` micro-batches: those that have none, repeated."""
    return jax.tree.map(lambda own, x: x if own else jnp.broadcast_to(x, (size, *x.shape)), mapped, values)


def all_batched(values: Any, mapped: bool) -> Any:
    """What a rule says of results that all have the axis, or none of which has."""
    return jax.tree.map(lambda _: mapped, values)


@contextlib.contextmanager
def _set(mapping: bool) -> Generator[None]:
    before = _mapping.set(mapping)
    try:
        yield
    finally:
        _mapping.reset(before)


def _floats(values: Any) -> list[Array]:
    return partition(values, lambda x: jnp.issubdtype(x.dtype, jnp.inexact))[0]


def _zero_sum(like: Array) -> Array:
    return jnp.zeros(like.shape, jnp.promote_types(like.dtype, jnp.float32))
