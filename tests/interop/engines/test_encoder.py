"""A shard's patches, encoded on a device, are those of the specification in numpy, byte for byte."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from patch_encoder import encode

from zerojax.interop.engines.encoder import (
    LARGEST,
    Cut,
    compare,
    finished_patches,
    full_patch,
    rounded,
    start_packing,
)
from zerojax.interop.engines.receiver.patches import decode, full

SIZE, LAYERS = 5000, 2


def changed(rng, old, share, ulps):
    """fp32 weights of which about a share rounds to other bf16 values."""
    steps = rng.integers(1, ulps + 1, old.shape) * rng.choice([-1, 1], old.shape) * 2.0**-7
    return np.where(rng.random(old.shape) < share, old * (1 + steps), old).astype(np.float32)


def as_pieces(x, cut, dtype):
    values = np.zeros((len(x), cut.pieces * cut.size), np.dtype(f"u{np.dtype(dtype).itemsize}"))
    values[:, : x.shape[1]] = x.astype(dtype).view(values.dtype)
    return values.reshape(-1, cut.size)


def patches(now, sent, before):
    counts, sums = np.asarray(now.counts), np.asarray(now.sums)
    numbers = range(7, 7 + len(counts))
    packed = start_packing(now, sent, counts)
    found = {x.piece: x for x in finished_patches(now, packed, counts, sums, numbers, (before, 4))}
    return [found.get(7 + i) or full_patch(now, sums, i, 7 + i, 4) for i in range(len(counts))]


@pytest.mark.parametrize(
    ("dtype", "share", "ulps"),
    [
        (ml_dtypes.bfloat16, 0.01, 1),
        (ml_dtypes.bfloat16, 0.3, 40),
        (ml_dtypes.bfloat16, 0.0, 1),
        (np.float32, 0.02, 3),
    ],
)
def test_patches_equal_the_specification(dtype, share, ulps):
    rng, cut = np.random.default_rng(0), Cut.of(SIZE, 2048)
    assert cut == Cut(3, 2048)
    old = rng.standard_normal((LAYERS, SIZE)).astype(np.float32)
    new = changed(rng, old, share, ulps)
    new[0, :3] = np.nan, -0.0, np.inf
    name = np.dtype(dtype).name
    first = compare(rounded(jnp.asarray(old), dtype=name, layers=LAYERS, cut=cut), None)
    then = compare(rounded(jnp.asarray(new), dtype=name, layers=LAYERS, cut=cut), first.values)
    before, after = (as_pieces(x, cut, dtype) for x in (old, new))
    sums = np.asarray(first.sums)
    assert [full_patch(first, sums, i, 7 + i, 4) for i in range(len(before))] == [
        full(x, 7 + i, 4) for i, x in enumerate(before)
    ]
    expected = [encode(x, y, 7 + i, 3, 4) for i, (x, y) in enumerate(zip(before, after, strict=True))]
    assert patches(then, first.values, 3) == expected
    assert {patch.before for patch in expected} == {3}
    for patch, x, y in zip(expected, before, after, strict=True):
        places, differences = decode(patch, cut.size, x.itemsize)
        x[places] += differences
        assert np.array_equal(x, y)


def test_a_piece_that_has_changed_everywhere_is_sent_in_full():
    rng, cut = np.random.default_rng(0), Cut.of(SIZE)
    old, new = rng.standard_normal((2, 1, SIZE)).astype(np.float32)
    first = compare(rounded(jnp.asarray(old), dtype="bfloat16", layers=1, cut=cut), None)
    then = compare(rounded(jnp.asarray(new), dtype="bfloat16", layers=1, cut=cut), first.values)
    (patch,) = patches(then, first.values, 3)
    assert patch == full(as_pieces(new, cut, ml_dtypes.bfloat16)[0], 7, 4)


@pytest.mark.parametrize(("shard", "largest"), [(8300, 830), (1, 1024), (0, 1024), (68_000_000, 6_800_000)])
def test_no_piece_begins_behind_the_shard(shard: int, largest: int):
    cut = Cut.of(shard, largest)
    assert (cut.pieces - 1) * cut.size <= max(0, shard - 1) < cut.pieces * cut.size


def test_pieces_have_few_sizes_and_little_padding():
    cuts = {n: Cut.of(n) for n in (1, 1025, 5000, 9_000_000, 25_165_824, 58_720_256, 525_336_577)}
    for n, cut in cuts.items():
        assert cut.size % 1024 == 0
        assert cut.size <= LARGEST
        assert n <= cut.pieces * cut.size <= max(2048, 1.13 * n)
    assert len({Cut.of(n).size for n in range(8_000_000, 100_000_000, 999_999)}) <= 9
