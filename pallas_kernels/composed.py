"""Functions on CUDA that no kernel computes as a whole for these arguments, as calls of other kernels."""

import jax
import jax.numpy as jnp

from pallas_kernels import grouped_reference
from pallas_kernels.backends import on_cuda


def decode_sum_encode(
    payload: jax.Array, seed: jax.Array | None, *,
    fmt_in: str, fmt_out: str, rows_out: int, n: int, block: int | None, rounding: str,
) -> jax.Array:  # fmt: skip
    """See ``pallas_kernels.decode_sum_encode``. The sum is stored before it is encoded."""
    summed = on_cuda("decode_sum")(payload, fmt=fmt_in, n=rows_out * n, block=block, rotation=0, scale=1.0)
    rows = summed.reshape(rows_out, n)
    return on_cuda("encode")(rows, seed, fmt=fmt_out, block=block, rounding=rounding, rotation=0)


def grouped_rows_fp8(
    x: jax.Array, w: jax.Array, sizes: jax.Array, scale: jax.Array, *, transposed: bool, dtype: jnp.dtype
) -> jax.Array:
    """See ``pallas_kernels.grouped_rows_fp8``. It is computed in bf16, which has every fp8 number."""
    multiply = on_cuda("grouped_rows", grouped_reference)
    options = {"transposed": transposed, "dtype": dtype, "multiply": multiply}
    return grouped_reference.grouped_rows_fp8(x, w, sizes, scale, **options)


def grouped_sums_fp8(
    x: jax.Array, g: jax.Array, sizes: jax.Array, scale: jax.Array, *, dtype: jnp.dtype
) -> jax.Array:
    """See ``pallas_kernels.grouped_sums_fp8``. It is computed in bf16, which has every fp8 number."""
    add = on_cuda("grouped_sums", grouped_reference)
    return grouped_reference.grouped_sums_fp8(x, g, sizes, scale, dtype=dtype, add=add)
