"""Raw wire formats: what a sum or a difference loses is one rounding, where the format asks for it."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels
from zerojax.errors import ConfigurationError
from zerojax.sharding.wire_format import Codec, sum_rows


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_a_difference_is_taken_and_added_in_fp32(fmt, stored):
    codec, rng = Codec(fmt, 64), np.random.default_rng(0)
    x = rng.standard_normal((2, 512)).astype(np.float32)
    base = (x + rng.standard_normal(x.shape).astype(np.float32)).astype(stored)
    payload = np.asarray(codec.encode_delta(jnp.asarray(x), jnp.asarray(base)))
    wanted = (x - base.astype(np.float32)).astype(codec.dtype)
    np.testing.assert_array_equal(payload, wanted)
    total = np.asarray(codec.decode_add(jnp.asarray(payload), jnp.asarray(base)))
    np.testing.assert_array_equal(total, (base.astype(np.float32) + wanted.astype(np.float32)).astype(stored))


def test_sums_over_peers_are_fp32_in_their_order():
    rows = np.array([[1], [2.0**-9], [2.0**-9], [2.0**20], [-(2.0**20)]], ml_dtypes.bfloat16)
    total = sum_rows(jnp.asarray(rows))
    assert total.dtype == jnp.float32
    in_order = np.float32(1)
    for row in rows[1:, 0]:
        in_order = np.float32(in_order + np.float32(row))
    assert float(total[0]) == in_order


def test_nf4_stores_rows():
    codec, x = Codec("nf4", 64), np.random.default_rng(1).standard_normal((2, 320)).astype(np.float32)
    assert not codec.raw
    assert codec.dtype == jnp.uint8
    assert codec.row_items(320) == codec.row_bytes(320) == 160 + 8 + 4
    payload = codec.encode(jnp.asarray(x))
    np.testing.assert_array_equal(payload, pallas_kernels.encode_nf4(x, block=64))
    assert payload.shape == (2, codec.row_items(320))
    values = codec.decode(payload, 320, jnp.dtype(jnp.bfloat16))
    assert values.dtype == jnp.bfloat16
    assert np.square(np.asarray(values, np.float32) - x).mean() < 0.01


@pytest.mark.parametrize(
    "call",
    [
        lambda codec, x: codec.decode_sum(x, 64),
        lambda codec, x: codec.decode_sum_encode(x, Codec("fp32", 64), 1, 64, seed=jnp.uint32(0)),
        lambda codec, x: Codec("int8", 64).decode_sum_encode(
            jnp.ones((1, 66), jnp.uint8), codec, 1, 64, seed=jnp.uint32(0)
        ),
        lambda codec, x: codec.encode_delta(x, x),
        lambda codec, x: codec.decode_add(x, x),
    ],
)
def test_nf4_has_neither_sums_nor_differences(call):
    with pytest.raises(ValueError, match="nf4 only stores frozen weights"):
        call(Codec("nf4", 64), jnp.ones((1, 64)))


def test_nf4_neither_draws_nor_rotates():
    with pytest.raises(ConfigurationError, match="rounds to nearest"):
        Codec("nf4", 64, "stochastic")
    with pytest.raises(ConfigurationError, match="rotation=0"):
        Codec("nf4", 64).encode(jnp.ones((1, 64)), rotation=32)
