"""The gated delta rule over chunks: its derivatives, and on a GPU its kernels against the specification."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import has_gpu

import pallas_kernels as pk
from pallas_kernels import delta_chunks_reference as reference

TOKENS = 64


def chunks(
    count: int, heads: int, dim: int, width: int, dtype: jnp.dtype, tokens: int = TOKENS
) -> tuple[jax.Array, ...]:
    """The arguments of ``scan_chunks``: states neither vanish nor grow."""
    rng = np.random.default_rng(0)

    def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
        return scale * rng.standard_normal((count, heads, *shape), np.float32)

    scores = np.tril(draw(tokens, tokens, scale=0.2))
    query, removed, key = (draw(tokens, dim, scale=dim**-0.5) for _ in range(3))
    low = [jnp.asarray(x, dtype) for x in (query, scores, removed, key)]
    decay = rng.uniform(0.2, 0.9, (count, heads)).astype(np.float32)
    state = rng.standard_normal((heads, dim, width), np.float32)
    written = jnp.asarray(draw(tokens, width))
    return low[0], low[1], written, low[2], 0.1 * low[3], jnp.asarray(decay), jnp.asarray(state)


def gradients(
    scan: Callable[..., tuple[jax.Array, jax.Array]], args: tuple[jax.Array, ...]
) -> list[np.ndarray]:
    """The results of a scan and the cotangents of its arguments, fp32."""

    def both(*args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, last = scan(*args)
        total = jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(last))
        return total, (out, last)

    run = jax.jit(jax.value_and_grad(both, argnums=tuple(range(len(args))), has_aux=True))
    (_, results), of_args = run(*args)
    return [np.asarray(x, np.float32) for x in (*results, *of_args)]


def plain(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The specification, which JAX differentiates."""
    out, _, last = reference.delta_scan(*args)
    return out, last


def close(ours: list[np.ndarray], theirs: list[np.ndarray], bound: float) -> None:
    """Check each array by the norm of its errors."""
    for number, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        assert np.linalg.norm(x - y) <= bound * np.linalg.norm(y), number


@pytest.mark.parametrize(
    ("dtype", "bound"), [(jnp.float32, 2e-6), (jnp.bfloat16, 0.02)], ids=["fp32", "bf16"]
)
def test_derivatives_are_those_that_jax_computes(dtype: jnp.dtype, bound: float) -> None:
    args = chunks(3, 2, 8, 12, dtype, tokens=16)
    close(gradients(pk.scan_chunks, args), gradients(plain, args), bound)


def systems(count: int, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Systems and right sides; in the last system all keys are the same."""
    rng = np.random.default_rng(1)
    system = rng.uniform(-1, 1, (count, tokens, tokens)).astype(np.float32) / 4
    system[-1] = 1
    return jnp.asarray(system), jnp.asarray(rng.standard_normal((count, tokens, 5), np.float32))


def test_a_system_is_solved_and_differentiated() -> None:
    system, wanted = systems(3, 16)

    def solve(system: jax.Array, wanted: jax.Array) -> jax.Array:
        lower = jnp.tril(system, -1) + jnp.eye(16)
        return jnp.linalg.solve(lower, wanted)

    def loss(of: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
        return lambda system, wanted: jnp.sum(jnp.sin(of(system, wanted)))

    np.testing.assert_allclose(
        pk.solve_unit_lower(system, wanted), solve(system, wanted), rtol=1e-4, atol=1e-4
    )
    ours, theirs = (jax.grad(loss(of), (0, 1))(system, wanted) for of in (pk.solve_unit_lower, solve))
    close(list(map(np.asarray, ours)), list(map(np.asarray, theirs)), 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process")
@pytest.mark.parametrize(
    "sizes", [(5, 3, 128, 128), (3, 2, 64, 128), (2, 1, 32, 16), (1, 4, 256, 64)], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(jnp.float32, 2e-6), (jnp.bfloat16, 0.01)], ids=["fp32", "bf16"]
)
def test_the_kernels_equal_the_specification(
    sizes: tuple[int, int, int, int], dtype: jnp.dtype, bound: float
) -> None:
    args = chunks(*sizes, dtype)
    cpu = jax.devices("cpu")[0]
    with jax.default_matmul_precision("highest"):  # XLA's products of fp32 numbers use TF32 otherwise
        wanted = gradients(pk.scan_chunks, tuple(jax.device_put(x, cpu) for x in args))
        close(gradients(pk.scan_chunks, args), wanted, bound)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process")
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_the_kernel_inverts_systems(tokens: int) -> None:
    system, wanted = systems(7, tokens)
    lower = np.tril(np.asarray(system, np.float64), -1) + np.eye(tokens)
    found = np.asarray(jax.jit(pk.solve_unit_lower)(system, wanted))
    np.testing.assert_allclose(found, np.linalg.solve(lower, wanted), rtol=1e-4, atol=1e-4)
