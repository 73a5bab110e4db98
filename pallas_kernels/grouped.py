"""Products of groups of rows with a matrix for each group, checked; see ``pallas_kernels.backends``.

Group g has ``sizes[g]`` rows, which follow the rows of group g - 1. Rows after the last group belong to no
group and affect no result. Sums are in fp32, but a GPU's tensor cores sum fp8 products with fewer bits (about
14 on Hopper). Pallas' kernels run on Hopper, in bf16 for matrices with sides that are multiples of 64, and in
fp8 for multiples of 128. Triton's kernels run everywhere else. Kernel and specification differ by rounding.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import grouped_reference
from pallas_kernels.backends import FP8, dispatch
from pallas_kernels.formats import AnyArray


def _check_shapes(
    x: AnyArray, other: AnyArray, sizes: AnyArray, name: str, fits: bool, expected: str
) -> None:
    if not fits:
        raise ValueError(
            f"x {x.shape}, {name} {other.shape} and sizes {sizes.shape}: pass {expected} and [groups]"
        )


def _check_dtypes(x: AnyArray, other: AnyArray, sizes: AnyArray, name: str) -> None:
    if x.dtype != other.dtype or not jnp.issubdtype(x.dtype, jnp.floating) or sizes.dtype != jnp.int32:
        raise TypeError(
            f"x, {name} and sizes are {x.dtype}, {other.dtype} and {sizes.dtype}: pass one "
            f"floating-point dtype for x and {name}, and int32"
        )


def _check_fp8(x: AnyArray, other: AnyArray, sizes: AnyArray, scale: AnyArray, name: str) -> None:
    if x.dtype not in FP8 or other.dtype not in FP8 or sizes.dtype != jnp.int32:
        kinds = f"{x.dtype}, {other.dtype} and {sizes.dtype}"
        raise TypeError(f"x, {name} and sizes are {kinds}: pass fp8, fp8 and int32")
    if scale.shape != () or scale.dtype != jnp.float32:
        raise TypeError(f"scale is {scale.dtype} {scale.shape}: pass a float32 scalar")


def _check_matrices(x: AnyArray, w: AnyArray, sizes: AnyArray, transposed: bool) -> None:
    fits = x.ndim == 2 and w.ndim == 3 and x.shape[1] == w.shape[2 if transposed else 1]
    expected = "[rows, k], [groups, n, k]" if transposed else "[rows, k], [groups, k, n]"
    _check_shapes(x, w, sizes, "w", fits and sizes.shape == w.shape[:1], expected)


def grouped_rows(x: AnyArray, w: AnyArray, sizes: AnyArray, *, transposed: bool = False) -> jax.Array:
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
    x: AnyArray, w: AnyArray, sizes: AnyArray, scale: AnyArray, *,
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
    _check_fp8(x, w, sizes, scale, "w")
    options = {"transposed": transposed, "dtype": jnp.dtype(dtype)}
    return dispatch("grouped_rows_fp8", x, w, sizes, scale, specification=grouped_reference, **options)


def grouped_sums(x: AnyArray, g: AnyArray, sizes: AnyArray) -> jax.Array:
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


def grouped_columns(x: AnyArray, sizes: AnyArray, index: AnyArray | None = None) -> jax.Array:
    """Transpose rows of fp8 numbers, with each group padded by zeros to a multiple of 128 columns.

    Hopper's tensor cores only read 8-bit matrices along the contracted axis, so ``grouped_sums_fp8`` reads
    columns.

    Args:
        x: [m, k], ``float8_e4m3fn`` or ``float8_e5m2``.
        sizes: rows of each group, int32 [groups]; together at most the number of rows.
        index: the row of ``x`` that each row is, int32 [rows]; None if the rows are ``x``.

    Returns:
        [k, columns], in the dtype of ``x``. The number of columns is sufficient for any sizes; columns after
        the last group are zeros.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
    """
    if x.ndim != 2 or sizes.ndim != 1 or (index is not None and index.ndim != 1):
        shapes = f"x {x.shape}, sizes {sizes.shape} and index {None if index is None else index.shape}"
        raise ValueError(f"{shapes}: pass [m, k], [groups] and [rows]")
    if x.dtype not in FP8 or any(a.dtype != jnp.int32 for a in (sizes, index) if a is not None):
        raise TypeError(f"x is {x.dtype}: pass fp8, and int32 for sizes and index")
    return dispatch("grouped_columns", x, sizes, index, specification=grouped_reference)


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
    return dispatch("cast_transpose", x, scale, sizes, specification=grouped_reference, dtype=dtype)


def gather_rows(x: AnyArray, index: AnyArray) -> jax.Array:
    """The row ``x[index[i]]`` for each i. All indices have to be in bounds.

    Args:
        x: [m, n], any dtype of at least 8 bits.
        index: int32 [rows].

    Returns:
        [rows, n], in the dtype of ``x``.

    Raises:
        ValueError: a shape does not fit.
    """
    if x.ndim != 2 or index.ndim != 1:
        raise ValueError(f"x {x.shape} and index {index.shape}: pass [m, n] and [rows]")
    return dispatch("gather_rows", x, index, specification=grouped_reference)


def grouped_sums_fp8(
    x: AnyArray, g: AnyArray, sizes: AnyArray, scale: AnyArray, *, dtype: DTypeLike
) -> jax.Array:
    """``grouped_sums`` of fp8 numbers in the form of ``grouped_columns``, times a scale.

    On Hopper tensor cores sum 128 products at a time, and these sums are added in fp32 (DeepSeek-V3, 2024,
    arXiv:2412.19437, section 3.3.2).

    Args:
        x: [k, columns] of ``grouped_columns``.
        g: [n, columns] of ``grouped_columns``, perhaps in the other fp8 dtype.
        sizes: the groups' numbers of rows, which both were made with.
        scale: fp32 scalar, the factor of the sums.
        dtype: of the result.

    Returns:
        [groups, k, n], in ``dtype``. Empty groups get zeros.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
    """
    fits = x.ndim == g.ndim == 2 and x.shape[1:] == g.shape[1:] and sizes.ndim == 1
    _check_shapes(x, g, sizes, "g", fits, "[k, columns], [n, columns]")
    _check_fp8(x, g, sizes, scale, "g")
    return dispatch(
        "grouped_sums_fp8", x, g, sizes, scale, specification=grouped_reference, dtype=jnp.dtype(dtype)
    )
