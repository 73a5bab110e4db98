"""Products of groups of rows with a matrix for each group, checked; see ``pallas_kernels.dispatch``.

Group g has ``sizes[g]`` rows, which follow the rows of group g - 1. Rows after the last group belong to no
group and affect no result. Sums are in fp32, but a GPU's tensor cores sum fp8 products with fewer bits (about
14 on Hopper). Pallas' kernels run on Hopper, in bf16 for matrices with sides that are multiples of 64, and in
fp8 for multiples of 128. Triton's kernels run everywhere else. Kernel and specification differ by rounding.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import grouped_reference
from pallas_kernels.backends import FP8
from pallas_kernels.dispatch import dispatch


def _check_shapes(
    x: jax.Array, other: jax.Array, sizes: jax.Array, name: str, fits: bool, expected: str
) -> None:
    if not fits:
        raise ValueError(
            f"x {x.shape}, {name} {other.shape} and sizes {sizes.shape}: pass {expected} and [groups]"
        )


def _check_dtypes(x: jax.Array, other: jax.Array, sizes: jax.Array, name: str) -> None:
    if x.dtype != other.dtype or not jnp.issubdtype(x.dtype, jnp.floating) or sizes.dtype != jnp.int32:
        raise TypeError(
            f"x, {name} and sizes are {x.dtype}, {other.dtype} and {sizes.dtype}: pass one "
            f"floating-point dtype for x and {name}, and int32"
        )


def _check_matrices(x: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool) -> None:
    fits = x.ndim == 2 and w.ndim == 3 and x.shape[1] == w.shape[2 if transposed else 1]
    expected = "[rows, k], [groups, n, k]" if transposed else "[rows, k], [groups, k, n]"
    _check_shapes(x, w, sizes, "w", fits and sizes.shape == w.shape[:1], expected)


def grouped_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Multiply each row by the matrix of its group, ``x[i] @ w[group of i]``, or by its transpose.

    Args:
        x: [rows, k], any floating-point dtype.
        w: [groups, k, n], or [groups, n, k] if ``transposed``, in the dtype of ``x``.
        sizes: rows of each group, int32 [groups]; together at most ``rows``.
        transposed: whether to multiply by the matrices' transposes. They are not written to memory.

    Returns:
        [rows, n], in the dtype of ``x``. Rows of no group are zeros.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
    """
    _check_matrices(x, w, sizes, transposed)
    _check_dtypes(x, w, sizes, "w")
    return dispatch("grouped_rows", x, w, sizes, specification=grouped_reference, transposed=transposed)


def grouped_rows_fp8(
    x: jax.Array, w: jax.Array, sizes: jax.Array, scale: jax.Array, *,
    transposed: bool = False, dtype: DTypeLike,
) -> jax.Array:  # fmt: skip
    """``grouped_rows`` for fp8 numbers, times a scale.

    Hopper's tensor cores only read 8-bit matrices along the contracted axis. So ``transposed`` matrices are
    read directly, and others are first transposed in memory.

    Args:
        x: [rows, k], ``float8_e4m3fn`` or ``float8_e5m2``.
        w: [groups, k, n], or [groups, n, k] if ``transposed``, ``float8_e4m3fn`` or ``float8_e5m2``.
        sizes: as for ``grouped_rows``.
        scale: fp32 scalar, the factor of the sums.
        transposed: as for ``grouped_rows``.
        dtype: of the result.

    Returns:
        [rows, n], in ``dtype``. Rows of no group are zeros.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
    """
    _check_matrices(x, w, sizes, transposed)
    if x.dtype not in FP8 or w.dtype not in FP8 or sizes.dtype != jnp.int32:
        raise TypeError(f"x, w and sizes are {x.dtype}, {w.dtype} and {sizes.dtype}: pass fp8, fp8 and int32")
    if scale.shape != () or scale.dtype != jnp.float32:
        raise TypeError(f"scale is {scale.dtype} {scale.shape}: pass a float32 scalar")
    options = {"transposed": transposed, "dtype": jnp.dtype(dtype)}
    return dispatch("grouped_rows_fp8", x, w, sizes, scale, specification=grouped_reference, **options)


def grouped_sums(x: jax.Array, g: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sum the outer products of the rows of ``x`` and ``g`` over each group.

    Args:
        x: [rows, k], any floating-point dtype.
        g: [rows, n], in the dtype of ``x``.
        sizes: as for ``grouped_rows``.

    Returns:
        [groups, k, n], in the dtype of ``x``. Empty groups get zeros.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
    """
    fits = x.ndim == g.ndim == 2 and len(x) == len(g) and sizes.ndim == 1
    _check_shapes(x, g, sizes, "g", fits, "[rows, k], [rows, n]")
    _check_dtypes(x, g, sizes, "g")
    return dispatch("grouped_sums", x, g, sizes, specification=grouped_reference)
