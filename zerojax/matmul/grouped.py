"""Products of groups of rows with a matrix for each group: the matmuls of a mixture of experts.

The rows lie in order of their groups; see ``pallas_kernels.grouped``.
"""

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels import grouped_rows, grouped_sums


def grouped_matmul(
    x: Float[Array, "rows k"], w: Float[Array, "groups k n"], sizes: Int32[Array, "groups"]
) -> Float[Array, "rows n"]:
    """Multiply each row by the matrix of its group: ``x[i] @ w[group of i]``, summed in fp32.

    Group g has ``sizes[g]`` rows, which follow those of group g - 1. Rows after the last group give zeros and
    get zero gradients. The gradients of ``x`` and ``w`` are summed in fp32, too, and have their dtypes.

    Args:
        x: rows in order of their groups.
        w: a matrix for each group, in the dtype of ``x``.
        sizes: rows of each group, from 0 on; together at most ``rows``.

    Returns:
        In the dtype of ``x``.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: ``x`` and ``w`` are not floating-point arrays of one dtype, or ``sizes`` is not int32.
    """
    return _product(x, w, sizes)


@jax.custom_vjp
def _product(x: Array, w: Array, sizes: Array) -> Array:
    return grouped_rows(x, w, sizes)


def _forward(x: Array, w: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _product(x, w, sizes), (x, w, sizes)


def _backward(residuals: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, np.ndarray]:
    x, w, sizes = residuals
    of_x = grouped_rows(cotangent, w, sizes, transposed=True)
    return of_x, grouped_sums(x, cotangent, sizes), np.zeros(sizes.shape, jax.dtypes.float0)


_product.defvjp(_forward, _backward)
