"""Casts to an fp8 dtype in both orientations, checked; see ``pallas_kernels.dispatch``."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import cast_reference
from pallas_kernels.backends import FP8
from pallas_kernels.dispatch import dispatch
from pallas_kernels.formats import AnyArray


def cast_transpose(
    x: AnyArray, scale: AnyArray, dtype: DTypeLike, sizes: AnyArray | None = None
) -> tuple[jax.Array, jax.Array]:
    """Multiply a matrix by a scale, cast it to an fp8 dtype, and transpose it, in one pass.

    Hopper's fp8 matmuls only read operands along the contracted axis. So a matrix in two products (of a
    gradient with a weight, and with activations) is needed in both orientations.

    Args:
        x: [m, n], any floating-point dtype.
        scale: fp32 scalar.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``. Larger numbers become its largest number. NaN stays.
        sizes: rows of each group, int32 [groups], for a transpose in the form of ``grouped_columns``; or
            None. Codes of rows of no group are unspecified.

    Returns:
        The cast, [m, n], and its transpose, [n, m] or [n, columns].

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
    """
    if x.ndim != 2 or scale.shape != () or (sizes is not None and sizes.ndim != 1):
        shapes = f"x has shape {x.shape}, scale {scale.shape} and sizes {getattr(sizes, 'shape', None)}"
        raise ValueError(f"{shapes}: pass a matrix and a scalar, and [groups] or None")
    if not jnp.issubdtype(x.dtype, jnp.floating) or scale.dtype != jnp.float32:
        raise TypeError(f"x is {x.dtype} and scale {scale.dtype}: pass floating point and float32")
    dtype = jnp.dtype(dtype)
    if dtype not in FP8:
        raise TypeError(f"dtype {dtype}: choose one of {', '.join(jnp.dtype(one).name for one in FP8)}")
    return dispatch("cast_transpose", x, scale, sizes, specification=cast_reference, dtype=dtype)
