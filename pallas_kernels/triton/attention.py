"""The Triton kernel of ``pallas_kernels.attend_cache``.

One program reads the columns of one row and key head, or a part of them, for all query heads that share it.
Tensor cores need at least sixteen queries, so rows of zeros are added. That costs no time, because reading
the cache takes longer.
"""

import triton
import triton.language as tl

MIN_SCORE = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def attend_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    layer_ptr,
    start_ptr,
    stop_ptr,
    out_ptr,
    weight_ptr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    LENGTH: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Write a part's output, and the logarithm of its sum of exponentials, the part's weight.

    HEADS is the number of key heads, and GROUP the number of queries of each. COLUMNS are read at a time.
    SOFTCAP is 0 for none.
    """
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    split = tl.program_id(1)
    start = tl.load(start_ptr + row)
    stop = tl.load(stop_ptr + row)
    if SPLITS > 1:
        each = tl.cdiv(stop - start, SPLITS)
        start += split * each
        stop = tl.minimum(stop, start + each)
    d = tl.arange(0, DIM_PADDED)
    g = tl.arange(0, GROUP_PADDED)
    queries = (row * HEADS + head) * GROUP + g
    there = (g < GROUP)[:, None] & (d < DIM)[None, :]
    query = tl.load(query_ptr + queries[:, None] * DIM + d[None, :], mask=there, other=0.0)
    layer = tl.load(layer_ptr).to(tl.int64)
    first = ((layer * ROWS + row) * HEADS + head) * LENGTH
    most = tl.full((GROUP_PADDED,), MIN_SCORE, tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    out = tl.zeros((GROUP_PADDED, DIM_PADDED), tl.float32)
    for begin in range(start, stop, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        seen = column < stop
        place = (first + column)[:, None] * DIM + d[None, :]
        mask = seen[:, None] & (d < DIM)[None, :]
        key = tl.load(keys_ptr + place, mask=mask, other=0.0)
        scores = SCALE * tl.dot(query, tl.trans(key))
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1) is correct even if exp overflows
            scores = SOFTCAP * (1 - 2 / (tl.exp(scores * (2 / SOFTCAP)) + 1))
        scores = tl.where(seen[None, :], scores, MIN_SCORE)
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(most - higher)
        value = tl.load(values_ptr + place, mask=mask, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        most = higher
    queries += split * ROWS * HEADS * GROUP
    out = tl.where(total[:, None] > 0, out / total[:, None], 0.0)
    tl.store(out_ptr + queries[:, None] * DIM + d[None, :], out.to(out_ptr.dtype.element_ty), mask=there)
    weight = tl.where(total > 0, most + tl.log(total), MIN_SCORE)
    tl.store(weight_ptr + queries, weight, mask=g < GROUP)
