"""The Triton kernel of ``pallas_kernels.cast_transpose`` and ``grouped_columns``.

It equals their specifications bit for bit. A program transposes a tile. It loads every fourth row at a time,
so that each thread holds the codes of four rows. They are one word of the transpose, and threads exchange
words instead of bytes.
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
def _load_rows(x_ptr, index_ptr, row, stop, n, N: tl.constexpr, INDEXED: tl.constexpr):
    own = row < stop
    if INDEXED:
        row = tl.load(index_ptr + row, mask=own, other=0)
    place = row.to(tl.int64)[:, None] * N + n[None, :]
    return tl.load(x_ptr + place, mask=own[:, None] & (n < N)[None, :], other=0)


@triton.jit
def columns_kernel(
    x_ptr,
    scale_ptr,
    index_ptr,
    starts_ptr,
    stops_ptr,
    rows_ptr,
    columns_ptr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    CAST: tl.constexpr,
    INDEXED: tl.constexpr,
):
    """Write uint8[N, COLUMNS]: blocks of TILE_M rows, transposed, with zeros for rows from a block's stop on.

    The rows are codes, uint8, or numbers to CAST ("e4m3", "e5m2"), whose codes are also written in rows.
    INDEXED rows are at an index of x. COLUMNS is a multiple of four.
    """
    across: tl.constexpr = (N + TILE_N - 1) // TILE_N
    block = tl.program_id(0) // across
    n = tl.program_id(0) % across * TILE_N + tl.arange(0, TILE_N)
    fours = tl.arange(0, TILE_M // 4)
    first, stop = tl.load(starts_ptr + block) + 4 * fours, tl.load(stops_ptr + block)
    # All loads come first, to be in flight together.
    x0 = _load_rows(x_ptr, index_ptr, first, stop, n, N, INDEXED)
    x1 = _load_rows(x_ptr, index_ptr, first + 1, stop, n, N, INDEXED)
    x2 = _load_rows(x_ptr, index_ptr, first + 2, stop, n, N, INDEXED)
    x3 = _load_rows(x_ptr, index_ptr, first + 3, stop, n, N, INDEXED)
    if CAST == "":
        words = x0.to(tl.uint32) | x1.to(tl.uint32) << 8 | x2.to(tl.uint32) << 16 | x3.to(tl.uint32) << 24
    else:
        scale = tl.load(scale_ptr)
        if CAST == "e5m2":
            low = e5m2_pair(x0.to(tl.float32) * scale, x1.to(tl.float32) * scale)
            high = e5m2_pair(x2.to(tl.float32) * scale, x3.to(tl.float32) * scale)
        else:
            low = e4m3_pair(x0.to(tl.float32) * scale, x1.to(tl.float32) * scale)
            high = e4m3_pair(x2.to(tl.float32) * scale, x3.to(tl.float32) * scale)
        words = low.to(tl.uint32) | high.to(tl.uint32) << 16
        for i in tl.static_range(4):
            row = first + i
            live = (row < stop)[:, None] & (n < N)[None, :]
            place = row.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(rows_ptr + place, (words >> 8 * i).to(tl.uint8), mask=live)
    out = columns_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    four = block * (TILE_M // 4) + fours
    place = n.to(tl.int64)[:, None] * (COLUMNS // 4) + four[None, :]
    tl.store(out + place, tl.trans(words), mask=(n < N)[:, None] & (four < COLUMNS // 4)[None, :])
