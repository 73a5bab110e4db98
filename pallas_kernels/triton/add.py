"""Sums over peers: ``reference.decode_sum`` in Triton."""

import triton
import triton.language as tl

from pallas_kernels.triton.dequantize import load_row_codes, load_scales, values_of


@triton.jit
def load_peer_codes(
    ptr,
    block,
    live,
    blocks,
    PEERS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    FMT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The result of load_row_codes for each of PEERS rows."""
    rows = ()
    for peer in tl.static_range(0, PEERS):
        row = block * 0 + peer
        rows = rows + (load_row_codes(ptr, row, block * W, live, blocks, K, BYTES, ALIGNED, FMT, MASKED),)
    return rows


@triton.jit
def load_peer_scales(
    ptr,
    block,
    live,
    blocks,
    PEERS: tl.constexpr,
    W: tl.constexpr,
    BYTES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The scales of PEERS rows, fp32[T] each."""
    scales = ()
    for peer in tl.static_range(0, PEERS):
        scales = scales + (load_scales(ptr, block * 0 + peer, block, live, blocks, W, BYTES, MASKED),)
    return scales


@triton.jit
def add_integers(rows, scales, K: tl.constexpr, FMT: tl.constexpr):
    """The sum of peers' integer codes: lanes, and their unit, a power of two.

    One instruction turns a code in its place into a float. Masked, with its sign bit flipped, the code is the
    float (q + HALF) * 2**(place - 149), usually a subnormal. Scales are raised to the top binade to
    compensate. The bias HALF is subtracted once, after the sum.
    """
    BITS: tl.constexpr = 2 if FMT == "int2" else (4 if FMT == "int4" else 8)
    HALF: tl.constexpr = 1 << (BITS - 1)
    MASK: tl.constexpr = (1 << BITS) - 1
    ZERO: tl.constexpr = 24 - BITS
    PEERS: tl.constexpr = len(rows)
    bits = ()
    for peer in tl.static_range(0, PEERS):
        bits = bits + (scales[peer].to(tl.int32, bitcast=True),)
    top = bits[0]
    for peer in tl.static_range(1, PEERS):
        top = tl.maximum(top, bits[peer])
    exponent = tl.minimum(top & 0x7F800000, 253 << 23)
    raised = (253 << 23) - exponent
    least = tl.maximum(top - (100 << 23), 0)
    lanes = ()
    bias = scales[0]
    for peer in tl.static_range(0, PEERS):
        # Scales below 2**-100 of the largest have no effect on the rounded sum, but could wrap around.
        scale = tl.where(bits[peer] > least, bits[peer] + raised, 0).to(tl.float32, bitcast=True)
        added = ()
        for k in tl.static_range(0, K):
            word = rows[peer][0][k * BITS // 32]
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
        weight = tl.full(bias.shape, HALF * (1 << (ZERO - place)) * 1.0, tl.float32)
        total = total + (tl.fma(lanes[k], weight, bias),)
    return total, exponent.to(tl.float32, bitcast=True)


@triton.jit
def add_floats(rows, scales, K: tl.constexpr, FMT: tl.constexpr):
    """The sum of peers' small floats, as lanes."""
    lanes = ()
    for peer in tl.static_range(0, len(rows)):
        values = values_of(rows[peer][0], rows[peer][1], K, FMT)
        added = ()
        for k in tl.static_range(0, K):
            if peer == 0:
                added = added + (values[k] * scales[peer],)
            else:
                added = added + (tl.fma(values[k], scales[peer], lanes[k]),)
        lanes = added
    return lanes
