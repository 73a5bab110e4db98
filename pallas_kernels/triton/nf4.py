"""The Triton kernel that decodes nf4, bit for bit as its specification, ``pallas_kernels.nf4_reference``.

The levels are in the registers of a warp. Each thread holds one, and one shuffle per element fetches the
level of the element's code. Selects among 16 levels would take 15 instructions. A table in memory would need
loads from different addresses per thread. Weights are encoded once, and XLA does it.
"""

import triton
import triton.language as tl

from pallas_kernels import nf4_reference
from pallas_kernels.triton.lanes import load_codes, store_lanes

NAN_SCALE = tl.constexpr(nf4_reference.NAN_SCALE)


@triton.jit
def load_levels(ptr, T: tl.constexpr):
    """uint32[T]: for each thread t, the bits of level t % 16. A warp then holds the levels twice."""
    return tl.load(ptr + tl.arange(0, T) % 16).to(tl.uint32, bitcast=True)


@triton.jit
def look_up(table, index):
    """uint32[T]: the entries of a loaded table at the lowest five bits of ``index``, uint32[T]."""
    # Not pure, because all threads of the warp must take part in a shuffle, wherever it is moved.
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;",
        "=r,r,r",
        [table, index],
        tl.uint32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_scales(
    payload_ptr,
    row,
    block,
    live,
    W: tl.constexpr,
    PITCH: tl.constexpr,
    SCALES: tl.constexpr,
    UNITS: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """fp32[T]: the scale of each thread's block."""
    start = payload_ptr + row.to(tl.int64) * PITCH
    index = block + tl.arange(0, live.shape[0]) // W
    codes = start + SCALES + index
    units = (start + UNITS).to(tl.pointer_type(tl.float32), bitcast=True) + index // GROUP
    if MASKED:
        code = tl.load(codes, mask=live, other=0)
        unit = tl.load(units, mask=live, other=0.0)
    else:
        code = tl.load(codes)
        unit = tl.load(units)
    root = code.to(tl.float32)
    return tl.where(code == NAN_SCALE, float("nan"), root * root * root * unit)


@triton.jit
def decode_kernel(
    payload_ptr,
    levels_ptr,
    out_ptr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    UNROLL: tl.constexpr,
    PITCH: tl.constexpr,
    SCALES: tl.constexpr,
    UNITS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Decode rows of N elements. A row's scales start at its byte SCALES, and its units at byte UNITS.

    A program handles UNROLL tiles, and loads all of them before it stores the first.
    """
    W: tl.constexpr = BLOCK // K
    R: tl.constexpr = T // W
    NB: tl.constexpr = N // BLOCK
    MASKED: tl.constexpr = NB % (R * UNROLL) != 0
    row = tl.program_id(1)
    codes = payload_ptr + row.to(tl.int64) * PITCH
    out = out_ptr + row.to(tl.int64) * N
    levels = load_levels(levels_ptr, T)
    tiles = ()
    for i in tl.static_range(0, UNROLL):
        block = (tl.program_id(0) * UNROLL + i) * R
        live = block + tl.arange(0, T) // W < NB
        words = load_codes(codes, block * W, live, K // 2, True, MASKED)
        scale = load_scales(payload_ptr, row, block, live, W, PITCH, SCALES, UNITS, GROUP, MASKED)
        tiles = tiles + ((block, live, words, scale),)
    for i in tl.static_range(0, UNROLL):
        block, live, words, scale = tiles[i]
        lanes = ()
        for k in tl.static_range(0, K):
            # The fifth bit belongs to the next code. It has no effect, because a warp holds the table twice.
            level = look_up(levels, words[k // 8] >> (k % 8 * 4))
            lanes = lanes + (level.to(tl.float32, bitcast=True) * scale,)
        store_lanes(out, block * W, lanes, live, MASKED)
