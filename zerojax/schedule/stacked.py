"""Layers of stacked pytrees: read, replaced, and room for them."""

from typing import Any

import jax
from jax import lax


def layer_at(stacked: Any, index: Any) -> Any:
    """One layer."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)


def put_layer(stacked: Any, layer: Any, index: Any) -> Any:
    """The same with one layer replaced."""
    return jax.tree.map(lambda x, one: lax.dynamic_update_index_in_dim(x, one, index, 0), stacked, layer)


def empty_layers(one: Any, layers: int) -> Any:
    """Room for so many layers like ``one``: on GPUs memory that nobody has written yet."""
    return jax.tree.map(lambda x: lax.empty((layers, *x.shape), x.dtype), one)
