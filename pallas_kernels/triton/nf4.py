"""The Triton kernels of nf4, which equal their specification, ``pallas_kernels.nf4_reference``, bit for bit.

Tables are in the registers of a warp. Each thread holds one entry, and one shuffle per element fetches the
entry at the element's index. Selects among 16 levels would take 15 instructions. Tables in memory would need
loads from different addresses per thread.
"""

import triton
import triton.language as tl

from pallas_kernels import nf4_reference
from pallas_kernels.triton.lanes import load_codes, load_lanes, store_codes, store_lanes

NAN_SCALE = tl.constexpr(nf4_reference.NAN_SCALE)
ZERO_CODES = tl.constexpr(nf4_reference.ZERO_CODE * 0x11111111)
LAST_BUCKET = tl.constexpr(float(nf4_reference.BUCKETS - 1))
MAGIC = tl.constexpr(2.0**23)
"""The mantissa of a small number plus this constant ends in the integer nearest to the number."""


@triton.jit
def load_table(ptr, COUNT: tl.constexpr, T: tl.constexpr):
    """uint32[T]: for each thread t, entry t % COUNT of a table of 32-bit numbers. COUNT divides 32."""
    return tl.load(ptr + tl.arange(0, T) % COUNT).to(tl.uint32, bitcast=True)


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
    levels = load_table(levels_ptr, 16, T)
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


@triton.jit
def encode_kernel(
    x_ptr,
    tail_ptr,
    midpoints_ptr,
    codes_ptr,
    out_ptr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    PITCH: tl.constexpr,
    SCALES: tl.constexpr,
    UNITS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Encode rows of N elements, given their payloads' tails: the scales and the units.

    midpoints_ptr and codes_ptr are ``nf4_reference.buckets``.
    """
    W: tl.constexpr = BLOCK // K
    R: tl.constexpr = T // W
    NB: tl.constexpr = N // BLOCK
    TILES: tl.constexpr = (NB + R - 1) // R
    MASKED: tl.constexpr = NB % R != 0
    TAIL: tl.constexpr = PITCH - SCALES
    row = tl.program_id(1)
    tile = tl.program_id(0)
    block = tile * R
    t = tl.arange(0, T)
    live = block + t // W < NB
    start = out_ptr + row.to(tl.int64) * PITCH
    midpoints = load_table(midpoints_ptr, 32, T)
    first_codes = load_table(codes_ptr, 32, T)
    lanes = load_lanes(x_ptr + row.to(tl.int64) * N, block * W, live, K, MASKED)
    scale = load_scales(tail_ptr, row, block, live, W, TAIL, 0, UNITS - SCALES, GROUP, MASKED)
    # An error of a few ulps does not matter, because no midpoint is at the edge of a bucket.
    half = 0.5 / scale
    words = ()
    for i in tl.static_range(0, K // 8):
        word = tl.zeros([T], tl.uint32)
        for j in tl.static_range(0, 8):
            x = lanes[8 * i + j]
            place = tl.inline_asm_elementwise(
                "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, half, 0.5], tl.float32, True, 1
            )
            bucket = tl.fma(place, tl.full([T], LAST_BUCKET, tl.float32), tl.full([T], MAGIC, tl.float32))
            bucket = bucket.to(tl.uint32, bitcast=True)
            above = x > look_up(midpoints, bucket).to(tl.float32, bitcast=True) * scale
            word += (look_up(first_codes, bucket) + above.to(tl.uint32)) << (4 * j)
        words = words + (tl.where(scale != scale, ZERO_CODES, word),)
    store_codes(start, block * W, words, live, K // 2, True, MASKED)
    # The programs of a row share the copying of its tail. None copies more bytes than it has threads.
    SHARE: tl.constexpr = (TAIL + TILES - 1) // TILES
    at = tile * SHARE + t
    shared = (t < SHARE) & (at < TAIL)
    tail = tl.load(tail_ptr + row.to(tl.int64) * TAIL + at, mask=shared, other=0)
    tl.store(start + SCALES + at, tail, mask=shared)
