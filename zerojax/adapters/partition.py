"""Arguments of a module's call, taken apart into what is traced and what is not."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array


def split_traced(arguments: Any) -> tuple[list[Array], Callable[[Sequence[Array]], Any]]:
    """The arrays among ``arguments``, and how to put others in their place.

    Args:
        arguments: any pytree; leaves that are no arrays (flags, None, functions) stay as they are.

    Returns:
        The arrays in order, and a function from such a list to the pytree. It keeps no array alive.
    """
    leaves, tree = jax.tree.flatten(arguments)
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    rest = [None if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]

    def join(arrays: Sequence[Array]) -> Any:
        given = iter(arrays)
        filled = [next(given) if array else leaf for leaf, array in zip(rest, is_array, strict=True)]
        return jax.tree.unflatten(tree, filled)

    return [leaf for leaf, array in zip(leaves, is_array, strict=True) if array], join
