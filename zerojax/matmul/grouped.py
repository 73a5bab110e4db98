"""Products of groups of rows with a matrix for each group: the matmuls of a mixture of experts.

The rows are sorted by group; see ``pallas_kernels.grouped``. Matrices are arrays, or fp8 codes
(``Fp8Operand``). With codes, all products are computed in fp8: activations in e4m3, their gradients in e5m2,
scaled as in ``zerojax.matmul.fp8``. The gradient of the matrices is a sum over tokens, for which fp8's tensor
cores have too few bits. So 128 products are summed at a time, and these sums are added in fp32 (DeepSeek-V3,
2024, arXiv:2412.19437, section 3.3.2).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels import (
    cast_transpose,
    gather_rows,
    grouped_columns,
    grouped_rows,
    grouped_rows_fp8,
    grouped_sums,
    grouped_sums_fp8,
)
from zerojax.matmul import fp8
from zerojax.matmul.operand import Fp8Operand

Matrices = Float[Array, "groups k n"] | Fp8Operand
"""A matrix for each group."""


class Factor(NamedTuple):
    """The rows of a product, as they are and, for matrices in fp8, as codes.

    Attributes:
        rows: as they are.
        codes: ``rows * scale`` as fp8 codes.
        scale: the codes' scale.
        columns: the codes for gradients of matrices; see ``pallas_kernels.grouped_columns``.
    """

    rows: Float[Array, "rows k"]
    codes: Float[Array, "rows k"] | None = None
    scale: Float[Array, ""] | None = None
    columns: Float[Array, "k columns"] | None = None


def factor(
    values: Float[Array, "values k"],
    matrices: Sequence[Matrices],
    index: Int32[Array, " rows"] | None = None,
    dtype: DTypeLike = fp8.E4M3,
    *,
    scale: Float[Array, ""] | None = None,
    sizes: Int32[Array, "groups"] | None = None,
) -> Factor:
    """Rows for products with these matrices.

    Args:
        values: the rows, or the values that they copy. Their largest magnitude gives the scale.
        matrices: the matrices.
        index: the index of each row's value; None if the values are the rows.
        dtype: the dtype of the codes.
        scale: the codes' scale if it is known.
        sizes: the number of rows of each group, if gradients of the matrices are computed from the result.
    """
    rows = values if index is None else gather_rows(values, index)
    codes = [w for w in matrices if isinstance(w, Fp8Operand)]
    if not codes:
        return Factor(rows)
    scale = fp8.scale_of(values, dtype) if scale is None else scale
    values = values.astype(jnp.promote_types(values.dtype, jnp.bfloat16))
    wanted = sizes if any(w.trained for w in codes) else None
    if wanted is not None and index is None:
        own, columns = cast_transpose(values, scale, dtype, wanted)
        return Factor(rows, own, scale, columns)
    own = fp8.cast(values, scale, dtype)
    columns = None if wanted is None else grouped_columns(own, wanted, index)
    return Factor(rows, own if index is None else gather_rows(own, index), scale, columns)


def product(
    x: Factor, w: Matrices, sizes: Int32[Array, "groups"], *, transposed: bool = False
) -> Float[Array, "rows n"]:
    """Multiply each row by the matrix of its group, or by its transpose; in the dtype of the rows."""
    if not isinstance(w, Fp8Operand):
        return grouped_rows(x.rows, w, sizes, transposed=transposed)
    assert x.codes is not None
    assert x.scale is not None
    codes = lax.bitcast_convert_type(w.codes, fp8.E4M3)
    inverse = (1 / x.scale) * (1 / w.scale)
    return grouped_rows_fp8(x.codes, codes, sizes, inverse, transposed=transposed, dtype=x.rows.dtype)


def gradients(
    x: Factor, w: Matrices, cotangent: Factor, sizes: Int32[Array, "groups"]
) -> tuple[Float[Array, "rows k"], Float[Array, "groups k n"]]:
    """The gradients of both factors of a product; zero for matrices in fp8 that are not trained.

    ``x`` and ``cotangent`` have been made with ``sizes``.
    """
    of_x = product(cotangent, w, sizes, transposed=True)
    if not isinstance(w, Fp8Operand):
        return of_x, grouped_sums(x.rows, cotangent.rows, sizes)
    if not w.trained:
        return of_x, jnp.zeros(w.codes.shape, w.gradient.dtype)
    assert x.columns is not None
    assert x.scale is not None
    assert cotangent.columns is not None
    assert cotangent.scale is not None
    inverse = (1 / x.scale) * (1 / cotangent.scale)
    of_w = grouped_sums_fp8(x.columns, cotangent.columns, sizes, inverse, dtype=x.rows.dtype)
    return of_x, of_w.astype(w.gradient.dtype)


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "rows k"], w: Float[Array, "groups k n"], sizes: Int32[Array, "groups"]
) -> Float[Array, "rows n"]:
    """Multiply each row by the matrix of its group: ``x[i] @ w[group of i]``, summed in fp32.

    Group g has ``sizes[g]`` rows, after the rows of group g - 1. Rows after the last group give zeros and get
    zero gradients. The gradients of ``x`` and ``w`` are also summed in fp32, and have the dtype of both.
    """
    return grouped_rows(x, w, sizes)


def _backward(residuals: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, np.ndarray]:
    x, w, sizes = residuals
    of_x = grouped_rows(cotangent, w, sizes, transposed=True)
    return of_x, grouped_sums(x, cotangent, sizes), np.zeros(sizes.shape, jax.dtypes.float0)


grouped_matmul.defvjp(lambda *args: (grouped_matmul(*args), args), _backward)
