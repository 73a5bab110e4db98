"""From numbers to codes: scales, dither, rounding, packing; the Triton side of `reference.encode`.

A code is read out of the mantissa of y + 1.5 * 2**23: conversion instructions run at an eighth of
the rate of an addition. Codes are packed by adding them up, shifted, which needs no masks since
each was made positive first.
"""

# Triton's language only looks like Python: its tuples grow in unrolled loops, which pyright cannot follow,
# it has no conditional expressions on tensors, and it is installed on GPU machines alone.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportMissingImports=false
# ruff: noqa: RUF005, SIM108

import triton
import triton.language as tl

MIN_SCALE_BITS = tl.constexpr((127 - 80) << 23)
MAX_SCALE_BITS = tl.constexpr((127 + 126) << 23)
NAN_SCALE = tl.constexpr(0x7FC0)
ONE_BF16 = tl.constexpr(0x3F80)
STOCHASTIC_MARGIN = tl.constexpr(8)
ROTATION_NORM = tl.constexpr(32.0**-0.5)
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def rotate(lanes):
    """The 32-wide Hadamard butterflies across 32 lanes, not normalised, flushing subnormals."""
    for i in tl.static_range(0, 5):
        result = ()
        for j in tl.static_range(0, 32):
            if (j >> i) & 1 == 0:
                value = tl.inline_asm_elementwise(
                    "add.ftz.f32 $0, $1, $2;", "=f,f,f", [lanes[j], lanes[j + (1 << i)]], tl.float32, True, 1
                )
            else:
                value = tl.inline_asm_elementwise(
                    "sub.ftz.f32 $0, $1, $2;", "=f,f,f", [lanes[j - (1 << i)], lanes[j]], tl.float32, True, 1
                )
            result = result + (value,)
        lanes = result
    return lanes


@triton.jit
def block_scales(
    lanes, unit, W: tl.constexpr, QMAX: tl.constexpr, STOCHASTIC: tl.constexpr, ROTATE: tl.constexpr
):
    """bf16 scale bits and inverse scales, [T] each: the same for the W threads of a block.

    The numbers are lanes * unit, unit a power of two for each block, or None: a factor of the inverse.
    """
    T: tl.constexpr = lanes[0].shape[0]
    top = tl.abs(lanes[0])
    for k in tl.static_range(1, len(lanes)):
        top = tl.maximum(top, tl.abs(lanes[k]), propagate_nan=tl.PropagateNan.ALL)
    top = (top.to(tl.int32, bitcast=True) & 0x7FFFFFFF).reshape(T // W, W)
    top = tl.broadcast_to(tl.max(top, axis=1)[:, None], (T // W, W)).reshape(T)
    NORM: tl.constexpr = ROTATION_NORM if ROTATE else 1.0
    top = top.to(tl.float32, bitcast=True)
    if unit is not None:
        top *= unit
    exact = (top * (NORM / QMAX)).to(tl.int32, bitcast=True)
    bad = exact > MAX_SCALE_BITS
    dead = bad | (exact < MIN_SCALE_BITS)
    if STOCHASTIC:
        rounded = (exact + 0xFFFF) >> 16
    else:
        rounded = (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16
    rounded = tl.where(dead, ONE_BF16, rounded)
    scale = tl.where(dead, tl.where(bad, NAN_SCALE, 0), rounded).to(tl.uint16)
    # A reciprocal good to an ulp, made exact by one step of Newton's (Markstein).
    wide = (rounded << 16).to(tl.float32, bitcast=True)
    guess = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [wide], tl.float32, True, 1)
    inverse = tl.fma(guess, tl.fma(-wide, guess, 1.0), guess)
    if STOCHASTIC:
        inverse = (inverse.to(tl.int32, bitcast=True) - STOCHASTIC_MARGIN).to(tl.float32, bitcast=True)
    if ROTATE:
        inverse *= ROTATION_NORM
    if unit is not None:
        inverse *= unit
    return scale, tl.where(dead, 0.0, inverse)


@triton.jit
def _mix(x):
    """lowbias32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_words(seed_ptr, pair, COUNT: tl.constexpr):
    """COUNT tensors of 32 random bits, for the pairs of elements from pair[T] on."""
    first = _mix(tl.load(seed_ptr))
    second = _mix(first + 0x9E3779B9)
    start = pair * 0x9E3779B9 + first
    words = ()
    for i in tl.static_range(0, COUNT):
        x = start + (i * 0x9E3779B9) % (1 << 32)
        x = (x ^ (x >> 17)) * 0x846CA68B
        words = words + (x ^ (x >> 16) ^ second,)
    return words


@triton.jit
def round_codes(y, random, ODD: tl.constexpr, BIAS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """BIAS + rint(y); if STOCHASTIC, plus a neighbour of y / 2**15 drawn with a half of `random`; int32."""
    if STOCHASTIC:
        if ODD:
            dither = random >> 17
        else:
            dither = random & 0x7FFF
        fixed = (y + MAGIC).to(tl.int32, bitcast=True)
        return (fixed + dither.to(tl.int32, bitcast=True) + ((BIAS << 15) - MAGIC_BITS)) >> 15
    else:
        return (y + MAGIC).to(tl.int32, bitcast=True) + (BIAS - MAGIC_BITS)


@triton.jit
def minifloat(
    y,
    random,
    ODD: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """sign | exponent | mantissa, int32."""
    bits = y.to(tl.int32, bitcast=True)
    SMALLEST: tl.constexpr = 128 - BIAS
    exponent = tl.maximum((bits & 0x7FFFFFFF) >> 23, SMALLEST)
    FRACTION: tl.constexpr = 15 if STOCHASTIC else 0
    power = ((254 + MANTISSA + FRACTION - exponent) << 23).to(tl.float32, bitcast=True)
    steps = round_codes(tl.abs(y) * power, random, ODD, 0, STOCHASTIC)
    return (((exponent - SMALLEST) << MANTISSA) + steps) | ((bits >> 31) & 1) << (BITS - 1)


@triton.jit
def _sum_shifted(codes, START: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr):
    """COUNT codes, from START on, side by side in one int32."""
    word = codes[START]
    for k in tl.static_range(1, COUNT):
        word += codes[START + k] << (k * BITS)
    return word


@triton.jit
def pack(codes, BITS: tl.constexpr, SIGNS: tl.constexpr, dead):
    """uint32 words of positive int32 codes, XORed with SIGNS; zero where dead."""
    PER: tl.constexpr = min(32 // BITS, len(codes))
    words = ()
    for i in tl.static_range(0, len(codes) // PER):
        word = _sum_shifted(codes, i * PER, PER, BITS).to(tl.uint32, bitcast=True) ^ SIGNS
        words = words + (tl.where(dead, 0, word),)
    return words


@triton.jit
def e4m3_pair(a, b):
    """The e4m3 bytes of two fp32 tensors, a's low, in a uint16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [a, b], tl.uint16, True, 1
    )
