"""Grouped matmuls against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_rows_fp8
from zerojax.matmul.grouped import grouped_matmul

ROWS, K, N = 150, 7, 5
SIZES = {
    "random": (40, 3, 61, 9, 37),
    "with empty groups": (0, 70, 0, 80, 0),
    "one takes all": (0, 0, 150, 0, 0),
    "fewer than rows": (20, 0, 1, 64, 12),
    "none": (0, 0, 0, 0, 0),
}


@jax.jit
def call(x, w, sizes, cotangent):
    out, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
    return out, *pullback(cotangent)


def expected(x, w, sizes, cotangent):
    out, of_x, of_w = np.zeros_like(cotangent), np.zeros_like(x), np.zeros_like(w)
    stop = 0
    for group, size in enumerate(sizes):
        own = slice(stop, stop := stop + size)
        out[own] = x[own] @ w[group]
        of_x[own] = cotangent[own] @ w[group].T
        of_w[group] = x[own].T @ cotangent[own]
    return out, of_x, of_w


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_products_and_gradients_are_those_of_numpy(sizes, dtype):
    shapes = (ROWS, K), (5, K, N), (ROWS, N)
    x, w, cotangent = (np.array(jnp.asarray(normal(*shape), dtype), np.float32) for shape in shapes)
    wanted = expected(x, w, sizes, cotangent)
    x[sum(sizes) :] = cotangent[sum(sizes) :] = np.nan  # not a group's: not read
    x, w, cotangent = (jnp.asarray(a, dtype) for a in (x, w, cotangent))
    found = call(x, w, jnp.array(sizes, jnp.int32), cotangent)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        # Sums in fp32: a result in bf16 is rounded once.
        np.testing.assert_allclose(
            np.asarray(a, np.float32), b, rtol=2**-8 if dtype == jnp.bfloat16 else 1e-5, atol=1e-5
        )


def test_arguments_that_do_not_fit_are_refused():
    x, w, sizes = jnp.ones((ROWS, K)), jnp.ones((5, K, N)), jnp.ones(5, jnp.int32)
    for shapes in ((x[None], w, sizes), (x, w[0], sizes), (x, w[:, 1:], sizes), (x, w, sizes[1:])):
        with pytest.raises(ValueError, match=r"pass \[rows, k\], \[groups, k, n\] and \[groups\]"):
            grouped_matmul(*shapes)
    for dtypes in ((x.astype(jnp.bfloat16), w, sizes), (x, w, sizes.astype(jnp.float32))):
        with pytest.raises(TypeError, match="pass one floating-point dtype for x and w, and int32"):
            grouped_matmul(*dtypes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda x: np.dtype(x).name)
def test_products_in_fp8_are_those_of_numpy(dtype):
    """Sums that fp16 would not hold, before they are scaled."""
    x = jnp.asarray(1000 * normal(ROWS, K), jnp.float8_e5m2)
    w = jnp.asarray(100 * normal(5, K, N), jnp.float8_e4m3fn)
    sizes, scale = SIZES["fewer than rows"], 2.0**-12
    rows, of_groups = np.asarray(x, np.float32), np.asarray(w, np.float32)
    wanted, _, _ = expected(rows, of_groups, sizes, np.zeros((ROWS, N), np.float32))
    assert abs(wanted).max() > float(jnp.finfo(jnp.float16).max)
    for matrices, transposed in ((w, False), (jnp.swapaxes(w, 1, 2), True)):
        given = x, matrices, jnp.array(sizes, jnp.int32), jnp.float32(scale)
        out = grouped_rows_fp8(*given, transposed=transposed, dtype=dtype)
        assert out.dtype == dtype
        epsilon = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(out, np.float32), wanted * scale, rtol=epsilon, atol=1e-5)


def test_arguments_that_do_not_fit_products_in_fp8_are_refused():
    x, w = jnp.ones((ROWS, K), jnp.float8_e4m3fn), jnp.ones((5, K, N), jnp.float8_e4m3fn)
    sizes, scale = jnp.ones(5, jnp.int32), jnp.float32(1)
    with pytest.raises(ValueError, match=r"pass \[rows, k\], \[groups, n, k\] and \[groups\]"):
        grouped_rows_fp8(x, w, sizes, scale, transposed=True, dtype=jnp.float32)
    with pytest.raises(TypeError, match="pass fp8, fp8 and int32"):
        grouped_rows_fp8(x.astype(jnp.bfloat16), w, sizes, scale, dtype=jnp.float32)
    with pytest.raises(TypeError, match="pass a float32 scalar"):
        grouped_rows_fp8(x, w, sizes, scale[None], dtype=jnp.float32)
