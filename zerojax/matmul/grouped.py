"""Products of groups of rows with a matrix for each group: the matmuls of a mixture of experts.

The rows are sorted by group; see ``pallas_kernels.grouped``. Matrices are arrays, or fp8 codes
(``Fp8Operand``). With codes, products with the matrices are computed in fp8: activations in e4m3, their
gradients in e5m2, scaled as in ``zerojax.matmul.fp8``. The gradient of the matrices is computed from rows and
gradients in their own dtype. It is a sum over tokens, for which fp8's tensor cores have too few bits, and
each operand would need another copy in another orientation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels import grouped_rows, grouped_rows_fp8, grouped_sums
from zerojax.matmul import fp8
from zerojax.matmul.operand import Fp8Operand

Matrices = Float[Array, "groups k n"] | Fp8Operand
"""A matrix for each group."""


class Factor(NamedTuple):
    """The rows of a product and, for matrices in fp8, ``rows * scale`` as fp8 codes, with that scale."""

    rows: Float[Array, "rows k"]
    codes: Float[Array, "rows k"] | None = None
    scale: Float[Array, ""] | None = None


def factor(
    rows: Float[Array, "rows k"],
    matrices: Sequence[Matrices],
    dtype: DTypeLike = fp8.E4M3,
    *,
    among: Float[Array, "..."] | None = None,
) -> Factor:
    """Rows for products with these matrices; ``dtype`` is the dtype of the rows' codes.

    The largest magnitude of ``among`` gives the scale. It has the rows' numbers, perhaps fewer times; None
    means the rows.
    """
    if not any(isinstance(w, Fp8Operand) for w in matrices):
        return Factor(rows)
    scale = fp8.scale_of(rows if among is None else among, dtype)
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.bfloat16))
    return Factor(rows, fp8.cast(wide, scale, dtype), scale)


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
    x: Float[Array, "rows k"], w: Matrices, cotangent: Factor, sizes: Int32[Array, "groups"]
) -> tuple[Float[Array, "rows k"], Float[Array, "groups k n"]]:
    """The gradients of both factors of a product; zero for matrices in fp8 that are not trained."""
    of_x = product(cotangent, w, sizes, transposed=True)
    if not isinstance(w, Fp8Operand):
        return of_x, grouped_sums(x, cotangent.rows, sizes)
    if not w.trained:
        return of_x, jnp.zeros(w.codes.shape, w.gradient.dtype)
    return of_x, grouped_sums(x, cotangent.rows, sizes).astype(w.gradient.dtype)


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
