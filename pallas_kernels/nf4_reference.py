"""The executable specification of nf4, which stores frozen weights. Kernels equal it bit for bit.

4-bit NormalFloat with double quantization is from QLoRA (Dettmers et al., 2023, arXiv:2305.14314, section 3).
Weights are divided by the largest weight of their block. The 16 levels are chosen so that each is the nearest
to about as many numbers of a normal distribution. The blocks' scales take 8 bits instead of 32.

**Payload.** A row of n elements becomes ``nf4_bytes(n, block)`` bytes, in this order:

- the codes, two a byte, element 2j in the low half of byte j;
- one byte for each block of ``block`` consecutive elements, its scale's code, and zeros up to a multiple of
  four bytes;
- one fp32 (little endian), the unit, for each group of 256 consecutive blocks.

The last group may be smaller. No row depends on another.

**Levels.** ``LEVELS`` are from the paper's appendix E. Q is the quantile function of the normal distribution,
and p = 1 - (1/32 + 1/30)/2. Positive levels are Q at 8 equally spaced probabilities from p down to 1/2,
without 1/2 itself. Negative levels are -Q at 7 such probabilities. With 0 all are divided by Q(p). Hence -1,
0 and 1 are exact. ``MIDPOINTS`` are the fp32 numbers nearest to the middles of neighbours.

**Scale.** m is a block's largest magnitude in fp32. The block is broken if m is not finite or m > 2**120. In
each group, g is the largest m of the blocks that are not broken, at least 2**-80. The unit is u = g *
fp32(254**-3). A block's code c is 1, plus 1 for each k from 2 to 254 with m > fp32(k**3 + (k - 1)**3) * (u /
2). Its scale s = c**3 * u is then the nearest to m. In a broken block c = 255 and s is NaN. Cubes of up to
254 are exact in fp32. Every product is rounded to fp32.

**Code.** It is the number of midpoints t with x > t * s, the product rounded to fp32. All codes of a broken
block are 7, the code of 0. Codes are chosen by the decoded scale, so the scale's rounding adds no error
itself. It only stretches or shrinks the levels, and clips the largest weights, by 0.6% or less near g.

**Decoding.** LEVELS[code] * s in fp32, rounded to the result's dtype. A block of zeros decodes to positive
zeros, and a broken block to NaN, without an effect on other blocks.

**Range.** The format is for weights of ordinary magnitude. Blocks with a weight above 2**120 become NaN.
Blocks with m much smaller than their group's g have coarse scales. The steps of s are 3/c of s: 5% if m is
1/75 of g, 19% if it is 1/4000. No scale is smaller than u, which is 2**-24 of g. In blocks with smaller m,
weights under u/25 become zeros. A group in which all weights are below 2**-80 is encoded as if g were 2**-80.
No subnormal number can influence a code, and none is decoded to fp32 or bf16. So results do not depend on
whether a chip flushes subnormals.

**Why cubes.** The table has the error of 2.1 million weights in blocks of 64, relative to their root mean
square. Beside it is the relative increase of the error by 8-bit scales. QLoRA subtracts the mean of the
scales, rounds the rest to an 8-bit float with an exponent of decimal places, and chooses codes by the scale
in fp32. In brackets each block's error is relative to that block (``scripts/bench/nf4_errors.py``).

| normal weights                             | scales in fp32 | ours            | QLoRA's          |
|--------------------------------------------|----------------|-----------------|------------------|
| as they are                                | 9.20% (9.20%)  | +0.01% (+0.01%) | +0.03% (+0.03%)  |
| Student's t, 3 degrees of freedom, instead | 12.25% (11.4%) | +0.04% (+0.04%) | +0.32% (+0.58%)  |
| 1% of the blocks 20 times as large         | 9.14% (9.20%)  | -0.02% (+0.04%) | +0.26% (+0.89%)  |
| one weight of 1% of the blocks 50 times so | 9.96% (9.27%)  | +0.02% (+0.03%) | +0.29% (+0.46%)  |
| blocks of log-normal sizes                 | 9.20% (9.20%)  | +0.01% (+0.03%) | +0.70% (+39.6%)  |
| 1% of the blocks 1000 times as large       | 9.13% (9.20%)  | -0.03% (+0.67%) | +0.18% (+221%)   |

Scales linear in c are as bad as QLoRA's, or worse. Unsigned floats of 4 and 4 bits as scales add 0.1%
everywhere.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.formats import NF4_GROUP, nf4_sections
from pallas_kernels.reference import to_bits, to_float

LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
MIDPOINTS = ((LEVELS[:-1].astype(np.float64) + LEVELS[1:]) / 2).astype(np.float32)
ZERO_CODE = 7
MAX_PEAK_BITS = (127 + 120) << 23
MIN_PEAK_BITS = (127 - 80) << 23
MAX_SCALE = 254
NAN_SCALE = 255
UNIT = np.float32(1 / MAX_SCALE**3)


def block_scales(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scales of rows of blocks.

    Args:
        x: [rows, n], any floating-point dtype.
        block: elements of a block; it divides n.

    Returns:
        The scales' codes uint8[rows, n / block], the groups' units fp32[rows, groups], and the scales
        fp32[rows, n / block], NaN for broken blocks.
    """
    blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, block)
    peaks = jnp.max(to_bits(blocks) & 0x7FFFFFFF, axis=-1)
    broken = peaks > MAX_PEAK_BITS
    peaks = jnp.where(broken, 0, peaks)
    padded = jnp.pad(peaks, ((0, 0), (0, -peaks.shape[1] % NF4_GROUP)))
    groups = padded.reshape(len(peaks), -1, NF4_GROUP)
    units = jnp.maximum(jnp.max(groups, axis=-1), MIN_PEAK_BITS)
    units = to_float(units) * UNIT
    codes = jnp.where(broken, NAN_SCALE, _scale_codes(to_float(peaks), _of_blocks(units, peaks.shape[1])))
    return codes.astype(jnp.uint8), units, _scales(codes, units)


def _of_blocks(units: jax.Array, blocks: int) -> jax.Array:
    """The unit of each block, fp32[rows, blocks]."""
    # jnp.repeat would make XLA sum up its indices for minutes while it compiles.
    return jnp.broadcast_to(units[..., None], (*units.shape, NF4_GROUP)).reshape(len(units), -1)[:, :blocks]


def _scale_codes(peaks: jax.Array, units: jax.Array) -> jax.Array:
    """int32 codes, 1 to 254, of fp32 block maxima, by a binary search, because bounds grow with the code."""
    half = units * np.float32(0.5)
    code = jnp.ones(peaks.shape, jnp.int32)
    for step in (128, 64, 32, 16, 8, 4, 2, 1):
        higher = code + step
        bound = (higher**3 + (higher - 1) ** 3).astype(jnp.float32) * half
        code = jnp.where((higher <= MAX_SCALE) & (peaks > bound), higher, code)
    return code


def _scales(codes: jax.Array, units: jax.Array) -> jax.Array:
    """fp32[rows, blocks] of the scales' int32 codes."""
    scales = (codes**3).astype(jnp.float32) * _of_blocks(units, codes.shape[1])
    return jnp.where(codes == NAN_SCALE, np.float32(np.nan), scales)


def tail(codes: jax.Array, units: jax.Array) -> jax.Array:
    """The end of payload rows, uint8[rows, bytes]: the scales' codes, padded to four bytes, and units."""
    padded = jnp.pad(codes, ((0, 0), (0, -codes.shape[1] % 4)))
    raw = lax.bitcast_convert_type(units, jnp.uint8).reshape(units.shape[0], -1)
    return jnp.concatenate([padded, raw], axis=1)


def encode_nf4(x: jax.Array, *, block: int) -> jax.Array:
    """See ``pallas_kernels.encode_nf4``."""
    scale_codes, units, scales = block_scales(x, block)
    blocks = x.astype(jnp.float32).reshape(*scales.shape, block)
    scales = scales[..., None]
    codes = jnp.zeros(blocks.shape, jnp.int32)
    for midpoint in MIDPOINTS:
        codes += blocks > midpoint * scales
    codes = jnp.where(jnp.isnan(scales), ZERO_CODE, codes).reshape(x.shape[0], -1, 2)
    packed = (codes[..., 0] | codes[..., 1] << 4).astype(jnp.uint8)
    return jnp.concatenate([packed, tail(scale_codes, units)], axis=1)


def decode_nf4(payload: jax.Array, *, n: int, block: int, dtype: Any) -> jax.Array:
    """See ``pallas_kernels.decode_nf4``."""
    first_scale, first_unit, end = nf4_sections(n, block)
    rows, blocks = payload.shape[0], n // block
    units = payload[:, first_unit:end].reshape(rows, -1, 4)
    units = lax.bitcast_convert_type(units, jnp.float32)
    scales = _scales(payload[:, first_scale : first_scale + blocks].astype(jnp.int32), units)
    packed = payload[:, :first_scale].astype(jnp.int32)
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, blocks, block)
    levels = jnp.take(jnp.asarray(LEVELS), codes, mode="clip")
    return (levels * scales[..., None]).reshape(rows, n).astype(dtype)
