"""The functions of the reference, with the same arguments, computed by the Pallas kernels.

The codec kernels encode and decode. They support bf16 and fp32 numbers, int8, int4 and fp8, rounding to
nearest, no rotation, and rows of at least four blocks. The grouped matmuls support bf16 and fp8 on Hopper,
for matrices with sides that are multiples of 128 bytes. For all other arguments the functions return None.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grouped_reference
from pallas_kernels.backends import FP8, compute_capability
from pallas_kernels.formats import BITS
from pallas_kernels.mosaic import grouped, kernels
from pallas_kernels.mosaic.kernels import Rows
from pallas_kernels.mosaic.tiles import Tile, choose_tile, store

_FLOATS = (jnp.float32, jnp.bfloat16)
_HOPPER = 90
_GROUPED_BYTES = 128
"""Bytes of a row that the grouped kernels read in one piece."""
ENCODE_ELEMENTS = 16
"""Elements encoded per thread."""
DECODE_ELEMENTS = 16
"""Elements decoded per thread."""


def _has_kernel(*fmts: str, dtypes: Sequence[Any] = (), rounding: str = "nearest", rotation: int = 0) -> bool:
    """Whether there are kernels for these formats, dtypes and options."""
    fits = all(fmt in kernels.CODES for fmt in fmts) and all(dtype in _FLOATS for dtype in dtypes)
    return fits and rounding == "nearest" and not rotation


def _vector(rows: Rows, most: int, count: int) -> int:
    """The number of elements, at most ``most``, that one access may move in ``count`` rows of codes.

    An access must be aligned to its size, and rows follow each other without padding.
    """
    bits = BITS[rows.fmt]
    size = most * bits // 8
    return most if count == 1 else max(gcd(rows.nbytes, size), 1) * 8 // bits


def _view(payload: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """uint8[rows, n] as dtype[rows, n * 8 / bits]; no bytes move."""
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits
    if bits > 8:
        payload = payload.reshape(payload.shape[0], -1, bits // 8)
    return lax.bitcast_convert_type(payload, dtype).reshape(payload.shape[0], -1)


def _as_bytes(words: jax.Array) -> jax.Array:
    """Rows of integers of 4 to 16 bits as uint8 rows; no bytes move."""
    if words.dtype == jnp.int4:
        words = words.reshape(words.shape[0], -1, 2)
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(words.shape[0], -1)


def _launch(
    body: Callable[..., None], out: jax.ShapeDtypeStruct, rows: int, blocks: int, tile: Tile,
    *arrays: jax.Array,
) -> jax.Array:  # fmt: skip
    """Run ``body`` once for every tile of ``rows`` rows of ``blocks`` blocks."""
    call = plgpu.kernel(
        body,
        out_type=out,
        grid=(rows * -(-blocks // tile.blocks),),
        grid_names=(kernels.TILE_AXIS,),
        compiler_params=plgpu.CompilerParams(
            # No thread reads data that another thread writes.
            unsafe_no_auto_barriers=True,
            # Layouts are explicit, not inferred, and conversions need no clamps.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return call(*arrays)


def _encode(
    x: jax.Array, out: Rows, rows: int, place: Callable[[jax.Array], tuple[Any, Any]]
) -> jax.Array | None:
    """Encode bf16 or fp32[pieces, n] into uint8[rows, nbytes]; None if no tile fits.

    place(piece) is the (row, first block) of a piece in the payload. Integer codes are computed from words of
    two bf16 numbers.
    """
    pieces, n = x.shape
    blocks = n // out.block
    lanes = 2 if x.dtype == jnp.bfloat16 and out.fmt != "fp8" else 1
    # A load moves 16 bytes.
    vector = _vector(out, 16 // x.dtype.itemsize, rows) // lanes
    tile = choose_tile(blocks, out.block // lanes, vector, ENCODE_ELEMENTS // lanes) if vector else None
    if tile is None:
        return None

    def encode_kernel(x_ref: Any, out_ref: Any) -> None:
        piece, start = kernels.my_tile(tile, blocks)
        row, first = place(piece)
        x = tile.load(x_ref.at[piece], start)
        numbers = kernels.unpack_pairs(x) if lanes == 2 else [x.astype(jnp.float32)]
        kernels.store_encoded(numbers, out_ref, row, first + start, tile, out)

    if lanes == 2:
        x = lax.bitcast_convert_type(x.reshape(pieces, -1, 2), jnp.int32)
    x = x.reshape(pieces, blocks, tile.width)
    bits = lanes * BITS[out.fmt]  # a word holds the codes of the lanes
    kind = jax.ShapeDtypeStruct((rows, out.nbytes * 8 // bits), jnp.dtype(f"int{bits}"))
    return _as_bytes(_launch(encode_kernel, kind, pieces, blocks, tile, x))


def encode(
    x: jax.Array, seed: jax.Array | None, *, fmt: str, block: int | None, rounding: str, rotation: int
) -> jax.Array | None:
    """See ``pallas_kernels.encode``."""
    del seed  # rounding to nearest draws no random bits
    if block is None or not _has_kernel(fmt, dtypes=(x.dtype,), rounding=rounding, rotation=rotation):
        return None
    return _encode(x, Rows(fmt, x.shape[1] // block, block), x.shape[0], lambda piece: (piece, 0))


def encode_reordered(
    g: jax.Array, seed: jax.Array | None, *,
    fmt: str, local: int, nodes: int, chunks: int, block: int | None, rounding: str, rotation: int,
) -> jax.Array | None:  # fmt: skip
    """See ``pallas_kernels.encode_reordered``."""
    del seed
    if block is None or not _has_kernel(fmt, dtypes=(g.dtype,), rounding=rounding, rotation=rotation):
        return None
    pieces = local * nodes * chunks
    blocks = g.size // (pieces * block)

    def place(piece: jax.Array) -> tuple[jax.Array, jax.Array]:
        row, chunk = kernels.div_rem(piece, chunks)
        peer, node = kernels.div_rem(row, nodes)
        return chunk * local + peer, node * blocks

    payload = _encode(g.reshape(pieces, -1), Rows(fmt, nodes * blocks, block), chunks * local, place)
    return None if payload is None else payload.reshape(chunks, local, -1)


def decode(payload: jax.Array, *, fmt: str, n: int, block: int | None, dtype: jnp.dtype) -> jax.Array | None:
    """See ``pallas_kernels.decode``."""
    if block is None or not _has_kernel(fmt, dtypes=(dtype,)):
        return None
    rows, source = payload.shape[0], Rows(fmt, n // block, block)
    # A store moves 16 bytes.
    vector = _vector(source, 16 // jnp.dtype(dtype).itemsize, rows)
    tile = choose_tile(source.blocks, block, vector, DECODE_ELEMENTS)
    if tile is None:
        return None

    def decode_kernel(codes_ref: Any, scales_ref: Any, out_ref: Any) -> None:
        row, start = kernels.my_tile(tile, source.blocks)
        x = kernels.load_decoded(codes_ref, scales_ref, row, start, tile, source, dtype)
        store(out_ref.at[row, pl.ds(start, tile.blocks)], x)

    out = jax.ShapeDtypeStruct((rows, source.blocks, block), dtype)
    views = _view(payload, kernels.CODES[fmt]), _view(payload, jnp.bfloat16)
    return _launch(decode_kernel, out, rows, source.blocks, tile, *views).reshape(rows, n)


def _enough(x: jax.Array) -> jax.Array:
    """Pad the rows to at least as many as a warpgroup multiplies. Added rows belong to no group."""
    return jnp.pad(x, ((0, max(grouped.HALF - len(x), 0)), (0, 0)))


def _has_grouped_kernels(dtype: jnp.dtype, rows: int, groups: int, *sides: int) -> bool:
    """Whether the grouped kernels support these numbers of rows and groups, and matrices with these sides."""
    piece = _GROUPED_BYTES // dtype.itemsize
    fits = compute_capability() == _HOPPER and dtype in (jnp.bfloat16, *FP8) and rows > 0 and groups > 0
    return fits and all(side > 0 and side % piece == 0 for side in sides)


def grouped_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array | None:
    """See ``pallas_kernels.grouped_rows``."""
    if not _has_grouped_kernels(x.dtype, len(x), *w.shape):
        return None
    rows = _enough(x)
    plan = grouped.rows_plan(sizes, len(rows))
    return grouped.rows_product(rows, w, plan, transposed=transposed, tuning=grouped.Tuning())[: len(x)]


def grouped_rows_fp8(
    x: jax.Array, w: jax.Array, sizes: jax.Array, scale: jax.Array, *, transposed: bool, dtype: jnp.dtype
) -> jax.Array | None:
    """See ``pallas_kernels.grouped_rows_fp8``."""
    if dtype != jnp.bfloat16 or not _has_grouped_kernels(x.dtype, len(x), *w.shape):
        return None
    along = w if transposed else jnp.swapaxes(w, 1, 2)
    rows = _enough(x)
    plan = grouped.rows_plan(sizes, len(rows))
    given = (rows, along, plan, scale.reshape(1))
    return grouped.rows_product(*given, transposed=True, tuning=grouped.Tuning())[: len(x)]


def grouped_sums(x: jax.Array, g: jax.Array, sizes: jax.Array) -> jax.Array | None:
    """See ``pallas_kernels.grouped_sums``."""
    if not _has_grouped_kernels(x.dtype, len(x), len(sizes), x.shape[1], g.shape[1]):
        return None
    tuning = grouped.Tuning()
    plan = grouped.sums_plan(sizes, x.shape[1], g.shape[1], tuning)
    return grouped.sums_of_products(_enough(x), _enough(g), plan, groups=len(sizes), tuning=tuning)


def grouped_sums_fp8(
    x: jax.Array, g: jax.Array, sizes: jax.Array, scale: jax.Array, *, dtype: jnp.dtype
) -> jax.Array | None:
    """See ``pallas_kernels.grouped_sums_fp8``."""
    if dtype != jnp.bfloat16 or not _has_grouped_kernels(x.dtype, x.shape[1], len(sizes), len(x), len(g)):
        return None
    tuning, own = grouped.PROMOTED, grouped_reference.padded_sizes(sizes)
    plan = grouped.sums_plan(own, len(x), len(g), tuning, grouped.step_of(x.dtype))
    return grouped.sums_of_columns(x, g, plan, scale.reshape(1), groups=len(sizes), tuning=tuning)
