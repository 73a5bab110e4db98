"""Specification of ``pallas_kernels.cast_transpose``."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_reference import grouped_columns


def cast_transpose(
    x: jax.Array, scale: jax.Array, sizes: jax.Array | None, *, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.cast_transpose``."""
    top = float(jnp.finfo(dtype).max)
    cast = jnp.clip(x.astype(jnp.float32) * scale, -top, top).astype(dtype)
    # Without the barrier XLA fuses the transpose with the cast, and is three times slower than with bytes.
    cast = lax.optimization_barrier(cast)
    return cast, cast.T if sizes is None else grouped_columns(cast, sizes, None)
