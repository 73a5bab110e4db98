"""Reads and replaces single layers of stacked pytrees."""

from typing import Any

import jax
from jax import lax


def layer_at(stacked: Any, index: Any) -> Any:
    """The layer at an index."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)


def put_layer(stacked: Any, layer: Any, index: Any) -> Any:
    """``stacked`` with one layer replaced."""
    return jax.tree.map(lambda x, one: lax.dynamic_update_index_in_dim(x, one, index, 0), stacked, layer)


def empty_layers(one: Any, layers: int) -> Any:
    """A stack of ``layers`` layers like ``one``, uninitialised: on GPUs nothing is written."""
    return jax.tree.map(lambda x: lax.empty((layers, *x.shape), x.dtype), one)
