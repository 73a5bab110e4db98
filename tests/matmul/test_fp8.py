"""8-bit floating point: scales and codes bit by bit, products within the order of sums, against NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import zerojax
from zerojax.matmul import fp8

TOPS = {fp8.E4M3: 448.0, fp8.E5M2: 57344.0}
EDGES = [
    *(0.0, -0.0, 1e-45, 1e-40, 1.2e-38, 2.0**-101, 2.0**-92, 2.0**-91, 1e-20, 1.0, 1.75, 3.5, 7, 447.99, 448),
    *(448.00003, 449.0, 512.0, 57344.0, 57345.0, 65536.0, 1e20, 5e32, 1e38, 3.4028235e38, np.inf, np.nan),
    *(np.ldexp(448.0, power) for power in (-60, -9, -1, 1, 60)),
    *(np.nextafter(np.float32(np.ldexp(448.0, power)), np.float32(np.inf)) for power in (-60, -1, 1, 60)),
]


def scale_by_search(peak: float, top: float) -> float:
    """By trying every power of two."""
    if not (peak > 0 and np.isfinite(peak)):
        return 1.0
    return max(2.0**power for power in range(-140, 101) if float(peak) * 2.0**power <= top)


def as_codes(x: np.ndarray, dtype: Any) -> np.ndarray:
    return x.astype(dtype).view(np.uint8)


def random(*shape: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    """Numbers of very different magnitudes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))).astype(np.float32)


@pytest.mark.parametrize("dtype", TOPS, ids=lambda x: np.dtype(x).name)
def test_the_scale_is_the_largest_power_of_two_that_fits(dtype):
    peaks = np.array([*EDGES, *np.abs(random(500, spread=20))], np.float32)
    found = np.asarray(fp8.scale_for(jnp.asarray(peaks), dtype))
    with np.errstate(over="ignore"):
        normal = np.where(peaks < np.finfo(np.float32).tiny, 0, peaks)
        wanted = [scale_by_search(peak, TOPS[dtype]) for peak in peaks]
        flushed = [scale_by_search(peak, TOPS[dtype]) for peak in normal]
    assert found.dtype == np.float32
    # A device may take subnormal numbers for 0.
    assert [x in pair for x, *pair in zip(found, wanted, flushed, strict=True)] == [True] * len(peaks)
    assert np.isfinite(1 / found).all()
    assert fp8.scale_for(jnp.ones((2, 0)), dtype).shape == (2, 0)


@pytest.mark.parametrize("wide", [jnp.float32, jnp.bfloat16])
def test_codes_are_those_of_ml_dtypes_after_a_clip(wide):
    """Ties, subnormals, and what bf16 would round twice; of a stack, with a scale for each layer."""
    grid = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (grid[1:] + grid[:-1]) / 2
    around = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    x = np.concatenate([grid, ties, *around, [463.9, 464, 1e9, np.inf, np.nan, 1e-40], random(2000)])
    x = np.concatenate([x, -x]).astype(wide)
    numbers = x.astype(np.float32)
    wanted = as_codes(np.clip(numbers, -448, 448), ml_dtypes.float8_e4m3fn)
    found = np.asarray(fp8.encode(jnp.asarray(x)))
    np.testing.assert_array_equal(found & 0x7F, wanted & 0x7F)
    np.testing.assert_array_equal(found[~np.isnan(numbers)], wanted[~np.isnan(numbers)])
    back = np.asarray(fp8.decode(jnp.asarray(found), wide)).astype(np.float32)
    np.testing.assert_array_equal(back, wanted.view(ml_dtypes.float8_e4m3fn).astype(np.float32))

    stack = random(3, 40, 5).astype(wide)
    scale = np.array([2.0**-7, 1, 2.0**9], np.float32)
    codes = np.asarray(fp8.encode(jnp.asarray(stack), jnp.asarray(scale)[:, None, None]))
    scaled = np.clip(stack.astype(np.float32) * scale[:, None, None], -448, 448)
    np.testing.assert_array_equal(codes, as_codes(scaled, ml_dtypes.float8_e4m3fn))
    assert fp8.encode(jnp.zeros((0, 3))).shape == (0, 3)
    assert fp8.decode(jnp.zeros((2, 0), jnp.uint8), wide).shape == (2, 0)


def test_what_is_encoded_is_decoded():
    codes = np.arange(256, dtype=np.uint8)
    again = fp8.encode(fp8.decode(jnp.asarray(codes), jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(again)[codes & 0x7F != 0x7F], codes[codes & 0x7F != 0x7F])


def narrowed(x: np.ndarray, dtype: Any) -> np.ndarray:
    """What is left of a tensor in fp8 with its own scale, in fp64."""
    peak = float(np.abs(x).max(initial=0))
    scale = scale_by_search(peak, TOPS[dtype])
    return (x.astype(np.float32) * np.float32(scale)).astype(dtype).astype(np.float64) / scale


CASES = [
    *((jnp.float32, sizes) for sizes in ((7, 16, 32), (1, 1, 1), (0, 16, 16))),
    *((jnp.bfloat16, sizes) for sizes in ((16, 5, 3), (33, 48, 17))),
    (jnp.float16, (16, 16, 16)),
]


@functools.cache
def jitted() -> Any:
    """``product`` and its gradients, compiled once a shape."""

    def run(x, codes, scale, gradient, cotangent, dtype):
        def of(x, gradient):
            return fp8.product(x, codes, scale, gradient, dtype)

        out, vjp = jax.vjp(of, x, gradient)
        return out, *vjp(cotangent)

    return jax.jit(run, static_argnums=5)


@pytest.mark.parametrize(("dtype", "sizes"), CASES, ids=str)
def test_products_and_their_gradients_are_those_of_the_codes(sizes, dtype):
    tokens, k, n = sizes
    x = (random(tokens, k, seed=1, spread=2) * 1e-3).astype(dtype)
    weight, cotangent = random(k, n, seed=2, spread=1) / 7, (random(tokens, n, seed=3) * 1e-3).astype(dtype)
    scale = np.float32(scale_by_search(np.abs(weight).max(), 448))
    codes = as_codes(weight * scale, ml_dtypes.float8_e4m3fn)
    out, of_x, of_weight = jitted()(
        *map(jnp.asarray, (x, codes, scale, np.full((k, n), np.nan, dtype), cotangent)), dtype
    )
    own, arrived = narrowed(x, fp8.E4M3), narrowed(cotangent, fp8.E5M2)
    read = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) / scale
    wanted = own @ read, arrived @ read.T, own.T @ arrived
    sums = abs(own) @ abs(read), abs(arrived) @ abs(read.T), abs(own).T @ abs(arrived)
    # Rounded once to the dtype, below which nothing but the order of fp32 sums remains.
    epsilon, smallest = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).smallest_subnormal)
    for found, exact, size in zip((out, of_x, of_weight), wanted, sums, strict=True):
        assert found.dtype == dtype
        bound = abs(exact) * epsilon * 0.51 + size * 1e-6 + smallest
        assert (abs(np.asarray(found, np.float64) - exact) <= bound).all()


def test_the_gradient_has_its_argument_s_dtype_and_the_activations_theirs():
    """As of weights that were cast before their matmul."""
    x, weight = jnp.ones((4, 16), jnp.bfloat16), jnp.ones((16, 8), jnp.bfloat16)

    def loss(x, gradient):
        return jnp.sum(fp8.product(x, fp8.encode(weight), jnp.float32(1), gradient, jnp.float32))

    of_x, of_weight = jax.grad(loss, (0, 1))(x, weight)
    assert (of_x.dtype, of_weight.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert (of_x == 8).all()
    assert (of_weight == 4).all()


def test_a_frozen_weight_has_no_gradient_and_keeps_no_activations():
    x, weight = jnp.asarray(random(16, 32, seed=1)), jnp.asarray(random(32, 16, seed=2))

    def run(x, gradient, *, trained):
        return fp8.product(x, fp8.encode(weight), jnp.float32(1), gradient, jnp.float32, trained)

    (out, vjp), (frozen_out, frozen_vjp) = (
        jax.vjp(functools.partial(run, trained=trained), x, weight) for trained in (True, False)
    )
    np.testing.assert_array_equal(out, frozen_out)
    (of_x, of_weight), (frozen_of_x, none) = vjp(out), frozen_vjp(out)
    np.testing.assert_array_equal(of_x, frozen_of_x)
    assert of_weight.any()
    assert not none.any()
    kept = [x.shape for x in jax.tree.leaves(frozen_vjp) if x.dtype == fp8.E4M3]
    assert kept == []


def test_cotangents_have_the_range_of_e5m2():
    """Of 2^-20 e4m3 would leave nothing beside 1."""
    cotangent = jnp.array([[1.0, 2.0**-20, 2.0**-30]])
    _, vjp = jax.vjp(
        lambda x: fp8.product(x, fp8.encode(jnp.eye(3)), jnp.float32(1), jnp.eye(3), jnp.float32),
        jnp.ones((1, 3)),
    )
    np.testing.assert_array_equal(vjp(cotangent)[0], cotangent)
    cotangent = jnp.array([[1.0, 1.125, 1.1251]])  # two bits of mantissa, halves to even
    np.testing.assert_array_equal(vjp(cotangent)[0], [[1, 1, 1.25]])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad):
    """So that the step is skipped."""
    run = functools.partial(fp8.product, codes=fp8.encode(jnp.eye(16)), scale=jnp.float32(1))
    x = jnp.ones((2, 16)).at[1, 3].set(bad)
    assert not np.isfinite(run(x, gradient=jnp.eye(16), dtype=jnp.float32)).all()
    _, vjp = jax.vjp(lambda x: run(x, gradient=jnp.eye(16), dtype=jnp.float32), jnp.ones((2, 16)))
    assert not np.isfinite(vjp(x)[0]).all()
    assert np.isnan(np.asarray(fp8.decode(fp8.encode(jnp.asarray(np.nan)), jnp.float32)))


def test_a_second_derivative_is_refused():
    weight = jnp.eye(16)

    def slope(x, gradient, curve):
        return jnp.sum(curve(fp8.product(x, fp8.encode(weight), jnp.float32(1), gradient, jnp.float32)))

    def penalty(gradient, curve=jnp.tanh):
        """By the gradient of activations; linear in them, only the codes depend on the weight."""
        return jnp.sum(jax.grad(slope)(jnp.ones((2, 16)), gradient, curve) ** 2)

    def value(gradient):
        return jax.value_and_grad(slope)(jnp.ones((2, 16)), gradient, jnp.tanh)[0]

    for loss in (penalty, functools.partial(penalty, curve=lambda x: x), value):
        with pytest.raises(zerojax.ZeroError, match='matmul_dtype="compute"'):
            jax.eval_shape(jax.grad(loss), weight)
    # One that nothing flows back through is none.
    jax.eval_shape(jax.grad(lambda g: jax.lax.stop_gradient(penalty(g))), weight)


def test_gradients_of_weights_are_summed_without_fast_accumulation():
    """cuBLAS's fast accumulation keeps 14 bits of a sum: cheap for products over a width, not over tokens."""

    def loss(x, gradient):
        codes = jnp.zeros((16, 32), jnp.uint8)
        return jnp.sum(fp8.product(x, codes, jnp.float32(1), gradient, jnp.float32))

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.zeros((8, 16)), jnp.zeros((16, 32)))
    dots = [equation for equation in traced.jaxpr.eqns if equation.primitive.name == "dot_general"]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    shapes: list[Any] = [dot.outvars[0].aval for dot in dots]
    found = {x.shape: dot.params["precision"] for x, dot in zip(shapes, dots, strict=True)}
    assert found == {(8, 32): None, (8, 16): None, (16, 32): highest}
