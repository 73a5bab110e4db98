"""The Triton kernels, which equal their specification, ``pallas_kernels.reference``, bit for bit.

They are memory-bound only if there are few instructions between a load and a store. ``lanes``, ``quantize``
and ``dequantize`` explain how. A program of T threads handles T * K / BLOCK blocks of one row. W = BLOCK / K
threads share a block, and only exchange its maximum.

The length of rows is an argument, so that a program compiles a kernel once for all its lengths. A row has
``units * ALIGN`` blocks. The compiler infers the alignment of pointers from the constant ALIGN. A block of a
payload takes BYTES bytes, including two bytes for its scale.

The kernels are compiled without fused multiply-add contraction. Every fused multiply-add is explicit.
"""

import triton
import triton.language as tl

from pallas_kernels.triton.add import add_floats, add_integers, load_peer_codes, load_peer_scales
from pallas_kernels.triton.dequantize import load_row_codes, load_scales, values_of
from pallas_kernels.triton.lanes import load_lanes, store_codes, store_lanes
from pallas_kernels.triton.quantize import (
    block_scales,
    fp6_words,
    fp8_words,
    integer_words,
    random_words,
    rotate,
)


@triton.jit
def store_encoded(
    lanes,
    unit,
    out_ptr,
    keys_ptr,
    row,
    block,
    live,
    octet,
    blocks,
    W: tl.constexpr,
    BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    FMT: tl.constexpr,
    QMAX: tl.constexpr,
    ROTATE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encode lanes as the blocks of a payload row from ``block`` on.

    A row has ``blocks`` blocks. Their number is even if ALIGNED. The numbers are lanes * unit if unit is not
    None. octet[T] is the index of each thread's first eight elements, for the random bits.
    """
    K: tl.constexpr = len(lanes)
    T: tl.constexpr = live.shape[0]
    scale, inverse = block_scales(lanes, unit, W, QMAX, STOCHASTIC, ROTATE)
    start = out_ptr + row.to(tl.int64) * blocks * BYTES
    first = block * W
    random = lanes
    if STOCHASTIC:
        random = random_words(keys_ptr, octet, K // 8)
    if FMT == "fp6":
        low, high = fp6_words(lanes, inverse, random, STOCHASTIC)
        store_codes(start, first, low, live, K // 2, ALIGNED, MASKED)
        store_codes(start + blocks * ((BYTES - 2) // 3 * 2), first, high, live, K // 4, ALIGNED, MASKED)
    elif FMT == "fp8":
        words = fp8_words(lanes, inverse, random, STOCHASTIC)
        store_codes(start, first, words, live, K, ALIGNED, MASKED)
    else:
        BITS: tl.constexpr = 2 if FMT == "int2" else (4 if FMT == "int4" else 8)
        words = integer_words(lanes, inverse, random, BITS, STOCHASTIC, unit is not None)
        store_codes(start, first, words, live, K * BITS // 8, ALIGNED, MASKED)
    t = tl.arange(0, T)
    scales = (start + blocks * (BYTES - 2)).to(tl.pointer_type(tl.uint16), bitcast=True) + block
    tl.store(scales + t // W, scale, mask=live & (t % W == 0))


@triton.jit
def encode_kernel(
    x_ptr,
    base_ptr,
    keys_ptr,
    units,
    out_ptr,
    ALIGN: tl.constexpr,
    MASKED: tl.constexpr,
    NODES: tl.constexpr,
    CHUNKS: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    FMT: tl.constexpr,
    QMAX: tl.constexpr,
    BYTES: tl.constexpr,
    DELTA: tl.constexpr,
    ROTATE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Encode rows of blocks. Row (local, node, chunk) becomes piece ``node`` of row (chunk, local).

    base_ptr is only read if DELTA, and keys_ptr (reference.hash_keys) only if STOCHASTIC. K is 32 if ROTATE.
    """
    W: tl.constexpr = BLOCK // K
    R: tl.constexpr = T // W
    blocks = units * ALIGN
    source = tl.program_id(1)
    block = tl.program_id(0) * R
    t = tl.arange(0, T)
    live = block + t // W < blocks
    start = source.to(tl.int64) * blocks * BLOCK
    lanes = load_lanes(x_ptr + start, block * W, live, K, MASKED)
    if DELTA:
        base = load_lanes(base_ptr + start, block * W, live, K, MASKED)
        delta = ()
        for k in tl.static_range(0, K):
            delta = delta + (lanes[k] - base[k],)
        lanes = delta
    if ROTATE:
        lanes = rotate(lanes)
    octet = source.to(tl.uint32) * blocks * (BLOCK // 8) + (block * W + t).to(tl.uint32) * (K // 8)
    chunk = source % CHUNKS
    node = source // CHUNKS % NODES
    row = chunk * LOCAL + source // (CHUNKS * NODES)
    store_encoded(
        lanes,
        None,
        out_ptr,
        keys_ptr,
        row,
        node * blocks + block,
        live,
        octet,
        NODES * blocks,
        W,
        BYTES,
        ALIGN * NODES % 2 == 0,
        FMT,
        QMAX,
        ROTATE,
        STOCHASTIC,
        MASKED,
    )


@triton.jit
def decode_kernel(
    payload_ptr,
    base_ptr,
    units,
    out_ptr,
    ALIGN: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    UNROLL: tl.constexpr,
    FMT: tl.constexpr,
    BYTES: tl.constexpr,
    ADD: tl.constexpr,
):
    """Decode rows of blocks. If ADD, add them to base_ptr's rows, and flush subnormal sums to zero.

    A program handles UNROLL tiles, and loads all of them before it stores the first.
    """
    W: tl.constexpr = BLOCK // K
    R: tl.constexpr = T // W
    ALIGNED: tl.constexpr = ALIGN % 2 == 0
    blocks = units * ALIGN
    row = tl.program_id(1)
    start = row.to(tl.int64) * blocks * BLOCK
    tiles = ()
    for i in tl.static_range(0, UNROLL):
        block = (tl.program_id(0) * UNROLL + i) * R
        live = block + tl.arange(0, T) // W < blocks
        scale = load_scales(payload_ptr, row, block, live, blocks, W, BYTES, MASKED)
        words, high = load_row_codes(
            payload_ptr, row, block * W, live, blocks, K, BYTES, ALIGNED, FMT, MASKED
        )
        base = (scale,)
        if ADD:
            base = load_lanes(base_ptr + start, block * W, live, K, MASKED)
        tiles = tiles + ((block, live, scale, words, high, base),)
    for i in tl.static_range(0, UNROLL):
        block, live, scale, words, high, base = tiles[i]
        values = values_of(words, high, K, FMT)
        lanes = ()
        for k in tl.static_range(0, K):
            if ADD:
                value = tl.fma(values[k], scale, base[k])
                lanes = lanes + (tl.where(tl.abs(value) < 2.0**-126, 0.0, value),)
            else:
                lanes = lanes + (values[k] * scale,)
        store_lanes(out_ptr + start, block * W, lanes, live, MASKED)


@triton.jit
def sum_kernel(
    payload_ptr,
    keys_ptr,
    units,
    out_ptr,
    ALIGN: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    UNROLL: tl.constexpr,
    FMT: tl.constexpr,
    BYTES: tl.constexpr,
    OUT_FMT: tl.constexpr,
    OUT_QMAX: tl.constexpr,
    OUT_BYTES: tl.constexpr,
    ROTATE: tl.constexpr,
    FACTOR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Sum PEERS payload rows, and encode the sum as ROWS rows of blocks, or store it ("sum").

    The stored sum is rotated if ROTATE (K is 32), and multiplied by FACTOR. A program handles UNROLL tiles,
    one after the other. While it sums one tile, it copies the codes of the next two into shared memory. It
    loads the scales of the next tile into registers, because they are too small for such copies.
    """
    W: tl.constexpr = BLOCK // K
    R: tl.constexpr = T // W
    ALIGNED: tl.constexpr = ROWS * ALIGN % 2 == 0
    blocks = units * ALIGN
    row = tl.program_id(1)
    first = tl.program_id(0) * (R * UNROLL)
    t = tl.arange(0, T)
    live = first + t // W < blocks
    every = ROWS * blocks
    scales = load_peer_scales(payload_ptr, row * blocks + first, live, every, PEERS, W, BYTES, MASKED)
    for i in tl.range(0, UNROLL, num_stages=3):
        block = first + i * R
        live = block + t // W < blocks
        source = row * blocks + block
        next_scales = scales
        if UNROLL > 1:
            more = (block + R + t // W < blocks) & (i + 1 < UNROLL)
            next_scales = load_peer_scales(payload_ptr, source + R, more, every, PEERS, W, BYTES, True)
        codes = load_peer_codes(payload_ptr, source, live, every, PEERS, K, W, BYTES, ALIGNED, FMT, MASKED)
        unit = None
        if FMT == "fp8" or FMT == "fp6":
            total = add_floats(codes, scales, K, FMT)
        else:
            total, unit = add_integers(codes, scales, K, FMT)
        if OUT_FMT == "sum":
            if ROTATE:
                total = rotate(total)
            factor = FACTOR if unit is None else unit * FACTOR
            lanes = ()
            for k in tl.static_range(0, K):
                lanes = lanes + (total[k] * factor,)
            store_lanes(out_ptr + row.to(tl.int64) * blocks * BLOCK, block * W, lanes, live, MASKED)
        else:
            store_encoded(
                total,
                unit,
                out_ptr,
                keys_ptr,
                row,
                block,
                live,
                (source * W + t).to(tl.uint32) * (K // 8),
                blocks,
                W,
                OUT_BYTES,
                ALIGN % 2 == 0,
                OUT_FMT,
                OUT_QMAX,
                False,
                STOCHASTIC,
                MASKED,
            )
        scales = next_scales
