"""Triton kernels of ``pallas_kernels.delta_chunks``.

``prepare_kernel`` computes for every chunk at once what needs no state. ``scan_kernel`` carries the state
from chunk to chunk, some columns of one head's state per program, in registers. Columns do not depend on each
other, so that a row with few heads still fills the chip. From the states ``read_kernel`` computes the outputs
of every chunk at once. ``backward_scan_kernel`` carries the state's cotangent back. The two kernels of
gradients then do every chunk at once; one alone would need more registers than there are.

Rows are ``[batch, time, heads, ...]``. Results of a chunk are ``[chunks, batch * heads, ...]``. With EXACT,
for fp32 rows, operands of products are sums of two TF32 numbers. Otherwise they are bf16, or sums of two.
Without DELTA, tokens remove nothing from the state (Mamba-2), and there is no system.
"""

import triton
import triton.language as tl


@triton.jit
def prepare_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    log_decay_ptr,
    beta_ptr,
    documents_ptr,
    chunks,
    scores_ptr,
    inverse_ptr,
    written_ptr,
    removed_ptr,
    reads_ptr,
    writes_ptr,
    decay_ptr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    EXACT: tl.constexpr,
    DELTA: tl.constexpr,
    KEEP: tl.constexpr,
):
    """A chunk's scores and factors (``_factors``), and ``written`` and ``removed``.

    The former is inverse beta value, the latter inverse beta reads key, where inverse is the inverse of the
    chunk's system. KEEP stores it, too.
    """
    token, head, at = _chunk(chunks, TOKENS, HEADS)
    t = tl.arange(0, TOKENS)
    key_head = head // (HEADS // KEY_HEADS)
    # First, so that the factors hide the time that these loads take.
    key = tl.load(_of_rows(key_ptr, token, key_head, KEY_HEADS, TOKENS, DIM))
    query = tl.load(_of_rows(query_ptr, token, key_head, KEY_HEADS, TOKENS, DIM))
    _, pairs, reads, writes, decay = _factors(log_decay_ptr, documents_ptr, token, head, TOKENS, HEADS)
    tl.store(reads_ptr + at * TOKENS + t, reads)
    tl.store(writes_ptr + at * TOKENS + t, writes)
    tl.store(decay_ptr + at, decay)
    scores = (pairs * _dot(query, tl.trans(key))).to(query.dtype)
    tl.store(_of_chunk(scores_ptr, at, TOKENS, TOKENS), scores)
    values = _of_rows(value_ptr, token, head, HEADS, TOKENS, VALUE_DIM)
    if DELTA:
        betas = beta_ptr + token * HEADS + head + t * HEADS
        inverse = _inverse(tl.load(betas)[:, None] * pairs * _dot(key, tl.trans(key)), TOKENS, EXACT)
        if KEEP:
            tl.store(_of_chunk(inverse_ptr, at, TOKENS, TOKENS), inverse)
        # Behind a barrier the compiler loads vectors again, so that they occupy no registers before. With at
        # most 168 registers, a multiprocessor of Hopper runs three programs.
        tl.debug_barrier()
        inverse *= tl.load(betas)[None, :]
        written = _times(inverse, tl.load(values), EXACT).to(key.dtype)
        tl.store(_of_chunk(written_ptr, at, TOKENS, VALUE_DIM), written)
        tl.debug_barrier()
        reads = tl.load(reads_ptr + at * TOKENS + t)
        removed = _times(inverse * reads[None, :], key, EXACT).to(key.dtype)
    else:
        tl.store(_of_chunk(written_ptr, at, TOKENS, VALUE_DIM), tl.load(values))
        removed = tl.zeros((TOKENS, DIM), key.dtype)
    tl.store(_of_chunk(removed_ptr, at, TOKENS, DIM), removed)


@triton.jit
def scan_kernel(
    key_ptr,
    written_ptr,
    removed_ptr,
    writes_ptr,
    decay_ptr,
    state_ptr,
    chunks,
    wrote_ptr,
    before_ptr,
    last_ptr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute each chunk's writes into the state, the state before each chunk, and the last state."""
    row = tl.program_id(1)
    head = row % HEADS
    first = (row // HEADS).to(tl.int64) * chunks * TOKENS
    rows = tl.num_programs(1)
    t = tl.arange(0, TOKENS)
    column = tl.program_id(0) * COLUMNS
    low = key_ptr.dtype.element_ty
    state = tl.load(_columns(state_ptr, row.to(tl.int64), column, VALUE_DIM, DIM, COLUMNS))
    for chunk in range(chunks):
        at = (chunk * rows + row).to(tl.int64)
        decay = tl.load(decay_ptr + at)  # first, so that products hide the time it takes
        before = state.to(low)
        tl.store(_columns(before_ptr, at, column, VALUE_DIM, DIM, COLUMNS), before)
        removed = tl.load(_of_chunk(removed_ptr, at, TOKENS, DIM))
        written = tl.load(_columns(written_ptr, at, column, VALUE_DIM, TOKENS, COLUMNS))
        writes = tl.load(writes_ptr + at * TOKENS + t)
        key_head = head // (HEADS // KEY_HEADS)
        key = tl.load(_of_rows(key_ptr, first + chunk * TOKENS, key_head, KEY_HEADS, TOKENS, DIM))
        wrote = written - _dot(removed, before)
        tl.store(_columns(wrote_ptr, at, column, VALUE_DIM, TOKENS, COLUMNS), wrote.to(low))
        state = state * decay + _dot(tl.trans(key), (wrote * writes[:, None]).to(low))
    tl.store(_columns(last_ptr, row.to(tl.int64), column, VALUE_DIM, DIM, COLUMNS), state)


@triton.jit
def read_kernel(
    query_ptr,
    scores_ptr,
    reads_ptr,
    wrote_ptr,
    before_ptr,
    chunks,
    out_ptr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """A chunk's outputs: reads (query before) + scores wrote."""
    token, head, at = _chunk(chunks, TOKENS, HEADS)
    query = tl.load(_of_rows(query_ptr, token, head // (HEADS // KEY_HEADS), KEY_HEADS, TOKENS, DIM))
    reads = tl.load(reads_ptr + at * TOKENS + tl.arange(0, TOKENS))
    out = _dot(query, tl.load(_of_chunk(before_ptr, at, DIM, VALUE_DIM))) * reads[:, None]
    scores = tl.load(_of_chunk(scores_ptr, at, TOKENS, TOKENS))
    out += _dot(scores, tl.load(_of_chunk(wrote_ptr, at, TOKENS, VALUE_DIM)))
    tl.store(_of_rows(out_ptr, token, head, HEADS, TOKENS, VALUE_DIM), out.to(query.dtype))


@triton.jit
def backward_scan_kernel(
    query_ptr,
    key_ptr,
    scores_ptr,
    removed_ptr,
    reads_ptr,
    writes_ptr,
    decay_ptr,
    of_out_ptr,
    of_last_ptr,
    chunks,
    of_wrote_ptr,
    of_after_ptr,
    of_first_ptr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The cotangents of each chunk's writes, of the state after it, and of the first state."""
    row = tl.program_id(1)
    head = row % HEADS
    first = (row // HEADS).to(tl.int64) * chunks * TOKENS
    rows = tl.num_programs(1)
    t = tl.arange(0, TOKENS)
    column = tl.program_id(0) * COLUMNS
    low = query_ptr.dtype.element_ty
    carried = tl.load(_columns(of_last_ptr, row.to(tl.int64), column, VALUE_DIM, DIM, COLUMNS))
    for turn in range(chunks):
        chunk = chunks - 1 - turn
        at = (chunk * rows + row).to(tl.int64)
        token = first + chunk * TOKENS
        decay = tl.load(decay_ptr + at)  # first, so that products hide the time it takes
        after = carried.to(low)
        tl.store(_columns(of_after_ptr, at, column, VALUE_DIM, DIM, COLUMNS), after)
        key_head = head // (HEADS // KEY_HEADS)
        key = tl.load(_of_rows(key_ptr, token, key_head, KEY_HEADS, TOKENS, DIM))
        query = tl.load(_of_rows(query_ptr, token, key_head, KEY_HEADS, TOKENS, DIM))
        scores = tl.load(_of_chunk(scores_ptr, at, TOKENS, TOKENS))
        removed = tl.load(_of_chunk(removed_ptr, at, TOKENS, DIM))
        of_out = tl.load(
            _tile(of_out_ptr, (token * HEADS + head) * VALUE_DIM + column, HEADS * VALUE_DIM, TOKENS, COLUMNS)
        )
        reads = tl.load(reads_ptr + at * TOKENS + t)
        writes = tl.load(writes_ptr + at * TOKENS + t)
        of_wrote = _dot(key, after) * writes[:, None]
        of_wrote = (of_wrote + _dot(tl.trans(scores), of_out)).to(low)
        tl.store(
            _columns(of_wrote_ptr, at, column, VALUE_DIM, TOKENS, COLUMNS),
            of_wrote,
        )
        carried = carried * decay
        carried += _dot(tl.trans(query), (of_out * reads[:, None]).to(low))
        carried -= _dot(tl.trans(removed), of_wrote)
    tl.store(
        _columns(of_first_ptr, row.to(tl.int64), column, VALUE_DIM, DIM, COLUMNS),
        carried,
    )


@triton.jit
def read_gradient_kernel(
    query_ptr,
    key_ptr,
    log_decay_ptr,
    documents_ptr,
    written_ptr,
    removed_ptr,
    before_ptr,
    of_out_ptr,
    of_wrote_ptr,
    of_after_ptr,
    of_decay_ptr,
    chunks,
    of_query_ptr,
    of_key_ptr,
    of_removed_ptr,
    of_total_ptr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    EXACT: tl.constexpr,
    DELTA: tl.constexpr,
):
    """The gradients through what a chunk reads of the state, and through the state after it.

    X' is X transposed. The results for keys and for the sums of decays are a part of their gradients.
    """
    token, head, at = _chunk(chunks, TOKENS, HEADS)
    low = query_ptr.dtype.element_ty
    t = tl.arange(0, TOKENS)
    key_head = head // (HEADS // KEY_HEADS)

    # out = reads (query before) + scores wrote, where wrote = written - removed before
    before = tl.load(_of_chunk(before_ptr, at, DIM, VALUE_DIM))
    wrote = (
        tl.load(_of_chunk(written_ptr, at, TOKENS, VALUE_DIM))
        - _dot(tl.load(_of_chunk(removed_ptr, at, TOKENS, DIM)), before)
    ).to(low)
    # Before the factors, because a chunk's matrices do not fit into the registers together.
    of_removed = _dot(tl.load(_of_chunk(of_wrote_ptr, at, TOKENS, VALUE_DIM)), tl.trans(before))
    tl.store(_of_chunk(of_removed_ptr, at, TOKENS, DIM), (-of_removed).to(low))
    of_out = tl.load(_of_rows(of_out_ptr, token, head, HEADS, TOKENS, VALUE_DIM))
    query = tl.load(_of_rows(query_ptr, token, key_head, KEY_HEADS, TOKENS, DIM))
    key = tl.load(_of_rows(key_ptr, token, key_head, KEY_HEADS, TOKENS, DIM))
    _, pairs, reads, writes, decay = _factors(log_decay_ptr, documents_ptr, token, head, TOKENS, HEADS)
    of_scores = _dot(of_out, tl.trans(wrote)) * pairs
    of_pairs = of_scores * _dot(query, tl.trans(key))
    of_scores = of_scores.to(low)
    of_query = _dot(of_out, tl.trans(before)) * reads[:, None]
    of_total = tl.sum(of_pairs, 1) - tl.sum(of_pairs, 0) + tl.sum(of_query * query, 1)
    tl.store(
        _of_rows(of_query_ptr, token, head, HEADS, TOKENS, DIM),
        (of_query + _dot(of_scores, key)).to(low),
    )

    # after = decay before + (writes key)' wrote
    of_after = tl.load(_of_chunk(of_after_ptr, at, DIM, VALUE_DIM))
    of_key = _dot(wrote, tl.trans(of_after)) * writes[:, None]
    of_writes = tl.sum(of_key * key, 1)
    of_end = tl.sum(of_writes) + tl.load(of_decay_ptr + at) * decay
    tl.store(
        _of_rows(of_key_ptr, token, head, HEADS, TOKENS, DIM),
        (of_key + _dot(tl.trans(of_scores), query)).to(low),
    )
    # reads = exp(total), writes = exp(total of the last token - total), pairs = exp(total - total')
    tl.store(of_total_ptr + at * TOKENS + t, of_total - of_writes + tl.where(t == TOKENS - 1, of_end, 0.0))


@triton.jit
def write_gradient_kernel(
    key_ptr,
    value_ptr,
    log_decay_ptr,
    beta_ptr,
    documents_ptr,
    inverse_ptr,
    written_ptr,
    removed_ptr,
    of_wrote_ptr,
    of_removed_ptr,
    of_key_part_ptr,
    of_total_ptr,
    chunks,
    of_key_ptr,
    of_value_ptr,
    of_log_decay_ptr,
    of_beta_ptr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    EXACT: tl.constexpr,
    DELTA: tl.constexpr,
):
    """The gradients through (I + system) [written, removed] = beta [value, reads key].

    X' is X transposed. It adds to the parts of ``read_gradient_kernel``. Without DELTA, written is value.
    """
    token, head, at = _chunk(chunks, TOKENS, HEADS)
    low = key_ptr.dtype.element_ty
    t = tl.arange(0, TOKENS)
    of_heads = token * HEADS + head + t * HEADS
    of_value = tl.load(_of_chunk(of_wrote_ptr, at, TOKENS, VALUE_DIM))
    # Loads are late and stores early, because a chunk's matrices do not fit into the registers together.
    if DELTA:
        beta = tl.load(beta_ptr + of_heads)
        back = tl.trans(tl.load(_of_chunk(inverse_ptr, at, TOKENS, TOKENS)))
        of_wanted = _times(back, of_value, EXACT)
        written = tl.load(_of_chunk(written_ptr, at, TOKENS, VALUE_DIM))
        of_system = _dot(of_wanted.to(low), tl.trans(written))
        value = tl.load(_of_rows(value_ptr, token, head, HEADS, TOKENS, VALUE_DIM))
        of_beta = tl.sum(of_wanted * value, 1)
        of_value = (of_wanted * beta[:, None]).to(low)
        tl.store(_of_rows(of_value_ptr, token, head, HEADS, TOKENS, VALUE_DIM), of_value)
        of_wanted = _times(back, tl.load(_of_chunk(of_removed_ptr, at, TOKENS, DIM)), EXACT)
        of_system += _dot(of_wanted.to(low), tl.trans(tl.load(_of_chunk(removed_ptr, at, TOKENS, DIM))))
        key = tl.load(_of_rows(key_ptr, token, head // (HEADS // KEY_HEADS), KEY_HEADS, TOKENS, DIM))
        seen, pairs, reads, _, _ = _factors(log_decay_ptr, documents_ptr, token, head, TOKENS, HEADS)
        moved = reads * tl.sum(of_wanted * key, 1)
        of_wanted *= (beta * reads)[:, None]
        # system = beta pairs (key key'), below the diagonal
        of_system = tl.where(t[:, None] > t[None, :], -of_system, 0.0) * pairs
        of_pairs = of_system * _dot(key, tl.trans(key))
        tl.store(of_beta_ptr + of_heads, of_beta + moved + tl.sum(of_pairs, 1))
        of_pairs *= beta[:, None]
        of_system *= beta[:, None]
        of_wanted += tl.load(_of_rows(of_key_part_ptr, token, head, HEADS, TOKENS, DIM))
        of_key = (of_wanted + _dot((of_system + tl.trans(of_system)).to(low), key)).to(low)
        tl.store(_of_rows(of_key_ptr, token, head, HEADS, TOKENS, DIM), of_key)
        of_total = tl.load(of_total_ptr + at * TOKENS + t)
        of_total += beta * moved + tl.sum(of_pairs, 1) - tl.sum(of_pairs, 0)
    else:
        tl.store(_of_rows(of_value_ptr, token, head, HEADS, TOKENS, VALUE_DIM), of_value)
        of_key = tl.load(_of_rows(of_key_part_ptr, token, head, HEADS, TOKENS, DIM))
        tl.store(_of_rows(of_key_ptr, token, head, HEADS, TOKENS, DIM), of_key)
        seen, _, _, _, _ = _factors(log_decay_ptr, documents_ptr, token, head, TOKENS, HEADS)
        of_total = tl.load(of_total_ptr + at * TOKENS + t)
    tl.store(of_log_decay_ptr + of_heads, tl.sum(tl.where(seen, of_total[:, None], 0.0), 0))


@triton.jit
def _chunk(chunks, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """The first token of this program's chunk among all rows, its head, and its place among results.

    Programs of neighbouring heads run together, because these share keys, queries and lines of memory.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    token = ((row // HEADS).to(tl.int64) * chunks + chunk) * TOKENS
    return token, row % HEADS, (chunk * tl.num_programs(0) + row).to(tl.int64)


@triton.jit
def _tile(ptr, first, stride: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to a matrix whose first element is ``first`` elements, 64 bits, behind ``ptr``."""
    return ptr + first + (tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def _of_rows(ptr, token, head, HEADS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to a head's vectors for a chunk's tokens, in rows of all heads."""
    return _tile(ptr, (token * HEADS + head) * WIDTH, HEADS * WIDTH, TOKENS, WIDTH)


@triton.jit
def _of_chunk(ptr, at, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to a chunk's matrix among results."""
    return _tile(ptr, at * (ROWS * COLUMNS), COLUMNS, ROWS, COLUMNS)


@triton.jit
def _columns(ptr, at, column, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to some columns of a chunk's matrix, from ``column`` on; WIDTH are all columns."""
    return _tile(ptr, at * (ROWS * WIDTH) + column, WIDTH, ROWS, COLUMNS)


@triton.jit
def _factors(log_decay_ptr, documents_ptr, token, head, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Which tokens see which, and the decays between them.

    Returns:
        Whether token i sees token j; the decay from j to i; from the state before the chunk to i; from i to
        the end; and of the state.
    """
    t = tl.arange(0, TOKENS)
    log_decay = tl.load(log_decay_ptr + token * HEADS + head + t * HEADS)
    own = tl.load(documents_ptr + token + t)
    last = tl.load(documents_ptr + token + TOKENS - 1)
    before = tl.load(documents_ptr + tl.where(tl.program_id(1) == 0, token, token - 1))
    seen = (t[:, None] >= t[None, :]) & (own[:, None] == own[None, :])
    # Of each document alone: with one sum for all, rounding would carry gradients from one to the other.
    starts = own != tl.load(documents_ptr + token + tl.where(t == 0, t, t - 1))
    total, _ = tl.associative_scan((log_decay, starts.to(tl.int32)), 0, _add_within)
    pairs = tl.where(seen, tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0)), 0.0)
    end = tl.sum(tl.where(t == TOKENS - 1, total, 0.0))
    reads = tl.where(own == before, tl.exp(total), 0.0)
    writes = tl.where(own == last, tl.exp(tl.where(own == last, end - total, 0.0)), 0.0)
    return seen, pairs, reads, writes, tl.where(last == before, tl.exp(end), 0.0)


@triton.jit
def _add_within(left, starts_left, right, starts_right):
    """Sums that begin again where a document starts."""
    return tl.where(starts_right != 0, right, left + right), starts_left | starts_right


@triton.jit
def _inverse(system, SIZE: tl.constexpr, EXACT: tl.constexpr):
    """The inverse of I plus a matrix's strictly lower triangle, of 64 rows.

    Blocks on the diagonal are inverted together, by elimination column by column. Then each two neighbours
    become one: with Y their inverses and R the block between them, the inverse is Y - Y R Y. Powers of the
    whole matrix would lose all precision if many keys are alike.
    """
    BLOCK: tl.constexpr = 8
    b = tl.arange(0, SIZE // BLOCK)
    i = tl.arange(0, BLOCK)
    t = tl.arange(0, SIZE)
    lower = tl.where(t[:, None] > t[None, :], system, 0.0)
    diagonal = (b[:, None] == b[None, :])[:, None, :, None]
    split: tl.constexpr = (SIZE // BLOCK, BLOCK, SIZE // BLOCK, BLOCK)
    inside = tl.sum(tl.where(diagonal, tl.reshape(lower, split), 0.0), 2)
    y = tl.zeros((SIZE // BLOCK, BLOCK, BLOCK), tl.float32)
    y += (i[:, None] == i[None, :]).to(tl.float32)[None, :, :]
    for done in range(BLOCK - 1):
        column = tl.sum(tl.where((i == done)[None, None, :], inside, 0.0), 2)
        row = tl.sum(tl.where((i == done)[None, :, None], y, 0.0), 1)
        y -= column[:, :, None] * row[:, None, :]
    y = tl.reshape(tl.where(diagonal, y[:, :, None, :], 0.0), (SIZE, SIZE))
    for level in range(3):  # blocks of 16, 32 and 64 rows; unrolled, they would take more registers
        block = t // (BLOCK << level)
        pair = block // 2
        between = (block[:, None] > block[None, :]) & (pair[:, None] == pair[None, :])
        y -= tl.where(between, _times(_times(y, lower, EXACT), y, EXACT), 0.0)
    return y


@triton.jit
def _dot(a, b):
    """A product with an fp32 sum, of operands of one dtype."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _times(a, b, EXACT: tl.constexpr):
    """A product of an fp32 matrix and one in fp32 or in the rows' dtype."""
    if EXACT:
        product = _dot(a, b)
    else:
        high, low = _split(a)
        if b.dtype == tl.float32:
            b, rest = _split(b)
            product = tl.dot(high, rest, tl.dot(low, b))
        else:
            product = tl.dot(low, b)
        product = tl.dot(high, b, product)
    return product


@triton.jit
def _split(x):
    """Two bf16 matrices whose sum is an fp32 matrix, to 16 bits."""
    # Rounded as an integer: GPUs convert single numbers to bf16 at a quarter of the rate.
    high = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)
