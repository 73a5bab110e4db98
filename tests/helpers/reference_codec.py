"""An independent wire codec in plain numpy and float64, for tests to compare with.

Written from the specification in `pallas_kernels.reference` by other means: decimal arithmetic instead of bit
manipulation, tables instead of calculation.
"""

import ml_dtypes
import numpy as np

WIDTH = {"fp32": 32, "bf16": 16, "fp8": 8, "int8": 8, "fp6": 6, "int4": 4, "int2": 2}
TOP = {"fp8": 448.0, "int8": 127.0, "fp6": 28.0, "int4": 7.0, "int2": 1.0}
PLAIN = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}


def _small_floats(exponent_bits, mantissa_bits, bias, largest):
    """Magnitude of every code without its sign bit, up to the largest."""
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        step = 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
        values.append((mantissa + (exponent > 0) * (1 << mantissa_bits)) * step)
    return np.array([v for v in values if v <= largest])


TABLE = {"fp8": _small_floats(4, 3, 7, 448.0), "fp6": _small_floats(3, 2, 3, 28.0)}


def row_bytes(fmt, n, block):
    """Payload bytes of a row of n elements."""
    return n * WIDTH[fmt] // 8 + (2 * (n // block) if fmt in TOP else 0)


def scale_of(peak, fmt, up, rotation):
    """(bf16 scale, fp32 inverse) of a block whose largest magnitude is `peak`."""
    norm = np.sqrt(32.0) if rotation else 1.0
    if not np.isfinite(peak):
        return ml_dtypes.bfloat16(np.nan), np.float32(0)
    exact = np.float32(peak) * np.float32(1 / (TOP[fmt] * norm))
    if exact > 2.0**125:
        return ml_dtypes.bfloat16(np.nan), np.float32(0)
    if exact < 2.0**-80:
        return ml_dtypes.bfloat16(0), np.float32(0)
    scale = ml_dtypes.bfloat16(exact)
    if up and np.float32(scale) < exact:
        scale = np.nextafter(scale, ml_dtypes.bfloat16(np.inf))
    inverse = np.float32(1.0 / np.float64(scale))
    if up:
        for _ in range(8):
            inverse = np.nextafter(inverse, np.float32(0))
    return scale, inverse * np.float32(1 / norm)


def _mix(x):
    """lowbias32."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


DITHER = {"int8": 16, "int4": 16, "int2": 16, "fp8": 20, "fp6": 21}


def random_bits(seed, count, fmt):
    """DITHER[fmt] random bits for each of the first `count` elements of a tensor."""
    bits = DITHER[fmt]
    keys = [_mix(seed)]
    while len(keys) < 4:
        keys.append(_mix((keys[-1] + 0x9E3779B9) & 0xFFFFFFFF))
    drawn = []
    for octet in range((count + 7) // 8):
        x = y = (octet * 0x9E3779B9 + keys[0]) & 0xFFFFFFFF
        for key in keys[1:]:
            product = x * 0xD256D193
            x, y = (product >> 32) ^ y ^ key, product & 0xFFFFFFFF
        for twice in (x << 32 | x, y << 32 | y):
            drawn += [(twice >> (64 - turn - bits)) % 2**bits for turn in (0, 8, 16, 24)]
    return np.array(drawn[:count], np.int64)


def _code(y, fmt, random):
    """Integer codes of float32 values within +-TOP."""
    y, unit = y.astype(np.float64), 2 ** DITHER[fmt]
    if fmt in TABLE:
        table = TABLE[fmt]
        size = np.minimum(np.abs(y), TOP[fmt])
        below = np.searchsorted(table, size, side="right") - 1
        above = np.minimum(below + 1, len(table) - 1)
        step = np.where(above > below, table[above] - table[below], 1.0)
        part = (size - table[below]) / step
        if random is None:
            half_to_even = (part == 0.5) & (below % 2 == 1)
            magnitude = below + ((part > 0.5) | half_to_even)
        else:
            magnitude = below + (np.rint(part * unit) + random >= unit)
        return magnitude + (np.signbit(y) << (WIDTH[fmt] - 1))
    if random is None:
        return np.rint(y).astype(np.int64)
    return np.floor(np.rint(y * unit + random) / unit).astype(np.int64)


def _pack(codes, bits):
    """Little-endian bit fields, packed bit by bit."""
    field = (codes[:, None] >> np.arange(bits)) & 1
    return np.packbits(field.astype(np.uint8).reshape(-1), bitorder="little")


def _unpack(data, bits):
    field = np.unpackbits(data, bitorder="little").reshape(-1, bits).astype(np.int64)
    return (field << np.arange(bits)).sum(1)


def _flush(x):
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def hadamard(x):
    """Unnormalised 32-wide rotation of a flat float32 array, added up like the butterflies."""
    x = _flush(x.reshape(-1, 32).astype(np.float32))
    for bit in range(5):
        partner = np.arange(32) ^ (1 << bit)
        lower = (np.arange(32) >> bit) & 1 == 0
        x = _flush(np.where(lower, x + x[:, partner], x[:, partner] - x))
    return x.reshape(-1)


def encode_row(x, fmt, block, random=None, rotation=0):
    """uint8 payload of one row; `random` holds DITHER[fmt] random bits an element, or None."""
    with np.errstate(all="ignore"):
        x = np.asarray(x).astype(np.float32)
        if rotation:
            x = hadamard(x)
        if fmt in PLAIN:
            return (x * np.float32(32**-0.5 if rotation else 1)).astype(PLAIN[fmt]).view(np.uint8)
        codes, scales = [], []
        for start in range(0, len(x), block):
            part = x[start : start + block]
            peak = np.nan if np.isnan(part).any() else np.abs(part).max()
            scale, inverse = scale_of(peak, fmt, random is not None, rotation)
            scales.append(np.uint16(0x7FC0) if np.isnan(scale) else scale.view(np.uint16))
            if inverse == 0:
                codes.append(np.zeros(block, np.int64))
                continue
            y = part * inverse
            assert np.abs(y).max() <= TOP[fmt] * (1 + 2**-7.9 * (random is None))
            codes.append(_code(y, fmt, None if random is None else random[start : start + block]))
    codes = np.concatenate(codes)
    planes = [_pack(codes & 15, 4), _pack((codes >> 4) & 3, 2)] if fmt == "fp6" else None
    if planes is None:
        planes = [_pack(codes & ((1 << WIDTH[fmt]) - 1), WIDTH[fmt])]
    return np.concatenate([*planes, np.array(scales, np.uint16).view(np.uint8)])


def decode_row(payload, fmt, n, block):
    """float32[n] of one payload row."""
    payload = np.ascontiguousarray(payload)
    if fmt in PLAIN:
        return payload.view(PLAIN[fmt]).astype(np.float32)
    size = n * WIDTH[fmt] // 8
    scales = payload[size:].view(ml_dtypes.bfloat16).astype(np.float32)
    if fmt == "fp6":
        codes = _unpack(payload[: n // 2], 4) + (_unpack(payload[n // 2 : size], 2) << 4)
    else:
        codes = _unpack(payload[:size], WIDTH[fmt])
    if fmt in TABLE:
        half = 1 << (WIDTH[fmt] - 1)
        padded = np.append(TABLE[fmt], np.full(half - len(TABLE[fmt]), np.nan))
        value = padded[codes % half] * np.where(codes >= half, -1.0, 1.0)
    else:
        value = codes - ((codes >> (WIDTH[fmt] - 1)) << WIDTH[fmt])
    return (value * np.repeat(scales, block)).astype(np.float32)


def encode(x, fmt, block, rounding="nearest", rotation=0, seed=None):
    """uint8[rows, bytes] of x[rows, n]."""
    x = np.asarray(x)
    random = [None] * len(x)
    if rounding == "stochastic" and fmt in TOP:
        random = random_bits(seed, x.size, fmt).reshape(x.shape)
    return np.stack([encode_row(row, fmt, block, u, rotation) for row, u in zip(x, random, strict=True)])


def decode(payload, fmt, n, block):
    """float32[rows, n]."""
    return np.stack([decode_row(row, fmt, n, block) for row in np.asarray(payload)])


HALF = {"int8": 128, "int4": 8, "int2": 2}


def _sum_integers(payload, fmt, n, block):
    """The biased sum of integer codes, scales taken relative to the largest of a block."""
    size = n * WIDTH[fmt] // 8
    scales = np.stack([np.ascontiguousarray(row[size:]) for row in payload]).view(ml_dtypes.bfloat16)
    scales = scales.astype(np.float64)
    largest = np.nan_to_num(scales).max(axis=0)
    unit = np.repeat(2.0 ** np.floor(np.log2(np.where(largest > 0, largest, 1))), block)
    total = bias = np.float32(0)
    for row, scale in zip(payload, scales, strict=True):
        codes = _unpack(np.ascontiguousarray(row[:size]), WIDTH[fmt])
        codes = codes - ((codes >> (WIDTH[fmt] - 1)) << WIDTH[fmt])
        relative = (np.repeat(scale, block) / unit).astype(np.float32)
        total = total + (codes + HALF[fmt]).astype(np.float32) * relative
        bias = bias + np.float32(HALF[fmt]) * relative
    return ((total - bias) * unit).astype(np.float32)


def decode_sum(payload, fmt, n, block, rotation=0, scale=1.0):
    """float32[n]: the rows added up in order, the rotation undone."""
    total = _sum_integers(payload, fmt, n, block) if fmt in HALF else decode_row(payload[0], fmt, n, block)
    for row in payload[1:] if fmt not in HALF else ():
        total = total + decode_row(row, fmt, n, block)
    factor = np.float32(scale)
    if rotation:
        total, factor = hadamard(total), factor * np.float32(32**-0.5)
    return total * factor
