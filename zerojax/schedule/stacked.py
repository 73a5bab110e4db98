"""Reads and replaces single layers of stacked pytrees."""

import jax
from jax import lax
from jaxtyping import Array, Int, PyTree

Index = int | Int[Array, ""]
"""Of a layer: a number while layers are peeled off a loop, traced within it."""


def layer_at[T: PyTree[Array]](stacked: T, index: Index) -> T:
    """The layer at an index."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)


def put_layer[T: PyTree[Array]](stacked: T, layer: T, index: Index) -> T:
    """``stacked`` with one layer replaced."""
    return jax.tree.map(lambda x, one: lax.dynamic_update_index_in_dim(x, one, index, 0), stacked, layer)


def empty_layers[T: PyTree[Array]](one: T, layers: int) -> T:
    """A stack of ``layers`` layers like ``one``, uninitialised: on GPUs nothing is written."""
    return jax.tree.map(lambda x: lax.empty((layers, *x.shape), x.dtype), one)
