"""Sums over peers: the Triton side of `reference.decode_sum`."""

# Triton's language only looks like Python: its tuples grow in unrolled loops, which pyright cannot follow,
# it has no conditional expressions on tensors, and it is installed on GPU machines alone.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportMissingImports=false
# ruff: noqa: RUF005, SIM108

import triton
import triton.language as tl

from pallas_kernels.cuda.dequantize import load_row_codes, load_scales, values_of


@triton.jit
def add_integers(
    ptr,
    block,
    live,
    PEERS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    PITCH: tl.constexpr,
    CODES: tl.constexpr,
    FMT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The sum of PEERS rows of integer codes: lanes, and the power of two they are in units of.

    One instruction makes a float of a code, where it stands: masked out and with its sign bit
    flipped it is a subnormal (or all but), (q + HALF) * 2**(place - 149), and scales are brought up
    into the top binade to meet it. The bias HALF is taken off again once, after the sum.
    """
    BITS: tl.constexpr = 2 if FMT == "int2" else (4 if FMT == "int4" else 8)
    HALF: tl.constexpr = 1 << (BITS - 1)
    MASK: tl.constexpr = (1 << BITS) - 1
    ZERO: tl.constexpr = 24 - BITS
    rows = ()
    scales = ()
    for peer in tl.static_range(0, PEERS):
        words, _ = load_row_codes(ptr, block * 0 + peer, block * W, live, K, PITCH, CODES, FMT, MASKED)
        rows = rows + (words,)
    for peer in tl.static_range(0, PEERS):
        scale = load_scales(ptr, block * 0 + peer, block, live, W, PITCH, CODES, MASKED)
        scales = scales + (scale.to(tl.int32, bitcast=True),)
    top = scales[0]
    for peer in tl.static_range(1, PEERS):
        top = tl.maximum(top, scales[peer])
    exponent = tl.minimum(top & 0x7F800000, 253 << 23)
    raised = (253 << 23) - exponent
    least = tl.maximum(top - (100 << 23), 0)
    lanes = ()
    bias = live.to(tl.float32)
    for peer in tl.static_range(0, PEERS):
        # Below 2**-100 of the largest scale all is lost in rounding; kept, it could wrap around.
        scale = tl.where(scales[peer] > least, scales[peer] + raised, 0).to(tl.float32, bitcast=True)
        added = ()
        for k in tl.static_range(0, K):
            word = rows[peer][k * BITS // 32]
            if k * BITS % 32 > ZERO:
                word = word >> 8
            code = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, $2, $3, 0x6A;",
                "=r,r,r,r",
                [
                    word,
                    MASK << (k * BITS % 32 if k * BITS % 32 <= ZERO else k * BITS % 32 - 8),
                    HALF << (k * BITS % 32 if k * BITS % 32 <= ZERO else k * BITS % 32 - 8),
                ],
                tl.uint32,
                True,
                1,
            ).to(tl.float32, bitcast=True)
            if peer == 0:
                added = added + (code * scale,)
            else:
                added = added + (tl.fma(code, scale, lanes[k]),)
        lanes = added
        if peer == 0:
            bias = 2.0**-126 * scale
        else:
            bias = tl.fma(scale, tl.full(scale.shape, 2.0**-126, tl.float32), bias)
    bias *= -HALF * 1.0
    total = ()
    for k in tl.static_range(0, K):
        place = k * BITS % 32 if k * BITS % 32 <= ZERO else k * BITS % 32 - 8
        weight = tl.full(live.shape, HALF * (1 << (ZERO - place)) * 1.0, tl.float32)
        total = total + (tl.fma(lanes[k], weight, bias),)
    return total, exponent.to(tl.float32, bitcast=True)


@triton.jit
def add_floats(
    ptr,
    block,
    live,
    PEERS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    PITCH: tl.constexpr,
    CODES: tl.constexpr,
    FMT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The sum of PEERS rows of small floats, as lanes."""
    lanes = ()
    for peer in tl.static_range(0, PEERS):
        row = block * 0 + peer
        scale = load_scales(ptr, row, block, live, W, PITCH, CODES, MASKED)
        words, high = load_row_codes(ptr, row, block * W, live, K, PITCH, CODES, FMT, MASKED)
        values = values_of(words, high, K, FMT)
        added = ()
        for k in tl.static_range(0, K):
            if peer == 0:
                added = added + (values[k] * scale,)
            else:
                added = added + (tl.fma(values[k], scale, lanes[k]),)
        lanes = added
    return lanes
