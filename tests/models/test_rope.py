from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.models.config import GPTConfig
from zerojax.models.rope import apply_rope, rope_amplitude, rope_frequencies, rope_table


def make(head_dim: int = 8, **settings: Any) -> GPTConfig:
    return GPTConfig(positions="rope", head_width=head_dim, **settings)


def heads(key, batch=2, time=6, count=4, dim=8):
    return jax.random.normal(jax.random.key(key), (batch, time, count, dim))


def table(positions, head_dim, theta):
    return rope_table(positions, rope_frequencies(make(head_dim, rope_theta=theta), 1))


def test_rope_scores_depend_on_distance_alone():
    q, k = heads(0, time=1), heads(1, time=1)

    def score(at, to):
        turned = (apply_rope(x, table(jnp.array([p]), 8, 10000.0)) for x, p in ((q, at), (k, to)))
        return jnp.einsum("bthd,bthd->bth", *turned)

    np.testing.assert_allclose(score(5, 2), score(105, 102), atol=1e-4)
    assert float(jnp.max(jnp.abs(score(5, 2) - score(5, 3)))) > 1e-2


def test_rope_turns_pairs_of_halves():
    x = jnp.zeros((1, 3, 1, 4)).at[..., 1].set(1.0)
    turned = apply_rope(x, table(jnp.arange(3), 4, 100.0))
    angles = np.arange(3) / 10.0  # the second of two frequencies: 100^(-2/4)
    np.testing.assert_allclose(turned[0, :, 0, 1], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(turned[0, :, 0, 3], np.sin(angles), atol=1e-6)
    assert apply_rope(x.astype(jnp.bfloat16), table(jnp.arange(3), 4, 100.0)).dtype == jnp.bfloat16


def test_rope_turns_neighbours_of_the_first_part_of_a_head():
    x = heads(0, dim=12)
    angles = table(jnp.arange(6), 8, 100.0)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the neighbours' pairs as halves
    turned = apply_rope(x, angles, interleaved=True)
    np.testing.assert_allclose(turned[..., order], apply_rope(x[..., order], angles), atol=1e-6)
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])


def test_longrope_divides_each_angle_by_a_factor_that_depends_on_the_length():
    short, long = (1.0, 1.25, 2.0), (3.0, 9.0, 50.0)
    config = make(
        8, rope_fraction=0.75, rope_scaling="longrope", rope_original_len=16, rope_factor=4.0,
        rope_short_factors=short, rope_long_factors=long,
    )  # fmt: skip
    plain = 10000.0 ** -(np.arange(0, 6, 2) / 6)
    for length, factors in ((16, short), (17, long)):
        np.testing.assert_allclose(rope_frequencies(config, length), plain / np.array(factors), rtol=1e-6)
    assert rope_amplitude(config) == pytest.approx(np.sqrt(1 + np.log(4) / np.log(16)))


def test_dynamic_is_plain_up_to_the_original_context_and_then_grows_with_the_length():
    config = make(rope_scaling="dynamic", rope_factor=4.0, rope_original_len=16)
    plain = rope_frequencies(make(), 1)
    for length in (1, 16):
        np.testing.assert_allclose(rope_frequencies(config, length), plain, rtol=1e-6)
    theta = 10000.0 * (4 * 40 / 16 - 3) ** (8 / 6)
    expected = theta ** -(np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(rope_frequencies(config, 40), expected, rtol=1e-5)
    traced = jax.jit(lambda length: rope_frequencies(config, length))(jnp.int32(40))
    np.testing.assert_allclose(traced, expected, rtol=1e-5)


def test_yarn_keeps_what_turns_often_and_divides_what_turns_rarely():
    config = make(64, rope_scaling="yarn", rope_factor=8.0, rope_original_len=4096)
    ratio = np.asarray(rope_frequencies(config, 1) / rope_frequencies(make(64), 1))
    turns = 4096 * np.asarray(rope_frequencies(make(64), 1)) / (2 * np.pi)
    np.testing.assert_allclose(ratio[turns > 32 * 1.5], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 1 / 1.5], 1 / 8, rtol=1e-6)
    assert np.all(np.diff(ratio) <= 1e-6)
    assert rope_amplitude(config) == pytest.approx(1 + 0.1 * np.log(8))
    assert rope_amplitude(make(rope_scaling="yarn", rope_attention_factor=1.5)) == 1.5
    assert rope_amplitude(make(rope_factor=8.0)) == 1
    cos, sin = rope_table(jnp.zeros(1, int), rope_frequencies(config, 1), 1.5)
    np.testing.assert_array_equal(cos, np.full((1, 32), 1.5))
    np.testing.assert_array_equal(sin, np.zeros((1, 32)))
