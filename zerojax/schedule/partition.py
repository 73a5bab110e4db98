"""Splits pytrees into two lists of leaves and combines them again."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree


def partition[T: PyTree](
    tree: T,
    chosen: Sequence[bool] | Callable[[Any], bool],
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[list[Any], list[Any], Callable[[Sequence[Any], Sequence[Any]], T]]:
    """Split the leaves of a pytree in two.

    ``chosen`` is a flag for each leaf, or a function of a leaf.

    Returns:
        The chosen leaves, the others, and a function from two such lists to a pytree; it keeps no leaf
        alive.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    flags = [chosen(leaf) for leaf in leaves] if callable(chosen) else list(chosen)

    def combine(first: Sequence[Any], second: Sequence[Any]) -> T:
        parts = iter(first), iter(second)
        return jax.tree.unflatten(structure, [next(parts[0] if flag else parts[1]) for flag in flags])

    pairs = list(zip(leaves, flags, strict=True))
    return [x for x, flag in pairs if flag], [x for x, flag in pairs if not flag], combine


def split_arrays[T: PyTree](arguments: T) -> tuple[list[Array], Callable[[Sequence[Array]], T]]:
    """The arrays among ``arguments``, and a function that puts other arrays in their place.

    Leaves that are not arrays (flags, None, functions) stay as they are.
    """
    arrays, rest, combine = partition(arguments, lambda leaf: isinstance(leaf, jax.Array | np.ndarray))
    return arrays, lambda others: combine(others, rest)


def inexact(cotangents: PyTree[Array]) -> list[Array]:
    """The cotangents of floating-point values: those of integers are float0, which no loop can carry."""
    return partition(cotangents, lambda x: x.dtype != jax.dtypes.float0)[0]


def is_float(x: Array) -> bool:
    """Whether a value, or a ShapeDtypeStruct, has a cotangent other than float0."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floats(values: PyTree[Array]) -> list[Array]:
    """The values that are floating-point (``is_float``)."""
    return partition(values, is_float)[0]


def with_float0[T: PyTree[Array]](cotangents: Sequence[Array], primals: T) -> T:
    """Undo ``inexact``: a cotangent for each of ``primals``, which may be ShapeDtypeStructs."""
    _, integers, combine = partition(primals, is_float)
    return combine(cotangents, [np.zeros(x.shape, jax.dtypes.float0) for x in integers])
