"""The executable specification of the codec. Every kernel equals this ``jax.numpy`` code bit for bit.

It is also the implementation on CPUs and on all devices without kernels.

**Payload.** A row of n elements becomes ``nbytes(fmt, n, block)`` bytes: the codes of the whole
row, then one bf16 scale (little endian) for each block of ``block`` consecutive elements.

**Scale.** m is the block's largest magnitude in fp32, and s = m * r with r the fp32 nearest to
1/qmax, or to 1/(qmax * sqrt(32)) with rotation. Under "nearest" rounding s is rounded to the
nearest bf16 (ties to even), under "stochastic" it is rounded up. Then

- If s < 2**-80, the scale and all codes are 0. The threshold is so high that no subnormal number can
  influence a code. So results do not depend on whether a chip flushes subnormals.
- If m is not finite, or s > 2**125, the scale is the quiet NaN 0x7FC0, all codes are 0, and the whole block
  decodes to NaN. Above 2**125 (possible only in int2) the reciprocal could be subnormal.

**Code.** y = x * inv in fp32. inv is 1/scale, correctly rounded to fp32. Under stochastic rounding it is then
made 8 ulps smaller. With rotation it is then multiplied by the fp32 nearest to 1/sqrt(32).

- Integer formats: q = rint(y), half to even, kept as two's complement of 8, 4 or 2 bits.
- Small floats (fp8 = e4m3, fp6 = e3m2): y rounded to the nearest representable value, half to even, including
  subnormals, as sign | exponent | mantissa. The sign of a zero is kept.

No clipping is needed. Rounding the scale to nearest moves a block maximum to at most qmax * (1 + 2**-8),
which rounds back to qmax in every format. Under stochastic rounding the 8 ulps make up for the fp32
roundings, so that |y| <= qmax.

**Stochastic rounding.** b is 16 bits for integers, 20 for fp8 and 21 for fp6. u is uniform in [0, 2**b). The
quantum is 1 for integers, and for small floats the spacing of the format's values around y.

- Integers: t = y / quantum * 2**b and q = rint(t + u) >> b.
- Small floats: t = |y| / quantum * 2**b and q = (rint(t) + u) >> b. t is fractional only below the smallest
  normal value.

The expectation of q is rint(t) / 2**b exactly, and t / 2**b if an integer's t ends in a half.

u depends on the seed and on the element's index i (row-major in the encoder's input, modulo 2**35). Eight
neighbours share the two words ``octet_hash(hash_keys(seed), i >> 3)``: the first four take the first word.
Element k of four takes the high b bits of their word rotated left by 8 * k. So each byte of the word is the
first byte of one element's bits, and the second byte of its predecessor's (cyclically). Every u is uniform.
The roundings of two elements of a word depend on each other only if the first byte does not decide one of
them, in one case of 256.

**Order of codes.**

- int8, fp8: one byte per element.
- int4: element 2j in the low half of byte j, element 2j + 1 in the high half.
- int2: elements 4j to 4j+3 in byte j, from the low bits up.
- fp6: two planes, together 4 codes in 3 bytes. The first has the low four bits of every code of the row,
  packed as int4. The second has the high two bits of every code, packed as int2.

**Rotation.** With rotation=32 every 32 consecutive elements are multiplied by the normalised Hadamard matrix
before encoding. These are butterflies (a + b, a - b) of stride 1, 2, 4, 8, 16, in arithmetic that flushes
subnormal operands and results to zeros of their sign. The norm 1/sqrt(32) is part of s and inv as above. Raw
formats are multiplied by it. The matrix is its own inverse: ``decode_sum`` applies it again after the last
sum, and multiplies by fp32(scale) * fp32(1/sqrt(32)).

**Sums.** Peers are added in row order in fp32, starting with the first row's value. Every product below is
exact, so a fused multiply-add changes nothing. For small floats the sum is of value * scale. Integers are
summed with a bias, which saves the kernels a subtraction per code. Let h be half the format's range (8 for
int4), and 2**e the largest power of two among the peers' scales of a block. The sum is 2**e * (sum of (q + h)
* (scale * 2**-e) - h * sum of scale * 2**-e). If all codes are 0, it is exactly 0. The bias costs one of
fp32's 24 bits.

References: ZeRO++ (arXiv:2306.10209) section 3.3 and algorithm 2 for the order of the hops, and SDP4Bit
(arXiv:2410.15526) for the rotation and the encoded difference.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.formats import BITS, MINIFLOAT, PLANES, QMAX, QUANTIZED, ROTATION

MIN_SCALE_BITS = (127 - 80) << 23
MAX_SCALE_BITS = (127 + 125) << 23
"""The largest scale whose reciprocal, even reduced by the margin, is not subnormal. CPUs flush subnormals."""
INF_BITS = 0x7F800000
NAN_SCALE = 0x7FC0
HASH_ROUNDS = 3
WEYL = 0x9E3779B9
PHILOX = 0xD256D193
STOCHASTIC_MARGIN = 8
HALF_RANGE = {fmt: 1 << (BITS[fmt] - 1) for fmt in QUANTIZED if fmt not in MINIFLOAT}
RANDOM_BITS = dict.fromkeys(HALF_RANGE, 16) | {fmt: 23 - mantissa for fmt, (mantissa, _) in MINIFLOAT.items()}
_PLAIN = {"fp32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}
ROTATION_NORM = np.float32(1 / np.sqrt(np.float64(ROTATION)))


def to_bits(x: jax.Array) -> jax.Array:
    """The bits of fp32 numbers as int32 of the same shape."""
    return lax.bitcast_convert_type(x, jnp.int32)


def to_float(bits: jax.Array) -> jax.Array:
    """The fp32 numbers with these int32 bits, in the same shape."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent in fp32, for int32 exponents from -126 to 127."""
    return to_float((exponent + 127) << 23)


def mix(x: jax.Array) -> jax.Array:
    """A bijective 32-bit hash (Wellons' lowbias32) of a uint32 array."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def hash_keys(seed: jax.Array) -> jax.Array:
    """The keys of ``octet_hash`` for a uint32 seed: uint32[1 + HASH_ROUNDS], shared by all elements."""
    keys = [mix(seed)]
    for _ in range(HASH_ROUNDS):
        keys.append(mix(keys[-1] + jnp.uint32(WEYL)))
    return jnp.stack(keys)


def octet_hash(keys: jax.Array, octet: jax.Array) -> tuple[jax.Array, jax.Array]:
    """64 random bits, as two words, for the neighbours 8*octet to 8*octet + 7 (uint32 arrays).

    These are rounds of Philox (Salmon et al., 2011), with one instruction per 64-bit product, on a Weyl
    sequence in both words. After three rounds, correlations of elements, lanes and single bits at lags up to
    4096 are at the level of noise. So are chi-squares over pairs of neighbours, lanes and seeds. A plain
    counter would need four rounds.
    """
    x = y = octet * jnp.uint32(WEYL) + keys[0]
    for key in keys[1:]:
        # The high word of a 64-bit product. JAX 0.11 cannot compile ``lax.mulhi`` in shard_map.
        low, high = x & 0xFFFF, x >> 16
        middle = low * jnp.uint32(PHILOX >> 16) + (low * jnp.uint32(PHILOX & 0xFFFF) >> 16)
        rest = high * jnp.uint32(PHILOX & 0xFFFF) + (middle & 0xFFFF)
        product = high * jnp.uint32(PHILOX >> 16) + (middle >> 16) + (rest >> 16)
        x, y = product ^ y ^ key, x * jnp.uint32(PHILOX)
    return x, y


def _uniform(seed: jax.Array, index: jax.Array, bits: int, shape: tuple[int, ...]) -> jax.Array:
    """Random bits of every element, int32. ``index`` has the uint32 index of each group of eight."""
    words = jnp.stack(octet_hash(hash_keys(seed), index), axis=-1)
    turns = [words] + [words << turn | words >> (32 - turn) for turn in (8, 16, 24)]
    return (jnp.stack(turns, axis=-1) >> (32 - bits)).astype(jnp.int32).reshape(shape)


def _flush(x: jax.Array) -> jax.Array:
    """Replace subnormal numbers by zeros of their sign, on every chip."""
    bits = to_bits(x)
    return to_float(jnp.where(bits & INF_BITS == 0, bits & ~0x7FFFFFFF, bits))


def rotate(x: jax.Array) -> jax.Array:
    """Apply the butterflies of the 32-wide Hadamard matrix along the last axis, in fp32, not normalised."""

    def butterflies(_: int, x: jax.Array) -> jax.Array:
        # Sums of neighbours move to the first half of a group and differences to the second. So the next
        # stride's pairs are neighbours again, XLA compiles one body, and the last result is in order.
        pairs = _flush(x).reshape(-1, ROTATION // 2, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        return jnp.concatenate([a + b, a - b], axis=-1)

    strides = ROTATION.bit_length() - 1
    return _flush(lax.fori_loop(0, strides, butterflies, x.reshape(-1, ROTATION))).reshape(x.shape)


def _scales(blocks: jax.Array, fmt: str, rounding: str, rotation: int) -> tuple[jax.Array, jax.Array]:
    """Scale bits (uint16) and inverse scales (fp32, 0 for zero and NaN blocks) of [..., block]."""
    norm = np.sqrt(rotation or 1)
    top = jnp.max(to_bits(blocks) & 0x7FFFFFFF, axis=-1)
    exact = to_bits(to_float(top) * np.float32(1 / (QMAX[fmt] * norm)))
    bad = (top >= INF_BITS) | (exact > MAX_SCALE_BITS)
    zero = exact < MIN_SCALE_BITS
    carry = 0xFFFF if rounding == "stochastic" else 0x7FFF + ((exact >> 16) & 1)
    rounded = jnp.where(bad | zero, 127 << 23, exact + carry) >> 16
    scale = jnp.where(bad, NAN_SCALE, jnp.where(zero, 0, rounded)).astype(jnp.uint16)
    # The reciprocal is computed in integers, because XLA's division on GPUs is off by an ulp or two. With
    # scale = m * 2**k and an 8-bit m, 2**31 / m is never a tie.
    mantissa = ((rounded & 0x7F) | 0x80).astype(jnp.uint32)
    quotient = (jnp.uint32(1 << 31) + (mantissa >> 1)) // mantissa
    inverse = (quotient.astype(jnp.float32) * np.float32(2.0**-24)) * _power_of_two(127 - (rounded >> 7))
    if rounding == "stochastic":
        inverse = to_float(to_bits(inverse) - STOCHASTIC_MARGIN)
    if rotation:
        inverse = inverse * ROTATION_NORM
    return scale, jnp.where(bad | zero, np.float32(0), inverse)


def _integer(y: jax.Array, fmt: str, random: jax.Array | None) -> jax.Array:
    """The int32 nearest to y, half to even, or a neighbour of y chosen by ``random``."""
    if random is None:
        return jnp.round(y).astype(jnp.int32)
    fixed = y * np.float32(1 << RANDOM_BITS[fmt])
    below = jnp.floor(fixed)
    total = below.astype(jnp.int32) + random
    rest = fixed - below
    up = (rest > 0.5) | ((rest == 0.5) & (total & 1 == 1))
    return (total + up) >> RANDOM_BITS[fmt]


def _codes(y: jax.Array, fmt: str, random: jax.Array | None) -> jax.Array:
    """int32 codes of scaled values y, before truncation to the format's bits."""
    if fmt not in MINIFLOAT:
        return _integer(y, fmt, random)
    mantissa, bias = MINIFLOAT[fmt]
    smallest = 127 + 1 - bias
    exponent = jnp.maximum(to_bits(jnp.abs(y)) >> 23, smallest)
    steps = jnp.abs(y) * _power_of_two(127 + mantissa - exponent)
    if random is None:
        steps = jnp.round(steps).astype(jnp.int32)
    else:
        fixed = jnp.round(steps * np.float32(1 << RANDOM_BITS[fmt])).astype(jnp.int32)
        steps = (fixed + random) >> RANDOM_BITS[fmt]
    magnitude = ((exponent - smallest) << mantissa) + steps
    sign = (to_bits(y) < 0).astype(jnp.int32)
    return magnitude | sign << BITS[fmt] - 1


def _pack(codes: jax.Array, fmt: str) -> jax.Array:
    """The planes of int32 codes, one after another: [..., n] -> uint8[..., n * bits / 8]."""
    planes, lowest = [], 0
    for bits in PLANES[fmt]:
        count = 8 // bits  # codes of a byte
        groups = (codes >> lowest).reshape(*codes.shape[:-1], -1, count) & ((1 << bits) - 1)
        shifts = jnp.arange(count, dtype=jnp.int32) * bits
        planes.append(jnp.sum(groups << shifts, axis=-1).astype(jnp.uint8))
        lowest += bits
    return jnp.concatenate(planes, axis=-1)


def _unpack(packed: jax.Array, fmt: str) -> jax.Array:
    """The inverse of ``_pack``."""
    n = packed.shape[-1] * 8 // BITS[fmt]
    codes, lowest = jnp.int32(0), 0
    for bits in PLANES[fmt]:
        plane = packed[..., n * lowest // 8 : n * (lowest + bits) // 8]
        shifts = jnp.arange(8 // bits, dtype=jnp.int32) * bits
        groups = (plane.astype(jnp.int32)[..., None] >> shifts) & ((1 << bits) - 1)
        codes |= groups.reshape(*plane.shape[:-1], -1) << lowest
        lowest += bits
    return codes


def _values(packed: jax.Array, fmt: str) -> jax.Array:
    """fp32 values of packed codes, before the scale."""
    codes = _unpack(packed, fmt)
    if fmt in MINIFLOAT:
        mantissa, bias = MINIFLOAT[fmt]
        sign = 1 << (BITS[fmt] - 1)
        magnitude = codes & (sign - 1)
        exponent = magnitude >> mantissa
        steps = (magnitude & ((1 << mantissa) - 1)) | (exponent > 0).astype(jnp.int32) << mantissa
        spacing = _power_of_two(jnp.maximum(exponent, 1) - bias - mantissa)
        value = steps.astype(jnp.float32) * spacing
        return jnp.where(codes & sign != 0, -value, value)
    half = HALF_RANGE[fmt]
    return ((codes ^ half) - half).astype(jnp.float32)


def _bytes(x: jax.Array) -> jax.Array:
    """The little-endian bytes of [..., n], as uint8[..., n * itemsize]."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def _from_bytes(payload: jax.Array, dtype: jnp.dtype) -> jax.Array:
    groups = payload.reshape(*payload.shape[:-1], -1, jnp.dtype(dtype).itemsize)
    return lax.bitcast_convert_type(groups, dtype)


def _encode(
    x: jax.Array, index: jax.Array | None, fmt: str, block: int | None, rounding: str, rotation: int,
    seed: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """Encode fp32[..., n] into uint8[..., nbytes]. ``index`` has the index of each group of eight."""
    if rotation:
        x = rotate(x)
    if fmt not in QUANTIZED:
        return _bytes((x * ROTATION_NORM if rotation else x).astype(_PLAIN[fmt]))
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scale, inverse = _scales(blocks, fmt, rounding, rotation)
    inverse = inverse[..., None]
    y = blocks * inverse
    random = None
    if rounding == "stochastic":
        assert seed is not None
        assert index is not None
        random = _uniform(seed, index, RANDOM_BITS[fmt], blocks.shape)
    # In a dead block y can be NaN, so replace it before the conversion to an integer.
    dead = inverse == 0
    codes = jnp.where(dead, 0, _codes(jnp.where(dead, 0, y), fmt, random))
    return jnp.concatenate([_pack(codes.reshape(x.shape), fmt), _bytes(scale)], axis=-1)


def encode(
    x: jax.Array, seed: jax.Array | None, *, fmt: str, block: int | None, rounding: str, rotation: int
) -> jax.Array:
    """See ``pallas_kernels.encode``."""
    index = None
    if rounding == "stochastic" and fmt in QUANTIZED:
        index = jnp.arange(x.size // 8, dtype=jnp.uint32).reshape(len(x), x.shape[1] // 8)
    return _encode(x.astype(jnp.float32), index, fmt, block, rounding, rotation, seed)


def encode_delta(
    w: jax.Array, base: jax.Array, seed: jax.Array | None, *, fmt: str, block: int | None, rounding: str
) -> jax.Array:
    """See ``pallas_kernels.encode_delta``."""
    delta = w.astype(jnp.float32) - base.astype(jnp.float32)
    return encode(delta, seed, fmt=fmt, block=block, rounding=rounding, rotation=0)


def encode_reordered(
    g: jax.Array, seed: jax.Array | None, *,
    fmt: str, local: int, nodes: int, chunks: int, block: int | None, rounding: str, rotation: int,
) -> jax.Array:  # fmt: skip
    """See ``pallas_kernels.encode_reordered``."""

    def reorder(flat: jax.Array) -> jax.Array:
        pieces = flat.reshape(local, nodes, chunks, -1)
        return pieces.transpose(2, 0, 1, 3).reshape(chunks, local, -1)

    stochastic = rounding == "stochastic" and fmt in QUANTIZED
    index = reorder(jnp.arange(g.size // 8, dtype=jnp.uint32)) if stochastic else None
    return _encode(reorder(g.astype(jnp.float32)), index, fmt, block, rounding, rotation, seed)


def _decode(payload: jax.Array, fmt: str, n: int, block: int | None) -> jax.Array:
    """fp32[..., n] of uint8[..., nbytes]."""
    if fmt not in QUANTIZED:
        return _from_bytes(payload, _PLAIN[fmt]).astype(jnp.float32)
    values, scale = _split(payload, fmt, n, block)
    return (values * scale).reshape(*payload.shape[:-1], n)


def decode(payload: jax.Array, *, fmt: str, n: int, block: int | None, dtype: jnp.dtype) -> jax.Array:
    """See ``pallas_kernels.decode``."""
    return _decode(payload, fmt, n, block).astype(dtype)


def decode_add(payload: jax.Array, base: jax.Array, *, fmt: str, block: int | None) -> jax.Array:
    """See ``pallas_kernels.decode_add``."""
    total = base.astype(jnp.float32) + _decode(payload, fmt, base.shape[-1], block)
    # Flush subnormals on all chips, because some chips do. Otherwise two replicas of a weight would differ.
    total = jnp.where(jnp.abs(total) < np.finfo(np.float32).tiny, 0, total)
    return total.astype(base.dtype)


def _split(payload: jax.Array, fmt: str, n: int, block: int | None) -> tuple[jax.Array, jax.Array]:
    """Unscaled values and scales of payload rows, fp32[..., n / block, block] and [..., n / block, 1]."""
    codes = n * BITS[fmt] // 8
    scale = _from_bytes(payload[..., codes:], jnp.dtype(jnp.bfloat16)).astype(jnp.float32)
    values = _values(payload[..., :codes], fmt).reshape(*payload.shape[:-1], -1, block)
    return values, scale[..., None]


def _fold_rows(terms: jax.Array) -> jax.Array:
    """The sum over the rows, in order, as separate additions that a compiler can fuse with the terms."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _sum_rows(payload: jax.Array, fmt: str, n: int, block: int | None) -> jax.Array:
    """fp32[n]: the sum of the decoded rows, in row order."""
    if fmt not in HALF_RANGE:
        return _fold_rows(_decode(payload, fmt, n, block))
    half = np.float32(HALF_RANGE[fmt])
    values, scale = _split(payload, fmt, n, block)
    exponent = jnp.minimum(jnp.max(to_bits(scale), axis=0) >> 23, 253)
    scale = scale * to_float((254 - exponent) << 23)
    total = _fold_rows((values + half) * scale) - _fold_rows(half * scale)
    return (total * to_float(exponent << 23)).reshape(n)


def decode_sum(
    payload: jax.Array, *, fmt: str, n: int, block: int | None, rotation: int, scale: float
) -> jax.Array:
    """See ``pallas_kernels.decode_sum``."""
    total = _sum_rows(payload, fmt, n, block)
    factor = np.float32(scale)
    if rotation:
        total = rotate(total)
        factor = factor * ROTATION_NORM
    return total if factor == 1 else total * factor


def decode_sum_encode(
    payload: jax.Array, seed: jax.Array | None, *,
    fmt_in: str, fmt_out: str, rows_out: int, n: int, block: int | None, rounding: str,
) -> jax.Array:  # fmt: skip
    """See ``pallas_kernels.decode_sum_encode``."""
    total = _sum_rows(payload, fmt_in, rows_out * n, block).reshape(rows_out, n)
    return encode(total, seed, fmt=fmt_out, block=block, rounding=rounding, rotation=0)
