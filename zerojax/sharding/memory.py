"""The two memories of a device: its own, and page-locked memory of its host.

JAX has the memory in an array's type (``float32<host>[8]``), and copies by ``device_put``, also inside
``jit`` and ``shard_map``. Nothing but copies, slices and updates of slices works on arrays in host memory.
"""

import jax
from jaxtyping import Array, PyTree

HOST = "pinned_host"
"""The memory kind of shardings in page-locked host memory, from which the device's copy engines read."""


def in_host(x: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an array is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device[T: PyTree[Array]](tree: T) -> T:
    """Arrays copied to the device's memory; those that are there stay as they are."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if in_host(x) else x, tree)


def to_memory_of[T: PyTree[Array]](tree: T, like: T) -> T:
    """Arrays copied to the memories of the arrays in ``like``."""
    return jax.tree.map(lambda x, there: to_host(x) if in_host(there) else to_device(x), tree, like)


def to_host[T: PyTree[Array]](tree: T) -> T:
    """Arrays copied to host memory; those that are there stay as they are."""
    return jax.tree.map(lambda x: x if in_host(x) else jax.device_put(x, jax.memory.Space.Host), tree)
