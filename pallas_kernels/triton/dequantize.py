"""From codes to numbers: ``reference.decode`` in Triton.

Codes are written into the mantissas of floats, which takes no conversion.
"""

import triton
import triton.language as tl

from pallas_kernels.triton.lanes import load_codes
from pallas_kernels.triton.words import float_halves, fma_halves, select_bytes


@triton.jit
def _signed_lanes(words, BITS: tl.constexpr, K: tl.constexpr):
    """fp32 lanes of K two's complement fields, without a conversion.

    A field of a half word stays in its place. Its sign bit is flipped, which adds half of its range. An
    exponent above it gives its lowest bit the weight 1.
    """
    HALF: tl.constexpr = 1 << (BITS - 1)
    MASK: tl.constexpr = (1 << BITS) - 1
    lanes = ()
    for k in tl.static_range(0, K):
        word = words[k * BITS // 32]
        if k * BITS % 32 >= 16:
            word = word >> 16
        # (word & mask) ^ under, which the compiler would not merge into one instruction.
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6A;",
            "=r,r,r,r",
            [word, MASK << k * BITS % 16, ((150 - k * BITS % 16) << 23) | (HALF << k * BITS % 16)],
            tl.uint32,
            True,
            1,
        )
        offset = (1 << (23 - k * BITS % 16)) + HALF
        lanes = lanes + (bits.to(tl.float32, bitcast=True) - offset * 1.0,)
    return lanes


@triton.jit
def _e4m3_lanes(words, K: tl.constexpr):
    """fp32 lanes of K e4m3 bytes."""
    lanes = ()
    for i in tl.static_range(0, K // 2):
        half = (words[i // 2] >> (i % 2 * 16)).to(tl.uint16)
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 pair; .reg .b16 a, b;
            cvt.rn.f16x2.e4m3x2 pair, $2;
            mov.b32 {a, b}, pair;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b; }""",
            "=f,=f,h",
            [half],
            (tl.float32, tl.float32),
            True,
            1,
        )
        lanes = lanes + (low, high)
    return lanes


@triton.jit
def _e3m2_lanes(low, high, K: tl.constexpr):
    """fp32 lanes of K e3m2 codes, given their low four and high two bits.

    Codes k and k + 4 of eight become a pair of fp16. Each has five bits of magnitude and the sign three
    places above them. Its exponent is 12 too small, because e3m2's bias is 3 and fp16's is 15.
    """
    lanes = ()
    for i in tl.static_range(0, K // 8):
        crumbs = select_bytes(high[i // 2], high[i // 2] & 0, 0x4140 if i % 2 == 0 else 0x4342)
        tops = (crumbs & 0x00550055) | ((crumbs & 0x00AA00AA) << 2)
        firsts = ()
        seconds = ()
        for k in tl.static_range(0, 4):
            nibbles = low[i] << (8 - 4 * k) if k < 3 else low[i] >> 4
            pair = (nibbles & 0x0F000F00) | ((tops << (12 - 2 * k)) & 0x90009000)
            first, second = float_halves(fma_halves(pair, 1 << 12, 0x80008000))
            firsts = firsts + (first,)
            seconds = seconds + (second,)
        lanes = lanes + firsts + seconds
    return lanes


@triton.jit
def load_scales(ptr, row, block, live, blocks, W: tl.constexpr, BYTES: tl.constexpr, MASKED: tl.constexpr):
    """fp32[T]: the scale of each thread's block, in rows of ``blocks`` blocks."""
    start = ptr + row.to(tl.int64) * blocks * BYTES + blocks * (BYTES - 2)
    scales = start.to(tl.pointer_type(tl.uint16), bitcast=True) + block + tl.arange(0, live.shape[0]) // W
    if MASKED:
        scale = tl.load(scales, mask=live, other=0)
    else:
        scale = tl.load(scales)
    return (scale.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_row_codes(
    ptr,
    row,
    first,
    live,
    blocks,
    K: tl.constexpr,
    BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    FMT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The words of K codes per thread, from position ``first`` of a payload row on, and fp6's high plane.

    A row has ``blocks`` blocks. Their number is even if ALIGNED.
    """
    start = ptr + row.to(tl.int64) * blocks * BYTES
    if FMT == "fp6":
        low = load_codes(start, first, live, K // 2, ALIGNED, MASKED)
        high = start + blocks * ((BYTES - 2) // 3 * 2)
        return low, load_codes(high, first, live, K // 4, ALIGNED, MASKED)
    else:
        BITS: tl.constexpr = 2 if FMT == "int2" else (4 if FMT == "int4" else 8)
        words = load_codes(start, first, live, K * BITS // 8, ALIGNED, MASKED)
        return words, words


@triton.jit
def values_of(words, high, K: tl.constexpr, FMT: tl.constexpr):
    """fp32 lanes of the result of load_row_codes, without the scale."""
    if FMT == "fp8":
        return _e4m3_lanes(words, K)
    elif FMT == "fp6":
        return _e3m2_lanes(words, high, K)
    else:
        BITS: tl.constexpr = 2 if FMT == "int2" else (4 if FMT == "int4" else 8)
        return _signed_lanes(words, BITS, K)
