"""The receiver's side of the format: patches are exact, and a damaged one is refused."""

import numpy as np
import pytest

from zerojax.interop.engines import receiver
from zerojax.interop.engines.receiver import Patch, PatchError

SIZE = 20_000


def pair(dtype, share, most, seed=0):
    """Elements of all bit patterns before and after a change of a share of them."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, np.iinfo(dtype).max, SIZE, dtype, endpoint=True)
    step = (rng.integers(1, most + 1, SIZE) * rng.choice([-1, 1], SIZE)).astype(dtype)
    return old, np.where(rng.random(SIZE) < share, old + step, old)


def applied(patch, old):
    if patch.before == receiver.FULL:
        return np.frombuffer(patch.body, old.dtype)
    places, differences = receiver.decode(patch, old.size, old.itemsize)
    new = old.copy()
    new[places] += differences
    assert receiver.changed_checksums(receiver.checksums(old), places, old[places], new[places]) == patch.sums
    return new


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("share", [0, 1 / SIZE, 0.01, 0.2, 1])
@pytest.mark.parametrize("most", [1, 60, 2**62])
def test_a_patch_is_exact(dtype, share, most):
    old, new = pair(dtype, share, most)
    patch = Patch.of(receiver.encode(old, new, 5, 6, 7).to_bytes())
    assert np.array_equal(applied(patch, old), new)
    assert patch.sums == receiver.checksums(new)


def test_bytes_of_a_changed_weight():
    sizes = {}
    for share in (0.001, 0.01, 0.1):
        pairs = [pair(np.uint16, share, 1, seed) for seed in range(20)]
        old, new = (np.concatenate(x) for x in zip(*pairs, strict=True))
        sizes[share] = len(receiver.encode(old, new, 0, 0, 1).to_bytes()) / (old != new).sum()
    assert sizes[0.001] < 1.9
    assert sizes[0.01] < 1.3
    assert sizes[0.1] < 0.86


def test_the_checksums_are_those_that_the_page_defines():
    values = np.array([3, 5, 7], np.uint16)

    def factor(j):
        x = j * 0x9E3779B1 % 2**32
        x = (x ^ x >> 15) * 0x85EBCA77 % 2**32
        return (x ^ x >> 13) | 1

    words = 3 | 5 << 16, 7
    one = sum(factor(j) * w for j, w in enumerate(words)) % 2**32
    other = sum(factor(2**32 - 1 - j) * w for j, w in enumerate(words)) % 2**32
    assert receiver.checksums(values) == (one, other)


def test_a_damaged_patch_is_refused():
    old, new = pair(np.uint16, 0.01, 1)
    whole = receiver.encode(old, new, 5, 6, 7).to_bytes()
    with pytest.raises(PatchError, match="cut off"):
        Patch.of(whole[:30])
    with pytest.raises(PatchError, match="positions"):
        receiver.decode(Patch.of(whole[:-8]), old.size, 2)
    with pytest.raises(PatchError, match="changes element"):
        receiver.decode(Patch.of(whole), old.size // 2, 2)
    with pytest.raises(PatchError, match="header"):
        receiver.decode(Patch.of(whole[:37] + b"\xff" + whole[38:]), old.size, 2)
