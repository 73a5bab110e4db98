"""The gated delta rule over chunks: on a GPU its kernels against the specification."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import by_channel, delta_rows, has_gpu

import pallas_kernels as pk
from pallas_kernels import delta_chunks_reference as reference


def gradients(
    rule: Callable[..., tuple[jax.Array, jax.Array]], args: tuple[jax.Array | None, ...]
) -> list[np.ndarray]:
    """The results of a rule and the cotangents of its arguments, fp32."""
    *rows, documents, state = args

    def both(*floats: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, last = rule(*floats[:5], documents, floats[5])
        total = jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(last))
        return total, (out, last)

    (_, results), found = jax.jit(jax.value_and_grad(both, tuple(range(6)), has_aux=True))(*rows, state)
    return [np.asarray(x, np.float32) for x in (*results, *found) if x is not None]


def close(ours: list[np.ndarray], theirs: list[np.ndarray], bound: float) -> None:
    """Check each array by the norm of its errors."""
    for number, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        off = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert off <= bound, (number, off)


def whole_chunks(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The specification, which JAX differentiates."""
    out, _, last = reference.delta_rule(*args)
    return out, last


def mamba2(args: tuple[jax.Array, ...]) -> tuple[jax.Array | None, ...]:
    """The arguments without beta."""
    return *args[:4], None, *args[5:]


RULES = pytest.mark.parametrize("given", [tuple, mamba2, by_channel], ids=["delta rule", "Mamba-2", "Kimi"])


@RULES
def test_derivatives_are_those_that_jax_computes(given: Callable[..., tuple[jax.Array, ...]]) -> None:
    args = given(delta_rows(1, 128, 1, 2, 8, 12, jnp.float32))
    close(gradients(pk.delta_rule, args), gradients(whole_chunks, args), 2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process")
@pytest.mark.parametrize(
    "sizes",
    [(2, 320, 2, 4, 128, 128), (1, 200, 1, 3, 64, 128), (3, 65, 1, 1, 32, 16), (1, 130, 2, 2, 256, 64)],
    ids=str,
)
@RULES
@pytest.mark.parametrize(
    ("dtype", "bound"), [(jnp.float32, 5e-6), (jnp.bfloat16, 0.01)], ids=["fp32", "bf16"]
)
def test_the_kernels_equal_the_specification(
    sizes: tuple[int, int, int, int, int, int],
    given: Callable[..., tuple[jax.Array | None, ...]],
    dtype: jnp.dtype,
    bound: float,
) -> None:
    args = given(delta_rows(*sizes, dtype))
    cpu = jax.devices("cpu")[0]
    # In fp32, also for bf16: then the kernels may not be further from the truth than their roundings.
    exact = [x if x is None or x.dtype == jnp.int32 else x.astype(jnp.float32) for x in args]
    with jax.default_matmul_precision("highest"):  # XLA's products of fp32 numbers use TF32 otherwise
        wanted = gradients(pk.delta_rule, tuple(jax.device_put(exact, cpu)))
        close(gradients(pk.delta_rule, args), wanted, bound)
