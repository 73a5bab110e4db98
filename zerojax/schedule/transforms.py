"""Tools for pure functions and their pytrees: split in parts, or differentiated."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree


class Pullback(Protocol):
    """The result of ``jax.vjp``: a pytree of residuals that maps cotangents back.

    ``args_res`` are the residuals that are arguments of the function. They can be taken out, and put back
    before the call, so that a loop stacks and keeps only the other residuals for the backward pass.
    """

    @property
    def args_res(self) -> list[PyTree[Array]]:
        """The residuals that are arguments: one for each argument."""
        ...

    def replace(self, *, args_res: Sequence[PyTree[Array]]) -> Self:
        """The pullback with other arguments; None takes one out."""
        ...

    def __call__(self, cotangents: PyTree[Array], /) -> tuple[PyTree[Array], ...]:
        """The cotangents of the arguments."""
        ...


def pullback[T](function: Callable[..., T], *primals: PyTree[Array]) -> tuple[T, Pullback]:
    """``jax.vjp`` with types: the result, and the pullback from its cotangents to the arguments'."""
    out, vjp = jax.vjp(function, *primals)
    return out, cast(Pullback, vjp)


@contextlib.contextmanager
def holding[T](variable: ContextVar[T], value: T) -> Generator[None]:
    """Within this context the variable has the value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


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

    Leaves that are not arrays (flags, None, functions) stay in place.
    """
    arrays, rest, combine = partition(arguments, lambda leaf: isinstance(leaf, jax.Array | np.ndarray))
    return arrays, lambda others: combine(others, rest)


def is_float(x: Array) -> bool:
    """Whether a value, or a ShapeDtypeStruct, has a cotangent other than float0."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floats(values: PyTree[Array]) -> list[Array]:
    """The floating-point values, or their cotangents. Cotangents of integers are float0.

    No loop can carry float0.
    """
    return [x for x in jax.tree.leaves(values) if is_float(x)]


def with_float0[T: PyTree[Array]](cotangents: Sequence[Array], primals: T) -> T:
    """Undo ``floats``: a cotangent for each of ``primals``, which may be ShapeDtypeStructs."""
    _, integers, combine = partition(primals, is_float)
    return combine(cotangents, [np.zeros(x.shape, jax.dtypes.float0) for x in integers])
