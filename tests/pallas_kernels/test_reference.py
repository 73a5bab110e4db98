"""The jax.numpy reference against an independent codec, and its specified properties."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference_codec as ref
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import CASES, case

import pallas_kernels as pk
from pallas_kernels import reference

QUIET = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SEED = 20240607


def seed():
    return jnp.uint32(SEED)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", pk.FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_payload_equals_independent_codec(name, fmt, rounding):
    x = case(name, rows=3, n=640)
    got = pk.encode(x, fmt, block=64, rounding=rounding, seed=seed())
    want = ref.encode(x, fmt, 64, rounding, seed=SEED)
    np.testing.assert_array_equal(np.asarray(got), want)
    back = pk.decode(got, fmt, 640, block=64, dtype=jnp.float32)
    np.testing.assert_array_equal(np.asarray(back), ref.decode(want, fmt, 640, 64))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", pk.FORMATS)
def test_rotated_payload_equals_independent_codec(fmt, rounding):
    x = case("normal", rows=2, n=512)
    got = pk.encode(x, fmt, block=128, rounding=rounding, rotation=32, seed=seed())
    np.testing.assert_array_equal(np.asarray(got), ref.encode(x, fmt, 128, rounding, 32, SEED))
    total = pk.decode_sum(got, fmt, 512, block=128, rotation=32, scale=0.5)
    np.testing.assert_array_equal(np.asarray(total), ref.decode_sum(np.asarray(got), fmt, 512, 128, 32, 0.5))


@QUIET
@given(
    values=st.lists(st.floats(width=32, allow_subnormal=True), min_size=64, max_size=64),
    fmt=st.sampled_from(pk.QUANTIZED),
    rounding=st.sampled_from(["nearest", "stochastic"]),
)
def test_any_block_of_floats(values, fmt, rounding):
    x = np.array(values, np.float32)[None]
    got = pk.encode(x, fmt, block=64, rounding=rounding, seed=seed())
    np.testing.assert_array_equal(np.asarray(got), ref.encode(x, fmt, 64, rounding, seed=SEED))


@QUIET
@given(
    fmt=st.sampled_from(pk.QUANTIZED),
    block=st.sampled_from([64, 128, 256, 512, 1024, 2048]),
    blocks=st.integers(1, 5),
    rows=st.integers(1, 4),
    key=st.integers(0, 2**31),
    dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
)
def test_any_shape(fmt, block, blocks, rows, key, dtype):
    x = np.random.default_rng(key).normal(size=(rows, blocks * block)).astype(dtype)
    got = np.asarray(pk.encode(x, fmt, block=block))
    assert got.shape == (rows, pk.nbytes(fmt, blocks * block, block))
    assert got.shape[1] == ref.row_bytes(fmt, blocks * block, block)
    np.testing.assert_array_equal(got, ref.encode(x, fmt, block))


@pytest.mark.parametrize("fmt", pk.QUANTIZED)
def test_extreme_of_a_block_is_reached_from_both_sides(fmt):
    """A known failure of others: int4 clamped to -8..7 of a 8-step scale loses 12.5%."""
    peaks = np.random.default_rng(0).uniform(1e-3, 1e3, size=200).astype(np.float32)
    x = np.zeros((200, 128), np.float32)
    x[:, 0], x[:, 64] = peaks, -peaks  # the edges of two blocks
    got = np.asarray(pk.decode(pk.encode(x, fmt, block=64), fmt, 128, block=64, dtype=jnp.float32))
    np.testing.assert_allclose(got[:, 0], peaks, rtol=2**-8)
    np.testing.assert_allclose(got[:, 64], -peaks, rtol=2**-8)


@pytest.mark.parametrize("fmt", pk.QUANTIZED)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_decoded_values_are_fixed_points(fmt, rounding):
    x = case("normal", rows=4, n=256)
    first = pk.encode(x, fmt, block=64)
    values = pk.decode(first, fmt, 256, block=64, dtype=jnp.float32)
    again = pk.decode(
        pk.encode(values, fmt, block=64, rounding=rounding, seed=seed()),
        fmt,
        256,
        block=64,
        dtype=jnp.float32,
    )
    peak = np.abs(np.asarray(values)).max()
    assert np.abs(np.asarray(again - values)).max() <= (2**-7 if rounding == "nearest" else 1) * peak
    if rounding == "nearest":
        np.testing.assert_array_equal(np.asarray(again), np.asarray(values))


@pytest.mark.parametrize("fmt", pk.QUANTIZED)
def test_stochastic_rounding_is_unbiased(fmt):
    draws = 3000
    x = np.tile(np.random.default_rng(1).normal(size=(1, 64)).astype(np.float32), (draws, 1))
    payload = pk.encode(x, fmt, block=64, rounding="stochastic", seed=seed())
    values = np.asarray(pk.decode(payload, fmt, 64, block=64, dtype=jnp.float32), np.float64)
    error = values.mean(0) - x[0]
    spread = values.std(0) / np.sqrt(draws)
    assert np.all(np.abs(error) < 5 * spread + 1e-5), np.max(np.abs(error) / (spread + 1e-9))


def test_random_bits_depend_on_seed_and_place_alone():
    x = np.random.default_rng(2).normal(size=(4, 128)).astype(np.float32)
    options = {"fmt": "int4", "block": 64, "rounding": "stochastic"}
    one = np.asarray(pk.encode(x, **options, seed=jnp.uint32(1)))
    np.testing.assert_array_equal(one, np.asarray(pk.encode(x, **options, seed=jnp.uint32(1))))
    assert (one != np.asarray(pk.encode(x, **options, seed=jnp.uint32(2)))).any()
    flat = np.asarray(pk.encode(x.reshape(1, -1), **options, seed=jnp.uint32(1)))
    np.testing.assert_array_equal(flat[0, :256].reshape(4, 64), one[:, :64])


def deviations(counts):
    """The distance of a chi-square from that of equally likely cells, in standard deviations."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    return ((np.square(counts - expected) / expected).sum() - freedom) / np.sqrt(2 * freedom)


def state_bytes(seed, index):
    """uint8[count, 8]: the first byte of every element's random bits, for the eights uint32[count]."""
    words = np.stack(reference.octet_hash(reference.hash_keys(jnp.uint32(seed)), jnp.asarray(index)), -1)
    return words.astype("<u4").view(np.uint8).reshape(-1, 2, 4)[:, :, ::-1].reshape(-1, 8)


def worst_deviation(draws, other):
    """The distance of uint8[count, 8] of two seeds from noise, in standard deviations; noise is below 5.5.

    Chi-squares over pairs of neighbours, of the eight of a state, of seeds; correlations at lags up to 4096.
    """
    flat = draws.reshape(-1)
    pairs = [(flat[:-lag], flat[lag:]) for lag in (1, 2, 3, 4, 5, 7, 8, 16, 64, 512)]
    pairs += [(draws[:, i], draws[:, j]) for i in range(8) for j in range(i)]
    pairs.append((flat, other.reshape(-1)))
    worst = max(abs(deviations(np.bincount(a * 256 + b, minlength=1 << 16))) for a, b in pairs)
    signals = [flat / 127.5 - 1] + [2.0 * (draws[:, i] >> bit & 1) - 1 for i in range(8) for bit in (0, 7)]
    for signal in signals:
        spectrum = np.abs(np.fft.rfft(signal, 2 * signal.size)) ** 2
        lags = np.fft.irfft(spectrum)[:4097]
        # The largest of 4096 correlations of noise: 3.9 deviations, most of the time.
        worst = max(worst, np.abs(lags[1:]).max() / lags[0] * np.sqrt(signal.size))
    return worst


def test_random_bits_are_white():
    """Elements, neighbours, the eight of a state, single bits and seeds are independent."""
    index = np.arange(1 << 18, dtype=np.uint32)
    draws, other = (state_bytes(s, index).astype(np.int64) for s in (3, 4))
    np.testing.assert_array_equal(draws[:8].reshape(-1), ref.random_bits(3, 64, "int4") >> 8)
    assert worst_deviation(draws, other) < 5.5
    # What the hash multiplies by WEYL is a plain counter then, for which three rounds are too few.
    counter = index * np.uint32(pow(reference.WEYL, -1, 1 << 32))
    draws, other = (state_bytes(s, counter).astype(np.int64) for s in (3, 4))
    assert worst_deviation(draws, other) > 20


FRACTIONS = np.array([1 / 3000, 1 / 2, 0.3, 0.9, 1 / 200, 0.65, 0.123, 0.05])
"""Of a step: far below one, next to others that are not; where a first byte decides alone, and where not."""


def outcomes(fmt, fractions, seed, count):
    """bool[count, 8]: whether eights of these fractions of the smallest step are rounded up (count: of 7)."""
    step = {"fp8": 2.0**-9, "fp6": 2.0**-4}.get(fmt, 1.0)
    x = np.tile(fractions * step, (count // 7, 8)).astype(np.float32)
    # The first eight of each block make its scale 1.
    x[:, :8] = ref.TOP[fmt]
    payload = pk.encode(x, fmt, block=64, rounding="stochastic", seed=jnp.uint32(seed))
    values = np.asarray(pk.decode(payload, fmt, 64, block=64, dtype=jnp.float32))[:, 8:] / step
    assert set(np.unique(values)) <= {0, 1}
    return values.reshape(-1, 8) == 1


@pytest.mark.parametrize("fmt", pk.QUANTIZED)
def test_what_eight_neighbours_are_rounded_to(fmt):
    """Each is unbiased, and tells nothing of the others: of its neighbour's, in one case of 256 at most."""
    total, count = np.zeros(8), 7 << 14
    for turn in range(8):
        fractions = np.roll(FRACTIONS, turn)
        up = outcomes(fmt, fractions, turn, count)
        spread = np.sqrt(fractions * (1 - fractions))
        total += np.roll(up.sum(0), -turn)
        assert np.all(np.abs(up.mean(0) - fractions) < 5 * spread / np.sqrt(count))
        covariance = up.T.astype(np.float64) @ up / count - np.outer(up.mean(0), up.mean(0))
        noise = 5 * np.outer(spread, spread) / np.sqrt(count)
        for i in range(8):
            for j in range(i):
                # If a byte that two share leaves one open, which it does one time in 256, it may decide.
                sharing = i // 4 == j // 4 and (i - j) % 4 != 2
                assert np.abs(covariance[i, j]) < noise[i, j] + sharing / 1024, (turn, i, j)
    # All places and seeds together; sixteen bits hold fractions to 2**-17 of a step.
    spread = np.sqrt(FRACTIONS * (1 - FRACTIONS) / (8 * count))
    assert np.all(np.abs(total / (8 * count) - FRACTIONS) < 5 * spread + 2**-17)


@pytest.mark.parametrize(
    ("fmt", "chunks"),
    [
        pytest.param(fmt, chunks, marks=() if (i + chunks) % 3 == 0 else pytest.mark.slow)
        for (i, fmt), chunks in itertools.product(enumerate(pk.FORMATS), (1, 2, 3))
    ],
)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_reordered_payload_is_the_permuted_leaf(fmt, chunks, rounding):
    local, nodes, q = 4, 3, 128
    g = case("normal", rows=1, n=local * nodes * chunks * q).reshape(-1)
    got = np.asarray(
        pk.encode_reordered(
            g, fmt, local=local, nodes=nodes, chunks=chunks, block=64, rounding=rounding, seed=seed()
        )
    )
    drawn = rounding == "stochastic" and fmt in pk.QUANTIZED
    u = ref.random_bits(SEED, g.size, fmt).reshape(local, nodes, chunks, q) if drawn else None
    pieces = np.asarray(g).reshape(local, nodes, chunks, q)
    for c in range(chunks):
        for i in range(local):
            random = None if u is None else u[i, :, c].reshape(-1)
            want = ref.encode_row(pieces[i, :, c].reshape(-1), fmt, 64, random)
            np.testing.assert_array_equal(got[c, i], want)


@pytest.mark.parametrize(
    ("fmt_in", "fmt_out"),
    [
        pytest.param(a, b, marks=() if (i + j) % 3 == 0 else pytest.mark.slow)
        for (i, a), (j, b) in itertools.product(enumerate(pk.FORMATS), repeat=2)
    ],
)
def test_sum_between_hops(fmt_in, fmt_out):
    peers, rows, n = 5, 2, 128
    payload = pk.encode(case("normal", rows=peers, n=rows * n), fmt_in, block=64)
    total = ref.decode_sum(np.asarray(payload), fmt_in, rows * n, 64).reshape(rows, n)
    np.testing.assert_array_equal(
        np.asarray(pk.decode_sum(payload, fmt_in, rows * n, block=64)).reshape(rows, n), total
    )
    got = pk.decode_sum_encode(
        payload, fmt_in, fmt_out, rows, n, block=64, rounding="stochastic", seed=seed()
    )
    np.testing.assert_array_equal(np.asarray(got), ref.encode(total, fmt_out, 64, "stochastic", seed=SEED))


@pytest.mark.parametrize("fmt", pk.FORMATS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_encoded_difference(fmt, dtype):
    w = case("normal", rows=2, n=256).astype(np.float32)
    base = jnp.asarray(w * 0.97, dtype)
    payload = pk.encode_delta(w, base, fmt, block=64)
    delta = w - np.asarray(base, np.float32)
    np.testing.assert_array_equal(np.asarray(payload), ref.encode(delta, fmt, 64))
    got = pk.decode_add(payload, base, fmt, block=64)
    want = np.asarray(base, np.float32) + ref.decode(np.asarray(payload), fmt, 256, 64)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got), want.astype(dtype))


@pytest.mark.parametrize("fmt", pk.QUANTIZED)
def test_broken_and_empty_blocks(fmt):
    x = np.ones((1, 320), np.float32)
    x[0, 0], x[0, 64], x[0, 128:192], x[0, 192:256] = np.nan, -np.inf, 0, 1e-30
    payload = pk.encode(x, fmt, block=64)
    got = np.asarray(pk.decode(payload, fmt, 320, block=64, dtype=jnp.float32))[0]
    assert np.isnan(got[:128]).all()
    np.testing.assert_array_equal(got[128:256], np.zeros(128))
    np.testing.assert_allclose(got[256:], 1, rtol=2**-8)
    total = pk.decode_sum(jnp.concatenate([payload, payload]), fmt, 320, block=64)
    assert np.isnan(np.asarray(total)[:128]).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: pk.encode(x, "int3", block=64), ValueError, "int3"),
        (lambda x: pk.encode(x, "int4", block=96), ValueError, "block size 96"),
        (lambda x: pk.encode(x, "int4", block=32), ValueError, "block size 32"),
        (lambda x: pk.encode(x, "int4"), ValueError, "block size None"),
        (lambda x: pk.encode(x, "int4", block=256), ValueError, "pad the row"),
        (lambda x: pk.encode(x[0], "int4", block=64), ValueError, "2 dimensions"),
        (lambda x: pk.encode(x.astype(jnp.int32), "int4", block=64), TypeError, "int32"),
        (lambda x: pk.encode(x, "int4", block=64, rotation=16), ValueError, "rotation 16"),
        (lambda x: pk.encode(x, "int4", block=64, rounding="up"), ValueError, "'up'"),
        (lambda x: pk.encode(x, "int4", block=64, rounding="stochastic"), ValueError, "seed"),
        (
            lambda x: pk.encode(x, "int4", block=64, rounding="stochastic", seed=jnp.int32(1)),
            TypeError,
            "uint32",
        ),
        (lambda x: pk.decode(x, "int4", 128, block=64), TypeError, "uint8"),
        (lambda x: pk.decode(x.astype(jnp.uint8), "int4", 64, block=64), ValueError, "128 bytes"),
        (lambda x: pk.decode_add(x[:1, :68].astype(jnp.uint8), x, "int4", block=64), ValueError, "1 rows"),
        (lambda x: pk.encode_delta(x, x[:1], "int4", block=64), ValueError, "agree"),
        (
            lambda x: pk.encode_reordered(x[0], "int4", local=3, nodes=1, block=64),
            ValueError,
            "do not divide",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(jnp.ones((2, 128)))


def test_calls_work_inside_shard_map():
    mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = len(jax.devices())
    x = jnp.asarray(case("normal", rows=rows, n=128))
    inner = jax.shard_map(
        lambda v: pk.encode(v, "int4", block=64),
        mesh=mesh,
        in_specs=jax.P("d"),
        out_specs=jax.P("d"),
        check_vma=False,
    )
    np.testing.assert_array_equal(np.asarray(jax.jit(inner)(x)), np.asarray(pk.encode(x, "int4", block=64)))
