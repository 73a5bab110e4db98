"""Raw wire formats: what a sum or a difference loses is one rounding, where the format asks for it."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

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
