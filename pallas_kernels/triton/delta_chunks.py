"""Triton kernels of ``pallas_kernels.delta_chunks``.

A program of the scan carries some columns of one head's state through all chunks, in registers. Columns do
not depend on each other, so that a row with few heads still fills the chip.
"""

import triton
import triton.language as tl


@triton.jit
def inverse_kernel(system_ptr, out_ptr, SIZE: tl.constexpr):
    """The inverse of I plus a matrix's strictly lower triangle, of 16, 32 or 64 rows.

    Blocks of 16 on the diagonal are inverted together, row by row: a row is a row of the identity less a
    combination of the rows above it. Two inverses A and B on the diagonal, with C below A, become one inverse
    with -B C A below A. Products of powers of the matrix would lose all precision if many keys are alike.
    """
    BLOCKS: tl.constexpr = SIZE // 16
    at = tl.program_id(0).to(tl.int64) * (SIZE * SIZE)
    matrix = system_ptr + at
    out = out_ptr + at
    block = tl.arange(0, BLOCKS) * (16 * SIZE + 16)
    i = tl.arange(0, 16)
    inverse = tl.zeros((BLOCKS, 16, 16), tl.float32) + (i[:, None] == i[None, :]).to(tl.float32)[None, :, :]
    for row in range(1, 16):
        place = block[:, None] + row * SIZE + i[None, :]
        factors = tl.load(matrix + place, mask=(i < row)[None, :], other=0.0)
        less = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where((i == row)[None, :, None], inverse - less[:, None, :], inverse)
    tl.store(out + block[:, None, None] + i[None, :, None] * SIZE + i[None, None, :], inverse)
    for pair in tl.static_range(BLOCKS // 2):
        _join(matrix, out, 32 * pair, 16, SIZE)
    if BLOCKS == 4:
        _join(matrix, out, 0, 32, SIZE)


@triton.jit
def _join(matrix, out, begin, HALF: tl.constexpr, SIZE: tl.constexpr):
    """Complete the inverse of 2 HALF rows from ``begin`` on, whose halves on the diagonal are inverted."""
    tl.debug_barrier()  # other threads have written the halves
    i = tl.arange(0, HALF)
    upper = (begin + i[:, None]) * SIZE + begin + i[None, :]
    lower = upper + HALF * SIZE
    product = tl.dot(tl.load(matrix + lower), tl.load(out + upper), input_precision="ieee")
    product = tl.dot(tl.load(out + lower + HALF), product, input_precision="ieee")
    tl.store(out + lower, -product)
    tl.store(out + upper + HALF, tl.zeros((HALF, HALF), tl.float32))


@triton.jit
def scan_kernel(
    query_ptr,
    scores_ptr,
    written_ptr,
    removed_ptr,
    key_ptr,
    decay_ptr,
    state_ptr,
    chunks,
    heads,
    out_ptr,
    before_ptr,
    last_ptr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """See ``pallas_kernels.delta_chunks.scan_chunks``; also writes the state before each chunk."""
    head = tl.program_id(1)
    v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.arange(0, TOKENS)
    d = tl.arange(0, DIM)
    of_state = d[:, None] * VALUE_DIM + v[None, :]
    of_keys = t[:, None] * DIM + d[None, :]
    of_values = t[:, None] * VALUE_DIM + v[None, :]
    of_scores = t[:, None] * TOKENS + t[None, :]
    low = query_ptr.dtype.element_ty
    state = tl.load(state_ptr + head.to(tl.int64) * (DIM * VALUE_DIM) + of_state)
    for chunk in range(chunks):
        at = (chunk * heads + head).to(tl.int64)
        before = state.to(low)
        tl.store(before_ptr + at * (DIM * VALUE_DIM) + of_state, before)
        removed = tl.load(removed_ptr + at * (TOKENS * DIM) + of_keys)
        query = tl.load(query_ptr + at * (TOKENS * DIM) + of_keys)
        key = tl.load(key_ptr + at * (TOKENS * DIM) + of_keys)
        scores = tl.load(scores_ptr + at * (TOKENS * TOKENS) + of_scores)
        written = tl.load(written_ptr + at * (TOKENS * VALUE_DIM) + of_values)
        wrote = (written - tl.dot(removed, before, input_precision="ieee")).to(low)
        out = tl.dot(query, before, input_precision="ieee")
        out = tl.dot(scores, wrote, out, input_precision="ieee")
        tl.store(out_ptr + at * (TOKENS * VALUE_DIM) + of_values, out.to(low))
        state = state * tl.load(decay_ptr + at)
        state = tl.dot(tl.trans(key), wrote, state, input_precision="ieee")
    tl.store(last_ptr + head.to(tl.int64) * (DIM * VALUE_DIM) + of_state, state)


@triton.jit
def backward_kernel(
    query_ptr,
    scores_ptr,
    removed_ptr,
    key_ptr,
    decay_ptr,
    of_out_ptr,
    of_last_ptr,
    chunks,
    heads,
    of_written_ptr,
    of_after_ptr,
    of_first_ptr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The cotangents of ``written``, of the state after each chunk, and of the first state."""
    head = tl.program_id(1)
    v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.arange(0, TOKENS)
    d = tl.arange(0, DIM)
    of_state = d[:, None] * VALUE_DIM + v[None, :]
    of_keys = t[:, None] * DIM + d[None, :]
    of_values = t[:, None] * VALUE_DIM + v[None, :]
    of_scores = t[:, None] * TOKENS + t[None, :]
    low = query_ptr.dtype.element_ty
    carried = tl.load(of_last_ptr + head.to(tl.int64) * (DIM * VALUE_DIM) + of_state)
    for turn in range(chunks):
        at = ((chunks - 1 - turn) * heads + head).to(tl.int64)
        after = carried.to(low)
        tl.store(of_after_ptr + at * (DIM * VALUE_DIM) + of_state, after)
        key = tl.load(key_ptr + at * (TOKENS * DIM) + of_keys)
        scores = tl.load(scores_ptr + at * (TOKENS * TOKENS) + of_scores)
        of_out = tl.load(of_out_ptr + at * (TOKENS * VALUE_DIM) + of_values)
        query = tl.load(query_ptr + at * (TOKENS * DIM) + of_keys)
        removed = tl.load(removed_ptr + at * (TOKENS * DIM) + of_keys)
        of_written = tl.dot(key, after, input_precision="ieee")
        of_written = tl.dot(tl.trans(scores), of_out, of_written, input_precision="ieee")
        tl.store(of_written_ptr + at * (TOKENS * VALUE_DIM) + of_values, of_written)
        carried = carried * tl.load(decay_ptr + at)
        carried = tl.dot(tl.trans(query), of_out, carried, input_precision="ieee")
        carried -= tl.dot(tl.trans(removed), of_written.to(low), input_precision="ieee")
    tl.store(of_first_ptr + head.to(tl.int64) * (DIM * VALUE_DIM) + of_state, carried)
