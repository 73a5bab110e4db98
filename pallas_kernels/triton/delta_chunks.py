"""Triton kernels of ``pallas_kernels.delta_chunks``.

``prepare_kernel`` computes for every chunk at once what needs no state. ``scan_kernel`` carries the state
from chunk to chunk, some columns of one head's state per program, in registers. Columns do not depend on each
other, so that a row with few heads still fills the chip. From the states ``read_kernel`` computes the outputs
of every chunk at once. ``backward_scan_kernel`` carries the state's cotangent back. The two kernels of
gradients then do every chunk at once; one alone would need more registers than there are.

Rows are ``[batch, time, heads, ...]``. Results of a chunk are ``[chunks, batch * heads, ...]``. With EXACT,
for fp32 rows, operands of products are sums of two TF32 numbers. Otherwise they are bf16, or sums of two.
Without DELTA, tokens remove nothing from the state (Mamba-2), and there is no system.

With CHANNELS, each channel of the keys decays at its own rate (Kimi Delta Attention). Products of tokens are
sums over channels, so that decays come first. Queries and keys are multiplied by decays to and from a token
between them (``_level``). Compare Yang and others, 2023, 2312.06635, section 4.3.
"""

import triton
import triton.language as tl

SLICE = tl.constexpr(32)
"""Channels that a program treats together if they decay at their own rates: more would fill the registers."""


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
    CHANNELS: tl.constexpr,
    KEEP: tl.constexpr,
):
    """A chunk's scores and factors (``_factors``), and ``written`` and ``removed``.

    The former is inverse beta value, the latter inverse beta reads key, where inverse is the inverse of the
    chunk's system. KEEP stores it, too. With CHANNELS, ``reads query`` and ``writes key`` are stored in place
    of the factors.
    """
    token, head, at = _chunk(chunks, TOKENS, HEADS)
    t = tl.arange(0, TOKENS)
    key_head = head // (HEADS // KEY_HEADS)
    low = key_ptr.dtype.element_ty
    if CHANNELS:
        scores, products = _prepare_channels(
            query_ptr, key_ptr, log_decay_ptr, documents_ptr, reads_ptr, writes_ptr, decay_ptr, token, head,
            key_head, at, TOKENS, HEADS, KEY_HEADS, DIM, EXACT, DELTA,
        )  # fmt: skip
    else:
        # First, so that the factors hide the time that these loads take.
        key = tl.load(_of_rows(key_ptr, token, key_head, KEY_HEADS, TOKENS, DIM))
        query = tl.load(_of_rows(query_ptr, token, key_head, KEY_HEADS, TOKENS, DIM))
        _, pairs, reads, writes, decay = _factors(log_decay_ptr, documents_ptr, token, head, TOKENS, HEADS)
        tl.store(reads_ptr + at * TOKENS + t, reads)
        tl.store(writes_ptr + at * TOKENS + t, writes)
        tl.store(decay_ptr + at, decay)
        scores = pairs * _dot(query, tl.trans(key))
    tl.store(_of_chunk(scores_ptr, at, TOKENS, TOKENS), scores.to(low))
    values = _of_rows(value_ptr, token, head, HEADS, TOKENS, VALUE_DIM)
    if DELTA:
        betas = beta_ptr + token * HEADS + head + t * HEADS
        if CHANNELS:
            system = tl.load(betas)[:, None] * products
        else:
            system = tl.load(betas)[:, None] * pairs * _dot(key, tl.trans(key))
        inverse = _inverse(system, TOKENS, EXACT)
        if KEEP:
            tl.store(_of_chunk(inverse_ptr, at, TOKENS, TOKENS), inverse)
        # Behind a barrier the compiler loads vectors again, so that they occupy no registers before. With at
        # most 168 registers, a multiprocessor of Hopper runs three programs.
        tl.debug_barrier()
        inverse *= tl.load(betas)[None, :]
        written = _times(inverse, tl.load(values), EXACT).to(low)
        tl.store(_of_chunk(written_ptr, at, TOKENS, VALUE_DIM), written)
        tl.debug_barrier()
        if CHANNELS:
            WIDTH: tl.constexpr = min(DIM, SLICE)
            for first in range(0, DIM, WIDTH):
                log_decay = tl.load(_slice(log_decay_ptr, token, head, first, HEADS, DIM, TOKENS, WIDTH))
                reads, _, _ = _channel_factors(log_decay, documents_ptr, token, TOKENS, EXACT)
                key = tl.load(_slice(key_ptr, token, key_head, first, KEY_HEADS, DIM, TOKENS, WIDTH))
                removed = _times(inverse, key * reads, EXACT).to(low)
                tl.store(_columns(removed_ptr, at, first, DIM, TOKENS, WIDTH), removed)
        else:
            reads = tl.load(reads_ptr + at * TOKENS + t)
            removed = _times(inverse * reads[None, :], key, EXACT).to(low)
            tl.store(_of_chunk(removed_ptr, at, TOKENS, DIM), removed)
    else:
        tl.store(_of_chunk(written_ptr, at, TOKENS, VALUE_DIM), tl.load(values))
        tl.store(_of_chunk(removed_ptr, at, TOKENS, DIM), tl.zeros((TOKENS, DIM), low))


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
    CHANNELS: tl.constexpr,
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
        decay = _state_decay(decay_ptr, at, DIM, CHANNELS)  # first, so that products hide the time it takes
        before = state.to(low)
        tl.store(_columns(before_ptr, at, column, VALUE_DIM, DIM, COLUMNS), before)
        removed = tl.load(_of_chunk(removed_ptr, at, TOKENS, DIM))
        written = tl.load(_columns(written_ptr, at, column, VALUE_DIM, TOKENS, COLUMNS))
        if CHANNELS:
            key = tl.load(_of_chunk(writes_ptr, at, TOKENS, DIM))
        else:
            writes = tl.load(writes_ptr + at * TOKENS + t)
            key_head = head // (HEADS // KEY_HEADS)
            key = tl.load(_of_rows(key_ptr, first + chunk * TOKENS, key_head, KEY_HEADS, TOKENS, DIM))
        wrote = written - _dot(removed, before)
        tl.store(_columns(wrote_ptr, at, column, VALUE_DIM, TOKENS, COLUMNS), wrote.to(low))
        if not CHANNELS:
            wrote *= writes[:, None]
        state = state * decay + _dot(tl.trans(key), wrote.to(low))
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
    CHANNELS: tl.constexpr,
):
    """A chunk's outputs: reads (query before) + scores wrote."""
    token, head, at = _chunk(chunks, TOKENS, HEADS)
    if CHANNELS:
        query = tl.load(_of_chunk(reads_ptr, at, TOKENS, DIM))
        out = _dot(query, tl.load(_of_chunk(before_ptr, at, DIM, VALUE_DIM)))
    else:
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
    CHANNELS: tl.constexpr,
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
        decay = _state_decay(decay_ptr, at, DIM, CHANNELS)  # first, so that products hide the time it takes
        after = carried.to(low)
        tl.store(_columns(of_after_ptr, at, column, VALUE_DIM, DIM, COLUMNS), after)
        if CHANNELS:
            key = tl.load(_of_chunk(writes_ptr, at, TOKENS, DIM))
            query = tl.load(_of_chunk(reads_ptr, at, TOKENS, DIM))
        else:
            key_head = head // (HEADS // KEY_HEADS)
            key = tl.load(_of_rows(key_ptr, token, key_head, KEY_HEADS, TOKENS, DIM))
            query = tl.load(_of_rows(query_ptr, token, key_head, KEY_HEADS, TOKENS, DIM))
        scores = tl.load(_of_chunk(scores_ptr, at, TOKENS, TOKENS))
        removed = tl.load(_of_chunk(removed_ptr, at, TOKENS, DIM))
        of_out = tl.load(
            _tile(of_out_ptr, (token * HEADS + head) * VALUE_DIM + column, HEADS * VALUE_DIM, TOKENS, COLUMNS)
        )
        if CHANNELS:
            of_wrote = _dot(key, after)
        else:
            reads = tl.load(reads_ptr + at * TOKENS + t)
            writes = tl.load(writes_ptr + at * TOKENS + t)
            of_wrote = _dot(key, after) * writes[:, None]
        of_wrote = (of_wrote + _dot(tl.trans(scores), of_out)).to(low)
        tl.store(
            _columns(of_wrote_ptr, at, column, VALUE_DIM, TOKENS, COLUMNS),
            of_wrote,
        )
        carried = carried * decay
        of_read = of_out if CHANNELS else (of_out * reads[:, None]).to(low)
        carried += _dot(tl.trans(query), of_read)
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
    CHANNELS: tl.constexpr,
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
    if CHANNELS:
        of_scores = _dot(of_out, tl.trans(wrote))
        _read_gradient_of_channels(
            of_scores, of_out, wrote, query_ptr, key_ptr, log_decay_ptr, documents_ptr, before_ptr,
            of_after_ptr, of_decay_ptr, of_query_ptr, of_key_ptr, of_total_ptr, token, head, key_head, at,
            TOKENS, HEADS, KEY_HEADS, DIM, VALUE_DIM, EXACT,
        )  # fmt: skip
    else:
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
        tl.store(
            of_total_ptr + at * TOKENS + t, of_total - of_writes + tl.where(t == TOKENS - 1, of_end, 0.0)
        )


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
    CHANNELS: tl.constexpr,
):
    """The gradients through (I + system) [written, removed] = beta [value, reads key].

    X' is X transposed. It adds to the parts of ``read_gradient_kernel``. Without DELTA, written is value.
    """
    token, head, at = _chunk(chunks, TOKENS, HEADS)
    low = key_ptr.dtype.element_ty
    t = tl.arange(0, TOKENS)
    of_heads = token * HEADS + head + t * HEADS
    of_value = tl.load(_of_chunk(of_wrote_ptr, at, TOKENS, VALUE_DIM))
    back, beta, of_beta, of_system = 0.0, 0.0, 0.0, 0.0  # unused without DELTA
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
    if CHANNELS:
        of_beta = _write_gradient_of_channels(
            of_system, of_beta, back, beta, key_ptr, log_decay_ptr, documents_ptr, removed_ptr,
            of_removed_ptr, of_key_part_ptr, of_total_ptr, of_key_ptr, of_log_decay_ptr, token, head, at,
            TOKENS, HEADS, KEY_HEADS, DIM, EXACT, DELTA,
        )  # fmt: skip
        if DELTA:
            tl.store(of_beta_ptr + of_heads, of_beta)
    else:
        if DELTA:
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
def _slice(
    ptr, token, head, first, HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):
    """Like ``_of_rows``, for the channels from ``first`` on of vectors of DIM."""
    return _tile(ptr, (token * HEADS + head) * DIM + first, HEADS * DIM, TOKENS, WIDTH)


@triton.jit
def _rows(ptr, at, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOME: tl.constexpr):
    """Pointers to some rows of a chunk's matrix, from ``first`` on; ROWS are all rows."""
    return _tile(ptr, (at * ROWS + first) * COLUMNS, COLUMNS, SOME, COLUMNS)


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
def _prepare_channels(
    query_ptr, key_ptr, log_decay_ptr, documents_ptr, reads_ptr, writes_ptr, decay_ptr, token, head,
    key_head, at, TOKENS: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    EXACT: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Stores ``reads query``, ``writes key`` and the state's decay, for channels.

    Returns:
        The products of queries and, with DELTA, of keys with earlier tokens' keys, which decay in between.
    """
    WIDTH: tl.constexpr = min(DIM, SLICE)
    low = key_ptr.dtype.element_ty
    t = tl.arange(0, TOKENS)
    scores = tl.zeros((TOKENS, TOKENS), tl.float32)
    products = tl.zeros((TOKENS, TOKENS), tl.float32)
    for first in range(0, DIM, WIDTH):
        log_decay = tl.load(_slice(log_decay_ptr, token, head, first, HEADS, DIM, TOKENS, WIDTH))
        key = tl.load(_slice(key_ptr, token, key_head, first, KEY_HEADS, DIM, TOKENS, WIDTH))
        query = tl.load(_slice(query_ptr, token, key_head, first, KEY_HEADS, DIM, TOKENS, WIDTH))
        reads, writes, decay = _channel_factors(log_decay, documents_ptr, token, TOKENS, EXACT)
        tl.store(_columns(reads_ptr, at, first, DIM, TOKENS, WIDTH), (query * reads).to(low))
        tl.store(_columns(writes_ptr, at, first, DIM, TOKENS, WIDTH), (key * writes).to(low))
        tl.store(decay_ptr + at * DIM + first + tl.arange(0, WIDTH), decay)
        own = tl.sum(query.to(tl.float32) * key, 1)
        scores += tl.where(t[:, None] == t[None, :], own[:, None], 0.0)
        half = tl.full((), TOKENS // 2, tl.int32)
        while half > 0:
            left, right, pairs, half = _level(log_decay, documents_ptr, token, half, TOKENS, EXACT)
            decayed = tl.trans((key * right).to(low))
            scores += tl.where(pairs, _dot((query * left).to(low), decayed), 0.0)
            if DELTA:
                products += tl.where(pairs, _dot((key * left).to(low), decayed), 0.0)
    return scores, products


@triton.jit
def _read_gradient_of_channels(
    of_scores, of_out, wrote, query_ptr, key_ptr, log_decay_ptr, documents_ptr, before_ptr, of_after_ptr,
    of_decay_ptr, of_query_ptr, of_key_ptr, of_total_ptr, token, head, key_head, at,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Stores what ``read_gradient_kernel`` does, for channels.

    Each total is a sum of decays, so that its gradient is the product of a factor and the factor's gradient.
    """
    WIDTH: tl.constexpr = min(DIM, SLICE)
    low = wrote.dtype
    t = tl.arange(0, TOKENS)
    own = tl.sum(tl.where(t[:, None] == t[None, :], of_scores, 0.0), 1)[:, None]
    for first in range(0, DIM, WIDTH):
        log_decay = tl.load(_slice(log_decay_ptr, token, head, first, HEADS, DIM, TOKENS, WIDTH))
        reads, writes, decay = _channel_factors(log_decay, documents_ptr, token, TOKENS, EXACT)
        before = tl.load(_rows(before_ptr, at, first, DIM, VALUE_DIM, WIDTH))
        of_query = _dot(of_out, tl.trans(before)) * reads
        of_after = tl.load(_rows(of_after_ptr, at, first, DIM, VALUE_DIM, WIDTH))
        of_key = _dot(wrote, tl.trans(of_after)) * writes
        key = tl.load(_slice(key_ptr, token, key_head, first, KEY_HEADS, DIM, TOKENS, WIDTH))
        query = tl.load(_slice(query_ptr, token, key_head, first, KEY_HEADS, DIM, TOKENS, WIDTH))
        of_end = tl.sum(of_key * key, 0)
        of_end += tl.load(of_decay_ptr + at * DIM + first + tl.arange(0, WIDTH)) * decay
        left, right = _product_gradients(
            of_scores, query, key, log_decay, documents_ptr, token, TOKENS, EXACT
        )
        of_query += left
        of_key += right
        of_total = of_query * query - of_key * key
        of_total += tl.where(t[:, None] == TOKENS - 1, of_end[None, :], 0.0)
        tl.store(_columns(of_total_ptr, at, first, DIM, TOKENS, WIDTH), of_total)
        of_queries = _slice(of_query_ptr, token, head, first, HEADS, DIM, TOKENS, WIDTH)
        tl.store(of_queries, (of_query + own * key).to(low))
        of_keys = _slice(of_key_ptr, token, head, first, HEADS, DIM, TOKENS, WIDTH)
        tl.store(of_keys, (of_key + own * query).to(low))


@triton.jit
def _write_gradient_of_channels(
    of_system, of_beta, back, beta, key_ptr, log_decay_ptr, documents_ptr, removed_ptr, of_removed_ptr,
    of_key_part_ptr, of_total_ptr, of_key_ptr, of_log_decay_ptr, token, head, at,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    EXACT: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of keys and decays, for channels, and returns the gradients of beta.

    The first two arguments are the parts through ``written``. Without DELTA they and the next two are unused.
    """
    WIDTH: tl.constexpr = min(DIM, SLICE)
    low = key_ptr.dtype.element_ty
    t = tl.arange(0, TOKENS)
    key_head = head // (HEADS // KEY_HEADS)
    own = tl.load(documents_ptr + token + t)
    after = (t[:, None] <= t[None, :]) & (own[:, None] == own[None, :])
    if DELTA:
        for first in range(0, DIM, WIDTH):
            of_wanted = _times(back, tl.load(_columns(of_removed_ptr, at, first, DIM, TOKENS, WIDTH)), EXACT)
            removed = tl.load(_columns(removed_ptr, at, first, DIM, TOKENS, WIDTH))
            of_system += _dot(of_wanted.to(low), tl.trans(removed))
    for first in range(0, DIM, WIDTH):
        log_decay = tl.load(_slice(log_decay_ptr, token, head, first, HEADS, DIM, TOKENS, WIDTH))
        of_key = tl.load(_slice(of_key_part_ptr, token, head, first, HEADS, DIM, TOKENS, WIDTH))
        of_total = tl.load(_columns(of_total_ptr, at, first, DIM, TOKENS, WIDTH))
        if DELTA:
            key = tl.load(_slice(key_ptr, token, key_head, first, KEY_HEADS, DIM, TOKENS, WIDTH))
            left, right = _product_gradients(
                -of_system, key * beta[:, None], key, log_decay, documents_ptr, token, TOKENS, EXACT
            )
            of_removed = tl.load(_columns(of_removed_ptr, at, first, DIM, TOKENS, WIDTH))
            reads, _, _ = _channel_factors(log_decay, documents_ptr, token, TOKENS, EXACT)
            left += _times(back, of_removed, EXACT) * reads
            of_beta += tl.sum(left * key, 1)
            left *= beta[:, None]
            of_total += (left - right) * key
            of_key = (of_key + left + right).to(low)
        tl.store(_slice(of_key_ptr, token, head, first, HEADS, DIM, TOKENS, WIDTH), of_key)
        of_log_decay = _slice(of_log_decay_ptr, token, head, first, HEADS, DIM, TOKENS, WIDTH)
        tl.store(of_log_decay, _sums(after, of_total, EXACT))
    return of_beta


@triton.jit
def _channel_factors(log_decay, documents_ptr, token, TOKENS: tl.constexpr, EXACT: tl.constexpr):
    """The last three of ``_factors`` for channels [token, channel] with their own decays."""
    t = tl.arange(0, TOKENS)
    own = tl.load(documents_ptr + token + t)
    last = tl.load(documents_ptr + token + TOKENS - 1)
    before = tl.load(documents_ptr + tl.where(tl.program_id(1) == 0, token, token - 1))
    reads = tl.exp(_sums(t[:, None] >= t[None, :], log_decay, EXACT))
    reads = tl.where((own == before)[:, None], reads, 0.0)
    writes = tl.exp(_sums(t[:, None] < t[None, :], log_decay, EXACT))
    writes = tl.where((own == last)[:, None], writes, 0.0)
    return reads, writes, tl.where(last == before, tl.exp(tl.sum(log_decay, 0)), 0.0)


@triton.jit
def _level(log_decay, documents_ptr, token, half, TOKENS: tl.constexpr, EXACT: tl.constexpr):
    """Decays of channels to and from the token in the middle of each block of ``2 * half`` tokens.

    A product of two tokens' vectors decays as it should if the later token's is multiplied by ``left`` and
    the other by ``right``. If the decays within all blocks are mild, this holds for all tokens of a block.
    Otherwise one token must be in the first half and the other in the second; all factors are at most one.

    Returns:
        ``left`` and ``right``, [token, channel]; for which pairs the above holds, among a token and earlier
        ones of its document; half of ``half``, or 0 if no pair is left.
    """
    MILD: tl.constexpr = 30.0  # e to this power is far from the limits of fp32 and bf16
    t = tl.arange(0, TOKENS)
    block = t // (2 * half)
    middle = block * (2 * half) + half - 1
    own = tl.load(documents_ptr + token + t)
    same = (own == tl.load(documents_ptr + token + middle))[:, None]
    first, last = tl.minimum(t, middle)[:, None], tl.maximum(t, middle)[:, None]
    between = (t[None, :] > first) & (t[None, :] <= last)
    sums = tl.where(same, _sums(between, log_decay, EXACT), float("-inf"))
    mild = tl.min(sums) > -MILD
    later = (t > middle)[:, None]
    up = tl.where(mild, -sums, float("-inf"))
    left, right = tl.exp(tl.where(later, sums, up)), tl.exp(tl.where(later, up, sums))
    pairs = (block[:, None] == block[None, :]) & (t[:, None] > t[None, :]) & (own[:, None] == own[None, :])
    return left, right, pairs, tl.where(mild, 0, half // 2)


@triton.jit
def _product_gradients(
    of_products, left, right, log_decay, documents_ptr, token, TOKENS: tl.constexpr, EXACT: tl.constexpr
):
    """The gradients through products of left with earlier tokens' right, which decay in between."""
    low = right.dtype
    of_left = tl.zeros(left.shape, tl.float32)
    of_right = tl.zeros(left.shape, tl.float32)
    half = tl.full((), TOKENS // 2, tl.int32)
    while half > 0:
        down, up, pairs, half = _level(log_decay, documents_ptr, token, half, TOKENS, EXACT)
        chosen = tl.where(pairs, of_products, 0.0).to(low)
        of_left += down * _dot(chosen, (right * up).to(low))
        of_right += up * _dot(tl.trans(chosen), (left * down).to(low))
    return of_left, of_right


@triton.jit
def _sums(chosen, x, EXACT: tl.constexpr):
    """Sums of the chosen rows of an fp32 matrix, for each row of a mask."""
    mask = chosen.to(tl.float32)
    if EXACT:
        sums = _dot(mask, x)
    else:
        high, low = _split(x)
        mask = mask.to(tl.bfloat16)
        sums = tl.dot(mask, high, tl.dot(mask, low))
    return sums


@triton.jit
def _state_decay(decay_ptr, at, DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """A chunk's decay of the state, one number or a column of them."""
    if CHANNELS:
        decay = tl.load(decay_ptr + at * DIM + tl.arange(0, DIM))[:, None]
    else:
        decay = tl.load(decay_ptr + at)
    return decay


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
