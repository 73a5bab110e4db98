"""Scales at the edges of their rounding and of their range, which random numbers seldom meet."""

import jax.numpy as jnp
import numpy as np
import pytest
import reference_codec as ref

import pallas_kernels as pk
from pallas_kernels import reference
from pallas_kernels.formats import QMAX

BLOCK = 64


def same_payload(peaks: np.ndarray, fmt: str, rounding: str = "nearest") -> np.ndarray:
    """Encode one block for each peak as the independent codec does; returns the decoded peaks."""
    x = np.zeros((1, len(peaks) * BLOCK), np.float32)
    x[0, ::BLOCK] = peaks
    got = pk.encode(x, fmt, block=BLOCK, rounding=rounding, seed=jnp.uint32(5))
    np.testing.assert_array_equal(np.asarray(got), ref.encode(x, fmt, BLOCK, rounding, seed=5))
    return np.asarray(pk.decode(got, fmt, x.size, block=BLOCK, dtype=jnp.float32))[0, ::BLOCK]


@pytest.mark.parametrize("fmt", pk.QUANTIZED)
def test_a_scale_in_the_middle_of_two_is_rounded_to_the_even_one(fmt):
    peaks = np.float32(1) + np.arange(1 << 20, dtype=np.float32) * np.float32(2.0**-20)
    bits = (peaks * np.float32(1 / QMAX[fmt])).view(np.uint32)
    ties = peaks[bits & 0xFFFF == 0x8000]
    assert len(ties) >= 8
    assert len(np.unique(bits[bits & 0xFFFF == 0x8000] >> 16 & 1)) == 2, "down as well as up"
    same_payload(ties[:64], fmt)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_scale_whose_reciprocal_could_be_subnormal_is_none(rounding):
    peaks = np.exp2(np.linspace(124, 126.5, 41)).astype(np.float32)
    found = same_payload(peaks, "int2", rounding)
    np.testing.assert_array_equal(np.isnan(found), peaks > 2.0**125)
    assert 8 < np.isnan(found).sum() < 33


@pytest.mark.parametrize("rotation", [0, 32])
@pytest.mark.parametrize("fmt", pk.QUANTIZED)
def test_stochastic_rounding_never_exceeds_the_format(fmt, rotation):
    """A peak of qmax times a scale, and its neighbours: the next code would wrap around to the other end."""
    top = QMAX[fmt] * (np.sqrt(32) if rotation else 1)
    scales = (np.float32(1) + np.arange(128, dtype=np.float32) / 128) * np.float32(3.0)
    exact = np.asarray(scales.astype(jnp.bfloat16), np.float64) * top
    bits = exact.astype(np.float32).view(np.int32)[:, None] + np.arange(-4, 5, dtype=np.int32)
    peaks = bits.view(np.float32).reshape(-1, 1)
    _, inverse = reference._scales(jnp.asarray(peaks), fmt, "stochastic", rotation)
    assert (peaks[:, 0] * np.asarray(inverse) <= np.float32(QMAX[fmt])).all()
