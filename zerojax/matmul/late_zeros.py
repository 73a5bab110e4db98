"""Arrays of zeros that are allocated late, and reads and writes of one element of a stack.

XLA allocates all zeros of a shape that depend on nothing at the same time, when it needs the first of them.
So the gradient of an embedding, which the end of a backward pass sums up, would take memory from the pass's
beginning.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree


def zeros_after(after: PyTree[Array], shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Zeros of this shape that are allocated when ``after`` has been computed."""
    zero, _ = lax.optimization_barrier((jnp.zeros((), dtype), after))
    return jnp.broadcast_to(zero, tuple(shape))


def scan[C: PyTree[Array], X: PyTree[Array], Y: PyTree[Array]](
    body: Callable[[C, X], tuple[C, Y]], carry: C, xs: X
) -> tuple[C, Y]:
    """``lax.scan`` that allocates its results when ``xs`` have been computed. It has no derivative."""
    structures = []

    def flat(carry: C, x: X) -> tuple[C, list[Array]]:
        carry, results = body(carry, x)
        # The structure of a result that holds a function, such as a pullback, differs from trace to trace.
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
    """The elements of stacks at an index of their first axis, from 0."""

    def one(x: Array) -> Array:
        return lax.dynamic_index_in_dim(x, number, keepdims=False, allow_negative_indices=False)

    return jax.tree.map(one, stacks)


def put[T: PyTree[Array]](stacks: T, elements: T, number: Int[Array, ""]) -> T:
    """Stacks with ``elements`` at an index of their first axis, from 0."""

    def one(x: Array, new: Array) -> Array:
        return lax.dynamic_update_index_in_dim(x, new, number, 0, allow_negative_indices=False)

    return jax.tree.map(one, stacks, elements)
