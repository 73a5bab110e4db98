"""nf4's jax.numpy reference against an independent codec, and its specified properties."""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import ml_dtypes
import nf4_codec as ref
import numpy as np
import pytest
from kernel_cases import CASES, case, nf4_edges, same

import pallas_kernels as pk
from pallas_kernels.nf4_reference import LEVELS, MIDPOINTS


def decoded(payload, n, block=64):
    return np.asarray(pk.decode_nf4(payload, n, block=block, dtype=jnp.float32))


def test_levels_are_the_published_ones_and_follow_from_the_normal_distribution():
    np.testing.assert_array_equal(LEVELS, ref.LEVELS)
    np.testing.assert_array_equal(MIDPOINTS, ref.MIDDLES)
    last = 1 - (1 / 32 + 1 / 30) / 2
    quantile = np.vectorize(NormalDist().inv_cdf)
    above, below = (quantile(np.linspace(last, 0.5, count + 1)[:-1]) for count in (8, 7))
    derived = np.sort([*above, 0, *-below]) / quantile(last)
    np.testing.assert_allclose(LEVELS, derived, atol=2e-7)


# 64 x 257: a second group, of one block. Rows of 1, 5 and 11 blocks have a padded list of scales.
@pytest.mark.parametrize(
    "shape", [(64, 3, 704), (64, 2, 64 * 257), (2048, 1, 2048 * 5), (256, 2, 256)], ids=str
)
def test_payload_equals_independent_codec(shape):
    block, rows, n = shape
    assert pk.nf4_bytes(n, block) == ref.row_bytes(n, block)
    for name in CASES:
        x = case(name, rows, n)
        got = np.asarray(pk.encode_nf4(x, block=block))
        want = ref.encode(x, block)
        np.testing.assert_array_equal(got, want)
        same(decoded(got, n, block), ref.decode(want, n, block))
        narrow = pk.decode_nf4(got, n, block=block)
        assert narrow.dtype == jnp.bfloat16
        same(
            np.asarray(narrow).astype(np.float32),
            ref.decode(want, n, block).astype(ml_dtypes.bfloat16).astype(np.float32),
        )


def test_numbers_at_the_bounds_of_scales_and_codes():
    """On the middle of two scales, of two levels, and a bit beside; what lies on it counts as below."""

    def around(bounds):
        return (bounds.view(np.int32)[:, None] + np.array([-1, 0, 1], np.int32)).view(np.float32)

    unit = np.float32(1 / 254**3)
    x = np.zeros((3, 254, 64), np.float32)
    x[:, 0, 0] = 1
    x[:, 1:, 0] = around(ref.BOUNDS * (unit / np.float32(2))).T
    payload = np.asarray(pk.encode_nf4(x.reshape(3, -1)))
    np.testing.assert_array_equal(payload, ref.encode(x.reshape(3, -1), 64))
    scales = payload[:, 254 * 32 + 1 : 254 * 33].T - np.arange(1, 254)[:, None]
    np.testing.assert_array_equal(scales[10:], np.tile([0, 0, 1], (243, 1)))

    y = nf4_edges()
    payload = np.asarray(pk.encode_nf4(y))
    np.testing.assert_array_equal(payload, ref.encode(y, 64))
    np.testing.assert_array_equal(payload[0, 258 * 32 :][:254], np.arange(1, 255))
    codes = np.stack([payload & 15, payload >> 4], -1).reshape(-1)[: 254 * 64].reshape(254, 64)[:, :45]
    # Of negative numbers a larger bit pattern is the smaller number.
    steps = np.where(MIDPOINTS[:, None] < 0, [1, 0, 0], [0, 0, 1])
    np.testing.assert_array_equal(codes, np.tile((np.arange(15)[:, None] + steps).reshape(-1), (254, 1)))


def test_bytes_of_an_element():
    assert pk.STORED == ("nf4",)
    assert pk.nf4_bytes(1 << 24) * 8 / (1 << 24) == 4 + 8 / 64 + 32 / (64 * 256)
    assert pk.nf4_bytes(64 * 5) == 32 * 5 + 8 + 4
    assert pk.nf4_bytes(256 * 257, 256) == 128 * 257 + 260 + 8


def test_broken_and_empty_blocks():
    x = np.ones((2, 64 * 300), np.float32)
    x[0, 3], x[0, 64], x[0, 128], x[0, 192:256], x[0, 256:320] = np.nan, -np.inf, 2.0**121, 0, -0.0
    x[1] = 0
    got = decoded(pk.encode_nf4(x), x.shape[1])
    assert np.isnan(got[0, :192]).all()
    np.testing.assert_array_equal(got[0, 192:320].view(np.uint32), 0)
    np.testing.assert_allclose(got[0, 320:], 1, rtol=2**-22)
    np.testing.assert_array_equal(got[1].view(np.uint32), 0)


def test_range():
    x = np.random.default_rng(0).normal(size=(6, 128)).astype(np.float32)
    x[:, 0] = 4
    sizes = 2.0 ** np.array([[-115], [-95], [-82], [0], [60], [117]])
    got = decoded(pk.encode_nf4((x * sizes).astype(np.float32)), 128) / sizes
    assert not got[0].any()
    # Scales of 2**-80 and less are coarse.
    assert 0.1 < np.abs(got[1, 0] - 4) <= np.abs(got[1] - x[1]).max() < 1
    for i in range(2, 6):
        np.testing.assert_array_equal(got[i].astype(np.float32), decoded(pk.encode_nf4(x[i : i + 1]), 128)[0])
    # A block that is small beside its neighbour.
    y = np.concatenate([np.full((1, 64), 2.0**20), x[:1, 64:]], axis=1).astype(np.float32)
    near = decoded(pk.encode_nf4(y), 128)[0, 64:]
    assert 0.05 < np.abs(near - y[0, 64:]).max() < 1
    y[0, :64] = 2.0**30
    assert not decoded(pk.encode_nf4(y), 128)[0, 64:].any()


def test_scales_in_eight_bits_cost_nothing():
    rng = np.random.default_rng(3)
    blocks = rng.standard_t(3, size=(4096, 64)).astype(np.float32)
    blocks[::100] *= 20
    peaks = np.abs(blocks).max(axis=1, keepdims=True)
    exact = LEVELS[np.searchsorted(MIDPOINTS, blocks / peaks)] * peaks
    got = decoded(pk.encode_nf4(blocks.reshape(1, -1)), blocks.size).reshape(blocks.shape)
    error, least = (np.sqrt(np.square(y - blocks).mean(axis=1)) for y in (got, exact))
    size = np.sqrt(np.square(blocks).mean(axis=1))
    assert np.sqrt(np.square(error / size).mean() / np.square(least / size).mean()) < 1.002
    assert np.sqrt(np.square(error).mean() / np.square(least).mean()) < 1.002


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: pk.encode_nf4(x, block=32), ValueError, "block size 32 for nf4"),
        (lambda x: pk.encode_nf4(x, block=256), ValueError, "pad the row"),
        (lambda x: pk.encode_nf4(x[0]), ValueError, "2 dimensions"),
        (lambda x: pk.encode_nf4(x.astype(jnp.int32)), TypeError, "int32"),
        (lambda x: pk.decode_nf4(x, 128), TypeError, "uint8"),
        (lambda x: pk.decode_nf4(x.astype(jnp.uint8), 128), ValueError, "needs 72"),
        (lambda x: pk.nf4_bytes(0), ValueError, "at least one"),
        (lambda x: pk.encode(x, "nf4", block=64), ValueError, "stores frozen weights"),
        (lambda x: pk.decode_sum(x.astype(jnp.uint8), "nf4", 128, block=64), ValueError, "cannot be sent"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(jnp.ones((2, 128)))


def test_calls_work_inside_shard_map():
    devices = len(jax.devices())
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.asarray(case("normal", rows=devices, n=128))

    def round_trip(v):
        return pk.decode_nf4(pk.encode_nf4(v), 128, dtype=jnp.float32)

    inner = jax.shard_map(round_trip, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"), check_vma=False)
    np.testing.assert_array_equal(np.asarray(jax.jit(inner)(x)), np.asarray(round_trip(x)))
