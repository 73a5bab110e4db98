"""The functions of the reference, with the same arguments, computed by the Triton kernels.

They return None for arguments that the kernels do not support.

This is the only module that imports jax-triton.
"""

import inspect
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
import triton

from pallas_kernels import delta_chunks_reference, grouped_reference, nf4_reference, reference
from pallas_kernels.backends import compute_capability
from pallas_kernels.formats import NF4_GROUP, QMAX, QUANTIZED, nbytes, nf4_sections
from pallas_kernels.triton import attention, casts, delta_chunks, grouped, kernels, nf4

_NEW_STYLE = "out_type" in inspect.signature(jax_triton.triton_call).parameters
_FLOATS = (jnp.float32, jnp.bfloat16)
_LIMIT = 2**31
"""Elements of a row that 32-bit offsets can address."""
_MAX_ROWS = 65535
"""Rows of a grid's second dimension."""
_ALIGN = 16
"""The largest power of two that the compiler may know to divide the number of a row's blocks."""
_MAX_PEERS = 64
"""Rows summed in unrolled code."""
_PROGRAMS = 512
"""Number of programs of the attention kernel that fill a chip."""
_CAST_TILE = grouped_reference.COLUMNS
"""Rows and columns of a program of the cast kernel."""
_GATHER_TILE = 4096
"""Bytes of a row that a program copies."""


def encode_shape(fmt: str, rotation: int, stochastic: bool) -> tuple[int, int]:
    """(elements per thread, warps per program) of the encode kernel; see docs/kernels.md."""
    if rotation or stochastic:
        return 32, 8
    return (32, 4) if fmt == "fp6" else (16, 8)


def decode_shape(fmt: str, dtype: jnp.dtype) -> tuple[int, int, int]:
    """(elements per thread and tile, warps per program, tiles) of the decode kernel."""
    lanes = 8 if dtype == jnp.bfloat16 or fmt in ("fp6", "int2") else 4
    return lanes, 4, 4 if fmt == "fp6" else 2


def sum_shape(fmt: str, rotation: int, stored: bool) -> tuple[int, int, int]:
    """(elements per thread and tile, warps per program, tiles) of the sum kernel."""
    if stored:
        return (32, 2, 1) if rotation else (16, 8, 1)
    return {"int4": (32, 1, 4), "fp6": (64, 2, 1)}.get(fmt, (32, 2, 1))


def _has_kernel(*dtypes: jnp.dtype, fmt: str, n: int, rows: int = 1) -> bool:
    """Whether the kernels support rows of n elements in ``fmt``."""
    if fmt == "fp8" and compute_capability() < 89:  # no conversion instructions before Ada
        return False
    return fmt in QUANTIZED and _fits(*dtypes, n=n, rows=rows)


def _fits(*dtypes: jnp.dtype, n: int, rows: int = 1) -> bool:
    """Whether the kernels read and write these dtypes, in rows of n elements."""
    return n < _LIMIT and rows <= _MAX_ROWS and all(dtype in _FLOATS for dtype in dtypes)


def _launch(
    kernel: Any, arrays: tuple[jax.Array | int, ...], out: Any, grid: tuple[int] | tuple[int, int],
    warps: int, stages: int = 1, *, contracts: bool = False, **constants: Any,
) -> Any:  # fmt: skip
    """Launch a kernel; the results are as ``out``.

    Contraction to fused multiply-adds rounds unlike the reference, which codecs equal bit for bit.
    """
    options: dict[str, Any] = {"out_shape": out, "enable_fp_fusion": contracts}
    if _NEW_STYLE:  # jax-triton 0.4 renamed these arguments
        options = {"out_type": out, "backend_options": {"enable_fp_fusion": contracts}}
    return jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        grid=grid,
        num_warps=warps,
        num_stages=stages,
        compute_capability=compute_capability(),
        **options,
        **constants,
    )


def _call(
    kernel: Any, arrays: tuple[jax.Array | int, ...], out: jax.ShapeDtypeStruct, rows: int, n: int,
    block: int | None, shape: tuple[int, int], **constants: Any,
) -> jax.Array:  # fmt: skip
    """Launch a grid of one program per UNROLL (or 1) * T * K elements of each of ``rows`` rows of n."""
    assert block is not None  # as in all quantized formats
    lanes, warps = shape
    threads = max(32 * warps, block // lanes)
    tile = threads * lanes * constants.get("UNROLL", 1)
    grid = -(-n // tile), rows
    return _launch(kernel, arrays, out, grid, threads // 32, BLOCK=block, T=threads, K=lanes, **constants)


def _call_any_length(
    kernel: Any, arrays: tuple[jax.Array, ...], out: jax.ShapeDtypeStruct, rows: int, n: int,
    block: int | None, shape: tuple[int, int], *, fixed: bool = False, **constants: Any,
) -> jax.Array:  # fmt: skip
    """Like ``_call``, for a kernel with the rows' length as an argument, or a constant if ``fixed``."""
    assert block is not None
    lanes, warps = shape
    tile = max(32 * warps, block // lanes) * lanes * constants.get("UNROLL", 1)
    blocks = n // block
    align = blocks if fixed else gcd(blocks, _ALIGN)  # jax-triton makes an argument of 1 a constant
    return _call(
        kernel, (*arrays, blocks // align), out, rows, n, block, shape,
        ALIGN=align, MASKED=n % tile != 0, BYTES=nbytes(constants["FMT"], block, block), **constants,
    )  # fmt: skip


def _encode(
    x: jax.Array, base: jax.Array | None, seed: jax.Array | None, rows: int, n: int,
    reorder: tuple[int, int, int], out: tuple[int, ...], *,
    fmt: str, block: int | None, rounding: str, rotation: int,
) -> jax.Array:  # fmt: skip
    """Encode x as ``rows`` rows of n into ``out``."""
    local, nodes, chunks = reorder
    stochastic = rounding == "stochastic"
    return _call_any_length(
        kernels.encode_kernel,
        (x, x if base is None else base, x if seed is None else reference.hash_keys(seed)),
        jax.ShapeDtypeStruct(out, jnp.uint8),
        rows,
        n,
        block,
        encode_shape(fmt, rotation, stochastic),
        LOCAL=local,
        NODES=nodes,
        CHUNKS=chunks,
        FMT=fmt,
        QMAX=QMAX[fmt],
        DELTA=base is not None,
        ROTATE=bool(rotation),
        STOCHASTIC=stochastic,
    )


def encode(
    x: jax.Array, seed: jax.Array | None, *, fmt: str, block: int | None, rounding: str, rotation: int
) -> jax.Array | None:
    """See ``pallas_kernels.encode``."""
    rows, n = x.shape
    if not _has_kernel(x.dtype, fmt=fmt, n=n, rows=rows):
        return None
    order, out = (rows, 1, 1), (rows, nbytes(fmt, n, block))
    options: dict[str, Any] = {"fmt": fmt, "block": block, "rounding": rounding, "rotation": rotation}
    return _encode(x, None, seed, rows, n, order, out, **options)


def encode_delta(
    w: jax.Array, base: jax.Array, seed: jax.Array | None, *, fmt: str, block: int | None, rounding: str
) -> jax.Array | None:
    """See ``pallas_kernels.encode_delta``."""
    rows, n = w.shape
    if not _has_kernel(w.dtype, base.dtype, fmt=fmt, n=n, rows=rows):
        return None
    order, out = (rows, 1, 1), (rows, nbytes(fmt, n, block))
    options: dict[str, Any] = {"fmt": fmt, "block": block, "rounding": rounding, "rotation": 0}
    return _encode(w, base, seed, rows, n, order, out, **options)


def encode_reordered(
    g: jax.Array, seed: jax.Array | None, *,
    fmt: str, local: int, nodes: int, chunks: int, block: int | None, rounding: str, rotation: int,
) -> jax.Array | None:  # fmt: skip
    """See ``pallas_kernels.encode_reordered``."""
    rows = local * nodes * chunks
    n = g.size // rows
    if not _has_kernel(g.dtype, fmt=fmt, n=n * nodes, rows=rows):
        return None
    order, out = (local, nodes, chunks), (chunks, local, nbytes(fmt, nodes * n, block))
    options: dict[str, Any] = {"fmt": fmt, "block": block, "rounding": rounding, "rotation": rotation}
    return _encode(g, None, seed, rows, n, order, out, **options)


def _decode(
    payload: jax.Array, base: jax.Array | None, dtype: jnp.dtype, *, fmt: str, n: int, block: int | None
) -> jax.Array:
    rows = payload.shape[0]
    lanes, warps, unroll = decode_shape(fmt, dtype)
    return _call_any_length(
        kernels.decode_kernel,
        (payload, payload if base is None else base),
        jax.ShapeDtypeStruct((rows, n), dtype),
        rows,
        n,
        block,
        (lanes, warps),
        UNROLL=unroll,
        FMT=fmt,
        ADD=base is not None,
    )


def decode(payload: jax.Array, *, fmt: str, n: int, block: int | None, dtype: jnp.dtype) -> jax.Array | None:
    """See ``pallas_kernels.decode``."""
    if not _has_kernel(dtype, fmt=fmt, n=n, rows=payload.shape[0]):
        return None
    return _decode(payload, None, dtype, fmt=fmt, n=n, block=block)


def decode_add(payload: jax.Array, base: jax.Array, *, fmt: str, block: int | None) -> jax.Array | None:
    """See ``pallas_kernels.decode_add``."""
    n = base.shape[1]
    if not _has_kernel(base.dtype, fmt=fmt, n=n, rows=payload.shape[0]):
        return None
    return _decode(payload, base, base.dtype, fmt=fmt, n=n, block=block)


def _sum(
    payload: jax.Array, seed: jax.Array | None, out: jax.ShapeDtypeStruct, *,
    fmt: str, fmt_out: str, rows: int, n: int, block: int | None, rotation: int, factor: float,
    rounding: str,
) -> jax.Array:  # fmt: skip
    """Sum the payload's rows of rows * n elements into ``out``, in fmt_out ("sum": fp32)."""
    assert block is not None
    encoded = fmt_out in QUANTIZED
    lanes, warps, unroll = sum_shape(fmt, rotation, not encoded)
    return _call_any_length(
        kernels.sum_kernel,
        (payload, payload if seed is None else reference.hash_keys(seed)),
        out,
        rows,
        n,
        block,
        (lanes, warps),
        fixed=encoded,  # instructions limit this kernel, and a constant length saves some
        UNROLL=unroll,
        ROWS=rows,
        PEERS=payload.shape[0],
        FMT=fmt,
        OUT_FMT=fmt_out,
        OUT_QMAX=QMAX[fmt_out] if encoded else 0.0,
        OUT_BYTES=nbytes(fmt_out, block, block) if encoded else 0,
        ROTATE=bool(rotation),
        FACTOR=factor,
        STOCHASTIC=rounding == "stochastic",
    )


def decode_sum(
    payload: jax.Array, *, fmt: str, n: int, block: int | None, rotation: int, scale: float
) -> jax.Array | None:
    """See ``pallas_kernels.decode_sum``."""
    if not _has_kernel(fmt=fmt, n=n) or payload.shape[0] > _MAX_PEERS:
        return None
    factor = float(np.float32(scale) * (reference.ROTATION_NORM if rotation else np.float32(1)))
    out = jax.ShapeDtypeStruct((n,), jnp.float32)
    options: dict[str, Any] = {"rows": 1, "n": n, "block": block, "rotation": rotation, "factor": factor}
    return _sum(payload, None, out, fmt=fmt, fmt_out="sum", rounding="nearest", **options)


def decode_sum_encode(
    payload: jax.Array, seed: jax.Array | None, *,
    fmt_in: str, fmt_out: str, rows_out: int, n: int, block: int | None, rounding: str,
) -> jax.Array | None:  # fmt: skip
    """See ``pallas_kernels.decode_sum_encode``."""
    fits = payload.shape[0] <= _MAX_PEERS and _has_kernel(fmt=fmt_in, n=rows_out * n)
    if not fits or not _has_kernel(fmt=fmt_out, n=n, rows=rows_out):
        return None
    out = jax.ShapeDtypeStruct((rows_out, nbytes(fmt_out, n, block)), jnp.uint8)
    options: dict[str, Any] = {"rows": rows_out, "n": n, "block": block, "rotation": 0, "factor": 1.0}
    return _sum(payload, seed, out, fmt=fmt_in, fmt_out=fmt_out, rounding=rounding, **options)


def decode_nf4(payload: jax.Array, *, n: int, block: int, dtype: jnp.dtype) -> jax.Array | None:
    """See ``pallas_kernels.decode_nf4``."""
    if not _fits(dtype, n=n, rows=payload.shape[0]):
        return None
    lanes, warps, unroll = decode_shape("nf4", dtype)
    scales, units, pitch = nf4_sections(n, block)
    return _call(
        nf4.decode_kernel,
        (payload, jnp.asarray(nf4_reference.LEVELS)),
        jax.ShapeDtypeStruct((payload.shape[0], n), dtype),
        payload.shape[0],
        n,
        block,
        (lanes, warps),
        UNROLL=unroll,
        N=n,
        PITCH=pitch,
        SCALES=scales,
        UNITS=units,
        GROUP=NF4_GROUP,
    )


def attend_cache(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    softcap: float | None,
) -> jax.Array | None:
    """See ``pallas_kernels.attend_cache``."""
    (rows, heads, dim), kv_heads, length = query.shape, keys.shape[2], keys.shape[3]
    group = heads // kv_heads
    if query.dtype != jnp.bfloat16 or dim > 256 or group > 64:
        return None
    splits = max(1, min(_PROGRAMS // (rows * kv_heads), length // 256))
    queries, width = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(dim))
    of_splits = jax.ShapeDtypeStruct((splits, rows, heads, dim), query.dtype if splits == 1 else jnp.float32)
    out, weights = _launch(
        attention.attend_kernel,
        (query, keys, values, layer.reshape(1), start, stop),
        (of_splits, jax.ShapeDtypeStruct((splits, rows, heads), jnp.float32)),
        (rows * kv_heads, splits),
        1 if queries * width <= 2048 else 4,
        4,
        ROWS=rows,
        HEADS=kv_heads,
        GROUP=group,
        GROUP_PADDED=queries,
        LENGTH=length,
        DIM=dim,
        DIM_PADDED=width,
        COLUMNS=32,
        SPLITS=splits,
        SCALE=scale,
        SOFTCAP=softcap or 0.0,
    )
    if splits == 1 and sinks is None:
        return out[0]
    if sinks is not None:  # a part with a weight and no output
        own = jnp.broadcast_to(sinks.astype(jnp.float32), (1, *weights.shape[1:]))
        weights = jnp.concatenate([weights, own])
    shares = jax.nn.softmax(weights, axis=0)[:splits, ..., None]
    return jnp.sum(shares * out, axis=0).astype(query.dtype)


def _columns(
    x: jax.Array, scale: jax.Array | None, index: jax.Array | None, blocks: tuple[jax.Array, jax.Array],
    columns: int, dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The codes of rows (if there is a scale) and of columns; ``blocks`` are the starts and stops of rows."""
    n = x.shape[1]
    factor = jnp.ones(1) if scale is None else scale.reshape(1)
    shapes = (1, 1) if scale is None else x.shape, (n, columns)
    found = _launch(
        casts.columns_kernel,
        (x, factor, blocks[0] if index is None else index, *blocks),
        tuple(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes),
        (len(blocks[0]) * -(-n // _CAST_TILE),),
        8,
        N=n,
        COLUMNS=columns,
        TILE_M=_CAST_TILE,
        TILE_N=_CAST_TILE,
        CAST="" if scale is None else "e5m2" if dtype == jnp.float8_e5m2 else "e4m3",
        INDEXED=index is not None,
    )
    rows, turned = (jax.lax.bitcast_convert_type(codes, dtype) for codes in found)
    return rows, turned


def cast_transpose(
    x: jax.Array, scale: jax.Array, sizes: jax.Array | None, *, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array] | None:
    """See ``pallas_kernels.cast_transpose``."""
    m, n = x.shape
    aligned = (m % 16 == 0 if sizes is None else len(sizes) > 0) and n % 16 == 0 and m * n > 0
    if compute_capability() < 89 or not aligned or not _fits(x.dtype, n=m * n):
        return None
    if sizes is not None:
        blocks = grouped_reference.blocks_of(sizes, m)
        return _columns(x, scale, None, blocks, len(blocks[0]) * _CAST_TILE, dtype)
    starts = jnp.arange(0, m, _CAST_TILE, jnp.int32)
    return _columns(x, scale, None, (starts, jnp.minimum(starts + _CAST_TILE, m)), m, dtype)


def grouped_columns(x: jax.Array, sizes: jax.Array, index: jax.Array | None) -> jax.Array | None:
    """See ``pallas_kernels.grouped_columns``."""
    rows = len(x if index is None else index)
    if not (x.size and rows and len(sizes)):
        return None
    blocks = grouped_reference.blocks_of(sizes, rows)
    codes = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return _columns(codes, None, index, blocks, len(blocks[0]) * _CAST_TILE, x.dtype)[1]


def gather_rows(x: jax.Array, index: jax.Array) -> jax.Array | None:
    """See ``pallas_kernels.gather_rows``."""
    if not (x.size and len(index)):
        return None
    words = x if x.dtype.itemsize > 1 else jax.lax.bitcast_convert_type(x, jnp.uint8)
    width = x.shape[1]
    tile = min(_GATHER_TILE // x.dtype.itemsize, 1 << (width - 1).bit_length())
    out, grid = jax.ShapeDtypeStruct((len(index), width), words.dtype), (len(index), -(-width // tile))
    found = _launch(grouped.gather_kernel, (words, index), out, grid, 4, WIDTH=width, TILE=tile)
    return jax.lax.bitcast_convert_type(found, x.dtype)


def _grouped_call(
    kernel: Any, arrays: tuple[jax.Array, ...], out: tuple[int, ...], programs: int, tile: grouped.Tile,
    **constants: Any,
) -> jax.Array:  # fmt: skip
    """Launch a kernel of ``grouped``. The result has the dtype of the first array."""
    sizes = {"TILE_M": tile.rows, "TILE_N": tile.columns, "STEP": tile.step}
    kind = jax.ShapeDtypeStruct(out, arrays[0].dtype)
    return _launch(kernel, arrays, kind, (programs,), tile.warps, tile.stages, **sizes, **constants)


def grouped_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array | None:
    """See ``pallas_kernels.grouped_rows``."""
    (rows, k), groups, n = x.shape, len(w), w.shape[1 if transposed else 2]
    if not (rows and groups and k and n) or not _fits(x.dtype, n=k * n):
        return None
    tile = grouped.tile_for(compute_capability(), x.dtype, rows // groups)
    plan = grouped.plan_of_rows(sizes, rows, tile.rows)
    return _grouped_call(
        grouped.rows_kernel,
        (x, w, plan),
        (rows, n),
        len(plan) * -(-n // tile.columns),
        tile,
        ROWS=rows,
        GROUPS=groups,
        K=k,
        N=n,
        TILES=len(plan),
        TRANSPOSED=transposed,
        TOGETHER=grouped.ROWS_TOGETHER,
    )


def grouped_sums(x: jax.Array, g: jax.Array, sizes: jax.Array) -> jax.Array | None:
    """See ``pallas_kernels.grouped_sums``."""
    k, n, groups = x.shape[1], g.shape[1], len(sizes)
    if not (len(x) and groups and k and n) or not _fits(x.dtype, n=k * n):
        return None
    tile = grouped.tile_for(compute_capability(), x.dtype)
    return _grouped_call(
        grouped.sums_kernel,
        (x, g, grouped.plan_of_sums(sizes)),
        (groups, k, n),
        groups * -(-k // tile.rows) * -(-n // tile.columns),
        tile,
        K=k,
        N=n,
    )


_COLUMNS = 32
"""Columns of a state that a program carries: 32 heads of 128 then fill a chip of 132 multiprocessors."""

_KEYS = {80: (128, 128), 90: (256, 128), 100: (256, 64)}
"""The widest keys that a chip's shared memory holds for a chunk, in bf16 and in fp32; elsewhere (128, 64).

A chunk of keys of 128 in fp32 takes 120 KB, and on B200 256 KB. Hopper and B200 have 227 KB, A100 163, the
chips of workstations 99.
"""


def _has_delta_rule(value: jax.Array, state: jax.Array) -> bool:
    """Whether the kernels support these dtypes and sizes."""
    batch, heads, dim, width = state.shape
    programs = max(batch * heads, value.shape[1] // delta_chunks_reference.CHUNK)
    powers = all(16 <= size <= 256 and size & (size - 1) == 0 for size in (dim, width))
    widest = _KEYS.get(compute_capability(), (128, 64))[value.dtype == jnp.float32]
    fits = _fits(value.dtype, n=width, rows=programs) and max(dim, width) <= widest
    return powers and value.size > 0 and fits


def delta_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array, beta: jax.Array | None,
    documents: jax.Array, state: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array] | None:  # fmt: skip
    """See ``pallas_kernels.delta_chunks``."""
    if not _has_delta_rule(value, state):
        return None
    launch = _DeltaRule(query, value, log_decay, beta)
    scores, _, written, removed, *factors = launch.prepare(
        query, key, value, log_decay, documents, keep=False
    )
    reads, writes, decay = factors
    wrote, before, last = launch.scan(
        delta_chunks.scan_kernel,
        (key, written, removed, writes, decay, state),
        (_like(written), launch.states(state), _like(state)),
        state,
    )
    (out,) = launch.over_chunks(
        delta_chunks.read_kernel, (query, scores, reads, wrote, before), (_like(value),), **launch.by_channel
    )
    return out, before, last


def delta_rule_backward(
    query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array, beta: jax.Array | None,
    documents: jax.Array, state: jax.Array, before: jax.Array, of_out: jax.Array, of_last: jax.Array,
) -> tuple[jax.Array | None, ...] | None:  # fmt: skip
    """See ``pallas_kernels.delta_chunks``."""
    if not _has_delta_rule(value, state):
        return None
    launch = _DeltaRule(query, value, log_decay, beta)
    scores, inverse, written, removed, *factors = launch.prepare(
        query, key, value, log_decay, documents, keep=True
    )
    of_wrote, of_after, of_state = launch.scan(
        delta_chunks.backward_scan_kernel,
        (query, key, scores, removed, *factors, of_out, of_last),
        (_like(written), launch.states(state), _like(state)),
        state,
    )
    over = -1 if launch.channels else (-2, -1)
    of_decay = jnp.sum(of_after.astype(jnp.float32) * before.astype(jnp.float32), axis=over)
    of_keys = jax.ShapeDtypeStruct((*value.shape[:3], key.shape[3]), value.dtype)
    of_query, of_key, of_removed, of_total = launch.over_chunks(
        delta_chunks.read_gradient_kernel,
        (query, key, log_decay, documents, written, removed, before, of_out, of_wrote, of_after, of_decay),
        (of_keys, of_keys, _like(removed), launch.of_total),
        **launch.constants,
    )
    of_key, of_value, of_log_decay, of_beta = launch.over_chunks(
        delta_chunks.write_gradient_kernel,
        (
            *(key, value, log_decay, launch.beta(log_decay), documents, inverse, written, removed),
            *(of_wrote, of_removed, of_key, of_total),
        ),
        (of_keys, _like(value), _like(log_decay), jax.ShapeDtypeStruct(value.shape[:3], jnp.float32)),
        **launch.constants,
    )

    def over_heads(x: jax.Array) -> jax.Array:
        """The sum over the heads of values that share a query and a key."""
        shared = x.reshape(*query.shape[:3], -1, query.shape[3])
        return jnp.sum(shared.astype(jnp.float32), axis=3).astype(x.dtype)

    of_rows = over_heads(of_query), over_heads(of_key), of_value, of_log_decay
    return *of_rows, None if beta is None else of_beta, of_state


class _DeltaRule:
    """Launches the kernels for rows of queries, keys and values."""

    def __init__(
        self, query: jax.Array, value: jax.Array, log_decay: jax.Array, beta: jax.Array | None
    ) -> None:
        (batch, time, key_heads, dim), (*_, heads, width) = query.shape, value.shape
        self.dtype, self.rows, self.chunks = value.dtype, batch * heads, time // delta_chunks_reference.CHUNK
        self.sizes = {"HEADS": heads, "KEY_HEADS": key_heads, "DIM": dim, "VALUE_DIM": width}
        self.exact, self._beta = self.dtype == jnp.float32, beta
        self.channels = log_decay.ndim == 4
        self.by_channel = {"CHANNELS": self.channels}
        self.constants = {"EXACT": self.exact, "DELTA": beta is not None, **self.by_channel}
        tokens, each = delta_chunks_reference.CHUNK, [dim] if self.channels else []
        (self.of_total,) = self._of_chunks(((tokens, *each), jnp.float32))

    def beta(self, log_decay: jax.Array) -> jax.Array:
        """Beta; if the rule has none, some array, which no kernel reads."""
        return log_decay if self._beta is None else self._beta

    def prepare(
        self, query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array, documents: jax.Array,
        *, keep: bool,
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        """All chunks' scores, inverses (if ``keep``), ``written``, ``removed`` and factors."""
        tokens, fp32, delta = delta_chunks_reference.CHUNK, jnp.float32, self._beta is not None
        square, dim, width = (tokens, tokens), self.sizes["DIM"], self.sizes["VALUE_DIM"]
        low = ((tokens, width), self.dtype), ((tokens, dim), self.dtype)
        each = (((tokens,), fp32), ((tokens,), fp32), ((), fp32))
        if self.channels:
            each = low[1], low[1], ((dim,), fp32)
        inverse = square if keep and delta else ()  # () is not written
        return self.over_chunks(
            delta_chunks.prepare_kernel,
            (query, key, value, log_decay, self.beta(log_decay), documents),
            self._of_chunks((square, self.dtype), (inverse, fp32), *low, *each),
            **self.constants,
            KEEP=keep,
        )

    def scan(
        self, kernel: Any, arrays: tuple[jax.Array, ...], out: tuple[jax.ShapeDtypeStruct, ...],
        state: jax.Array,
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        """Launch a kernel that carries a state over chunks, and loads as many of them ahead as fit."""
        grid = -(-state.shape[3] // _COLUMNS), self.rows
        stages = 3 if compute_capability() in _KEYS else 2  # workstations' chips have less memory
        stages = 1 if self.exact or self.sizes["DIM"] > 128 else stages
        columns = min(_COLUMNS, state.shape[3])
        return self._over(kernel, arrays, out, grid, stages, COLUMNS=columns, **self.by_channel)

    def states(self, state: jax.Array) -> jax.ShapeDtypeStruct:
        """A state for each chunk, in the rows' dtype."""
        return self._of_chunks((state.shape[2:], self.dtype))[0]

    def _of_chunks(self, *each: tuple[tuple[int, ...], Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Results with these shapes and dtypes for each chunk of each head."""
        return tuple(jax.ShapeDtypeStruct((self.chunks, self.rows, *shape), dtype) for shape, dtype in each)

    def over_chunks(
        self, kernel: Any, arrays: tuple[jax.Array, ...], out: tuple[jax.ShapeDtypeStruct, ...],
        **constants: bool,
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        """Launch a kernel that has a program for each chunk of each head."""
        return self._over(kernel, arrays, out, (self.rows, self.chunks), 1, **constants)

    def _over(
        self, kernel: Any, arrays: tuple[jax.Array, ...], out: tuple[jax.ShapeDtypeStruct, ...],
        grid: tuple[int, int], stages: int, **constants: Any,
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        given = *arrays, self.chunks
        sizes = {"TOKENS": delta_chunks_reference.CHUNK, **self.sizes}
        return _launch(kernel, given, out, grid, 4, stages, contracts=True, **sizes, **constants)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
