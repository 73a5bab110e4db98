"""The Triton kernel of ``pallas_kernels.cast_transpose``, which equals its specification bit for bit.

A program casts a tile. It loads every fourth row at a time, so that each thread holds the codes of four rows.
They are one word of the transpose, and threads exchange words instead of bytes.
"""

import triton
import triton.language as tl

from pallas_kernels.triton.quantize import e4m3_pair


@triton.jit
def e5m2_pair(a, b):
    """The e5m2 bytes of two fp32 tensors, a's low, in a uint16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;", "=h,f,f", [a, b], tl.uint16, True, 1
    )


@triton.jit
def cast_transpose_kernel(
    x_ptr,
    scale_ptr,
    rows_ptr,
    transpose_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    E5M2: tl.constexpr,
):
    """Write uint8[M, N] and uint8[N, M]. M is a multiple of four."""
    across: tl.constexpr = (N + TILE_N - 1) // TILE_N
    fours = tl.program_id(0) // across * (TILE_M // 4) + tl.arange(0, TILE_M // 4)
    n = tl.program_id(0) % across * TILE_N + tl.arange(0, TILE_N)
    live = (fours < M // 4)[:, None] & (n < N)[None, :]
    place = fours[:, None] * (4 * N) + n[None, :]
    scale = tl.load(scale_ptr)
    # All loads come first, to be in flight together.
    x0 = tl.load(x_ptr + place, mask=live, other=0.0)
    x1 = tl.load(x_ptr + place + N, mask=live, other=0.0)
    x2 = tl.load(x_ptr + place + 2 * N, mask=live, other=0.0)
    x3 = tl.load(x_ptr + place + 3 * N, mask=live, other=0.0)
    if E5M2:
        low = e5m2_pair(x0.to(tl.float32) * scale, x1.to(tl.float32) * scale)
        high = e5m2_pair(x2.to(tl.float32) * scale, x3.to(tl.float32) * scale)
    else:
        low = e4m3_pair(x0.to(tl.float32) * scale, x1.to(tl.float32) * scale)
        high = e4m3_pair(x2.to(tl.float32) * scale, x3.to(tl.float32) * scale)
    words = low.to(tl.uint32) | high.to(tl.uint32) << 16
    for row in tl.static_range(4):
        tl.store(rows_ptr + place + row * N, (words >> 8 * row).to(tl.uint8), mask=live)
    out = transpose_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    place = n[:, None] * (M // 4) + fours[None, :]
    tl.store(out + place, tl.trans(words), mask=tl.trans(live))
