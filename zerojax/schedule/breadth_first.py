"""Breadth-first accumulation: all micro-batches of a step go through one layer before the next layer.

Depth-first, each micro-batch runs through the whole model before the next begins. Weights are gathered for
each of them, and gradients cross the nodes at the end of the last one, with no compute left to hide that.
Breadth-first, a layer's weights are gathered once for all micro-batches. Its gradients are complete and on
their way while earlier layers still compute. See Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2022),
on gradient accumulation. Activations of all micro-batches are kept for the backward pass; the working memory
of a layer is the one of a single micro-batch.

``jax.vmap`` maps the model over micro-batches. Functions called through ``with_batching_rule`` define how
they are batched: units run one micro-batch after another (``map_microbatches``).
"""

from collections.abc import Callable
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree

from zerojax.matmul.late_zeros import scan, zeros_after
from zerojax.schedule.transforms import Pullback, floats, holding, partition, pullback, with_float0

AXIS = "micro_batch"
Flags = PyTree[Bool]
"""For every array of a pytree, whether it has a leading axis of micro-batches."""
Rule = Callable[..., tuple[PyTree[Array], Flags]]
"""A batching rule like ``jax.custom_batching.custom_vmap``'s, but with flags for all arrays."""
_Residuals = tuple[PyTree[Array], tuple[PyTree[Array], ...], Pullback]
"""The weights, the other arguments, and the remaining residuals of each micro-batch, stacked."""
_mapping = ContextVar("mapping", default=False)


def over_micro_batches[**P, T](function: Callable[P, T], *, out_axes: PyTree[int | None]) -> Callable[P, T]:
    """``jax.vmap`` over micro-batches, the leading axis of every argument."""

    def mapped(*args: P.args, **kwargs: P.kwargs) -> T:
        # The axis name is part of jit's cache key: a trace in depth must not be used here.
        with holding(_mapping, True):
            return jax.vmap(function, out_axes=out_axes, axis_name=AXIS)(*args, **kwargs)

    return mapped


def with_batching_rule[T: PyTree[Array]](rule: Rule, function: Callable[..., T]) -> Callable[..., T]:
    """``function``, which ``rule`` batches inside ``over_micro_batches``.

    It closes over nothing that is traced. The rule is called as ``rule(size, mapped, *args)`` with the number
    of micro-batches and the flags of ``args``, and returns the result and its flags.
    """
    # Only there: a custom_vmap function that nothing maps has no gradient.
    if not _mapping.get():
        return function

    def unbatched(_: Array, *args: PyTree[Array]) -> T:
        with holding(_mapping, False):  # the rule batches the whole function, also such functions within it
            return function(*args)

    call = jax.custom_batching.custom_vmap(unbatched)
    call.def_vmap(lambda size, mapped, _, *args: rule(size, mapped[1:], *args))
    # For the same reason it gets an argument that is always mapped.
    return lambda *args: call(lax.axis_index(AXIS), *args)


def map_microbatches[T: PyTree[Array]](body: Callable[..., T], mapped: tuple[Flags, ...]) -> Callable[..., T]:
    """A function that runs ``body`` on one micro-batch after another.

    ``body`` is called as ``body(weights, *args)``, and closes over nothing that is traced. ``mapped`` are the
    flags of ``args``.

    Returns:
        A function of the same arguments, whose results all have the axis of micro-batches. Gradients of
        arrays without the axis, such as the weights, are summed in fp32. Residuals follow ``body``'s
        rematerialisation policy; arguments are not kept twice.
    """
    flags = jax.tree.leaves(mapped)

    def alone(*args: PyTree[Array]) -> T:
        with holding(_mapping, False):
            return body(*args)

    @jax.custom_vjp
    def run(weights: PyTree[Array], *args: PyTree[Array]) -> T:
        each, common, join = partition(args, flags)
        return lax.map(lambda own: alone(weights, *join(own, common)), each)

    def forward(weights: PyTree[Array], *args: PyTree[Array]) -> tuple[T, _Residuals]:
        each, common, join = partition(args, flags)

        def one(_: tuple[()], own: list[Array]) -> tuple[tuple[()], tuple[T, Pullback]]:
            out, vjp = pullback(alone, weights, *join(own, common))
            # The loop stacks what differs between micro-batches: not the weights, nor arguments once more.
            return (), (out, vjp.replace(args_res=[None] * (1 + len(args))))

        _, (out, vjps) = scan(one, (), each)
        return out, (weights, args, vjps)

    def backward(residuals: _Residuals, cotangents: T) -> tuple[PyTree[Array], ...]:
        weights, args, vjps = residuals
        each, common, join = partition(args, flags)
        of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), cotangents)

        def one(
            sums: PyTree[Array], given: tuple[list[Array], Pullback, list[Array]]
        ) -> tuple[PyTree[Array], list[Array]]:
            # Each iteration begins when the one before it is done. The two of a double-buffered loop, free
            # to run side by side, took 2% more memory in zero3 with nothing recomputed.
            sums, (own, vjp, cotangent) = lax.optimization_barrier((sums, given))
            held = vjp.replace(args_res=[weights, *join(own, common)])
            of_weights, *of_args = held(with_float0(cotangent, of_one))
            of_own, of_common, _ = partition(tuple(of_args), flags)
            return jax.tree.map(jnp.add, sums, (floats(of_weights), floats(of_common))), floats(of_own)

        summed, arrived = (floats(weights), floats(common)), floats(cotangents)
        zeros = jax.tree.map(
            lambda x: zeros_after(arrived, x.shape, jnp.promote_types(x.dtype, jnp.float32)), summed
        )
        sums, of_each = scan(one, zeros, (each, vjps, arrived))
        of_weights, of_common = jax.tree.map(lambda x, like: x.astype(like.dtype), sums, summed)
        return with_float0(of_weights, weights), *join(
            with_float0(of_each, each), with_float0(of_common, common)
        )

    run.defvjp(forward, backward)
    return run


def broadcast_unbatched[T: PyTree[Array]](size: int, mapped: Flags, values: T) -> T:
    """Repeat the values that are not ``mapped`` along a new leading axis of ``size`` micro-batches."""
    return jax.tree.map(lambda own, x: x if own else jnp.broadcast_to(x, (size, *x.shape)), mapped, values)


def all_batched(values: PyTree[Array], mapped: bool) -> Flags:
    """A flag for each value: ``mapped`` says whether all of them have the axis of micro-batches."""
    return jax.tree.map(lambda _: mapped, values)
