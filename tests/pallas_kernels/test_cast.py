"""``cast_transpose`` against ml_dtypes, and on a GPU, if there is one, its kernel."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_cases import has_gpu

import pallas_kernels as pk

NUMPY = {jnp.float8_e4m3fn: ml_dtypes.float8_e4m3fn, jnp.float8_e5m2: ml_dtypes.float8_e5m2}


def numbers(m, n):
    """Magnitudes over the range of both dtypes and beyond, ties, zeros, and what is not finite."""
    rng = np.random.default_rng(m * n)
    x = np.exp2(rng.uniform(-20, 18, (m, n))) * rng.choice([-1, 0, 1], (m, n), p=[0.45, 0.1, 0.45])
    x.flat[:6] = 464, 61440, np.nan, np.inf, -np.inf, 1 + 2**-4
    return x


@pytest.mark.parametrize("narrow", NUMPY)
@pytest.mark.parametrize("wide", [jnp.bfloat16, jnp.float32, jnp.float16])
@pytest.mark.parametrize("shape", [(5, 7), (32, 48), (144, 272)])
def test_cast_and_transpose_are_those_of_numpy(shape, wide, narrow):
    with np.errstate(over="ignore"):  # of fp16
        x, scale = jnp.asarray(numbers(*shape), wide), 0.25
    top = float(jnp.finfo(narrow).max)
    wanted = np.clip(np.asarray(x, np.float32) * scale, -top, top).astype(NUMPY[narrow])
    cast, transpose = pk.cast_transpose(x, jnp.float32(scale), narrow)
    assert (cast.dtype, transpose.dtype) == (narrow, narrow)
    np.testing.assert_array_equal(np.asarray(cast, np.float32), wanted.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(transpose, np.float32), wanted.astype(np.float32).T)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="needs a GPU")
@pytest.mark.parametrize("narrow", NUMPY)
@pytest.mark.parametrize("wide", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(16, 16), (144, 272), (1024, 640), (8192, 2048)])
def test_the_kernel_equals_the_specification(shape, wide, narrow):
    x = jnp.asarray(numbers(*shape), wide)
    run = jax.jit(lambda x: pk.cast_transpose(x, jnp.float32(0.25), narrow))
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = run(jax.device_put(x, jax.devices("cpu")[0]))
    found = run(jax.device_put(x, jax.devices("cuda")[0]))
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(theirs, np.float32))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((jnp.zeros(4), jnp.float32(1), jnp.float8_e5m2), ValueError, "a matrix and a scalar"),
        ((jnp.zeros((4, 4)), jnp.ones(4), jnp.float8_e5m2), ValueError, "a matrix and a scalar"),
        ((jnp.zeros((4, 4), int), jnp.float32(1), jnp.float8_e5m2), TypeError, "int"),
        ((jnp.zeros((4, 4)), jnp.bfloat16(1), jnp.float8_e5m2), TypeError, "bfloat16"),
        ((jnp.zeros((4, 4)), jnp.float32(1), jnp.int8), TypeError, "float8_e4m3fn, float8_e5m2"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        pk.cast_transpose(*arguments)
