import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from zerojax.models import GPTConfig
from zerojax.models.block import rms_norm


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_an_offset_is_added_to_the_scale_and_a_new_norm_multiplies_by_one(offset):
    norm = rms_norm(GPTConfig(norm="rms", norm_offset=offset), 12, nnx.Rngs(0))
    x = np.random.default_rng(0).normal(0, 3, (2, 5, 12)).astype(np.float32)
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm(jnp.asarray(x)), normed, rtol=1e-5)
    assert norm.scale is not None
    norm.scale[...] = jnp.arange(12.0) / 10
    np.testing.assert_allclose(norm(jnp.asarray(x)), normed * (offset + np.arange(12) / 10), rtol=1e-5)


def test_a_small_scale_in_half_precision_is_not_lost_beside_the_offset():
    norm = rms_norm(GPTConfig(norm="rms", norm_offset=1.0), 4, nnx.Rngs(0))
    graph, params = nnx.split(norm)
    half = nnx.merge(graph, jax.tree.map(lambda x: jnp.full_like(x, 2.0**-9, jnp.bfloat16), params))
    # In bf16 the sum would be 1: the next larger number is 1 + 2^-7.
    np.testing.assert_allclose(half(jnp.full((1, 4), 2.0)), 1 + 2.0**-9, rtol=1e-5)
    assert half(jnp.ones((1, 4), jnp.bfloat16)).dtype == jnp.bfloat16
