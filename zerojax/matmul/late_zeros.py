"""Arrays of zeros that take memory only from when they are needed.

XLA makes all zeros of a shape that depend on nothing at once, when the first of them are needed, however much
later the others are. So the gradient of an embedding, which the end of a backward pass sums up, would take
memory from its beginning, beside what the layers make.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree


def zeros_after(after: PyTree[Array], shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Zeros that are allocated when ``after`` is there."""
    zero, _ = lax.optimization_barrier((jnp.zeros((), dtype), after))
    return jnp.broadcast_to(zero, tuple(shape))


def scan[C: PyTree[Array], X: PyTree[Array], Y: PyTree[Array]](
    body: Callable[[C, X], tuple[C, Y]], carry: C, xs: X
) -> tuple[C, Y]:
    """``lax.scan``, whose stacks of results are allocated when ``xs`` are there. It has no derivative."""
    structures = []

    def flat(carry: C, x: X) -> tuple[C, list[Array]]:
        carry, results = body(carry, x)
        # Of a result that holds a function, such as a pullback, the structure differs from trace to trace.
        leaves, structure = jax.tree.flatten(results)
        structures.append(structure)
        return carry, leaves

    def turn(number: Int[Array, ""], state: tuple[C, list[Array]]) -> tuple[C, list[Array]]:
        carry, stacks = state
        carry, results = flat(carry, at(xs, number))
        return carry, put(stacks, results, number)

    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
    count = len(jax.tree.leaves(xs)[0])
    stacks = [zeros_after(xs, (count, *y.shape), y.dtype) for y in jax.eval_shape(flat, carry, first)[1]]
    carry, stacks = lax.fori_loop(0, count, turn, (carry, stacks))
    return carry, jax.tree.unflatten(structures[-1], stacks)


def at[T: PyTree[Array]](stacks: T, number: Int[Array, ""]) -> T:
    """The elements of stacks at a place."""

    def one(x: Array) -> Array:
        return lax.dynamic_index_in_dim(x, number, keepdims=False, allow_negative_indices=False)

    return jax.tree.map(one, stacks)


def put[T: PyTree[Array]](stacks: T, elements: T, number: Int[Array, ""]) -> T:
    """Stacks with other elements at a place."""

    def one(x: Array, new: Array) -> Array:
        return lax.dynamic_update_index_in_dim(x, new, number, 0, allow_negative_indices=False)

    return jax.tree.map(one, stacks, elements)
