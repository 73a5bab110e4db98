"""The bodies of the kernels, which equal their specification, ``pallas_kernels.reference``, bit for bit.

A program handles one tile of blocks (see ``tiles``) in registers, from loads to stores. The last tile of a
row ends with the row. It may overlap the previous tile, and then both write the same bytes.

Two things rely on the hardware. It converts NaN to the integer 0, the specified code of dead blocks. And it
may contract a product with a following addition, because all such products are exact.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.formats import BITS, QMAX
from pallas_kernels.mosaic.tiles import Tile, store
from pallas_kernels.reference import (
    HALF_RANGE,
    INF_BITS,
    MAX_SCALE_BITS,
    MIN_SCALE_BITS,
    NAN_SCALE,
    to_bits,
    to_float,
)

TILE_AXIS = "tile"
"""Name of the grid's only axis."""
CODES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.int4}
"""The dtypes of codes in Mosaic."""
_ONE_BF16 = 0x3F80


@dataclass(frozen=True)
class Rows:
    """The form of payload rows.

    Attributes:
        fmt: wire format.
        blocks: blocks of a row.
        block: elements of a block.
    """

    fmt: str
    blocks: int
    block: int

    @property
    def codes(self) -> int:
        """Codes of a row."""
        return self.blocks * self.block

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""
        return self.codes * BITS[self.fmt] // 8

    @property
    def nbytes(self) -> int:
        """Bytes of a row, including scales."""
        return self.code_bytes + 2 * self.blocks

    def codes_of(self, ref: Any, row: Any) -> Any:
        """The codes [blocks, block] of a GMEM ref [rows, codes, and scales viewed as codes]."""
        return ref.at[row, pl.ds(0, self.codes)].reshape(self.blocks, self.block)

    def scales_of(self, ref: Any, row: Any) -> Any:
        """The scales [blocks] of a GMEM ref bf16[rows, codes viewed as scales, and scales]."""
        return ref.at[row, pl.ds(self.code_bytes // 2, self.blocks)]


def div_rem(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of int32 numbers of at least 0. ``//`` and ``%`` would also compare signs."""
    return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))


def my_tile(tile: Tile, blocks: int) -> tuple[jax.Array, jax.Array]:
    """(row, first block) of this program, for rows of ``blocks`` blocks."""
    program = lax.axis_index(TILE_AXIS)
    tiles = pl.cdiv(blocks, tile.blocks)
    row, index = div_rem(program, tiles)
    return row, jnp.minimum(index * tile.blocks, blocks - tile.blocks)


def _top(lanes: list[jax.Array]) -> jax.Array:
    """Bits of the largest magnitude in each row of all lanes: int32[blocks] of fp32[blocks, n]."""
    tops = lanes[0] if len(lanes) == 1 else reduce(jnp.maximum, map(jnp.abs, lanes))
    # The maximum is over integers, because XLA's reductions of rows of floats lose NaN on CPUs.
    return jnp.max(to_bits(tops) & 0x7FFFFFFF, axis=1)


def _scales(top: jax.Array, fmt: str) -> tuple[jax.Array, jax.Array]:
    """Scale bits (int32) and inverse scales (fp32, 0 for dead blocks) of maxima given as fp32 bits."""
    peak = to_float(top)
    exact = to_bits(peak * np.float32(1 / QMAX[fmt]))
    bad = (to_bits(peak) >= INF_BITS) | (exact > MAX_SCALE_BITS)
    dead = bad | (exact < MIN_SCALE_BITS)
    rounded = jnp.where(dead, _ONE_BF16, (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16)
    scale = jnp.where(dead, jnp.where(bad, NAN_SCALE, 0), rounded)
    mantissa = _reciprocal(to_float(((rounded & 0x7F) << 16) | (_ONE_BF16 << 16)))
    inverse = mantissa * to_float((254 - (rounded >> 7)) << 23)
    return scale, jnp.where(dead, np.float32(0), inverse)


def _reciprocal(x: jax.Array) -> jax.Array:
    """1 / x correctly rounded, for 1 <= x < 2 in bf16's precision. The chip's reciprocal is some ulps off.

    This is one Newton step. The guess is split into two parts with exact products with x. So the compiler may
    fuse either product with the following subtraction.
    """
    guess = np.float32(1) / x
    high = to_float(to_bits(guess) & ~0xFFF)
    error = (np.float32(1) - x * high) - x * (guess - high)
    return guess + guess * error


def _pack(lanes: list[jax.Array], inverse: jax.Array, fmt: str, dtype: Any) -> jax.Array:
    """Codes of the lanes times ``inverse``, packed into integers of ``dtype``, the first lane lowest."""
    if fmt == "fp8":
        # Conversions to fp8 keep NaN and the sign of zero.
        (lane,) = lanes
        y = jnp.where(inverse == 0, np.float32(0), lane * inverse)
        return lax.bitcast_convert_type(y.astype(jnp.float8_e4m3fn), dtype)
    codes = [jnp.round(lane * inverse).astype(jnp.int32) for lane in lanes]
    bits = BITS[fmt]
    word = codes[-1]
    for code in codes[-2::-1]:
        word = (word << bits) + code
    if len(codes) > 1:
        # A negative code has borrowed from the code above. Undoing that saves a mask per code.
        signs = sum(1 << (bits * k + bits - 1) for k in range(len(codes)))
        word = (word + signs) ^ signs
    return word.astype(dtype)


def store_encoded(lanes: list[jax.Array], out_ref: Any, row: Any, start: Any, tile: Tile, out: Rows) -> None:
    """Encode numbers as the blocks of a payload row from ``start`` on.

    Args:
        lanes: each fp32[blocks, block / lanes]. Neighbours in a block are neighbours in this list.
        out_ref: [rows, all codes and scales of a row], integers with the bits of the lanes' codes.
        row: the payload row.
        start: the first block.
        tile: the layout of the lanes in registers.
        out: the form of payload rows.
    """
    scale, inverse = _scales(_top(lanes), out.fmt)
    words = _pack(lanes, tile.spread(inverse), out.fmt, out_ref.dtype)
    here = pl.ds(start, tile.blocks)
    region = out_ref.at[row, pl.ds(0, out.blocks * tile.width)].reshape(out.blocks, tile.width)
    store(region.at[here], words)
    # The scale is stored in pieces of the same width: 2 of 8 bits, or 4 of 4 bits.
    bits = len(lanes) * BITS[out.fmt]
    count = 16 // bits
    region = out_ref.at[row, pl.ds(out.blocks * tile.width, out.blocks * count)]
    pieces = tile.pieces(scale, bits, count).astype(out_ref.dtype)
    store(region.reshape(out.blocks, count).at[here], pieces)


def unpack_pairs(words: jax.Array) -> list[jax.Array]:
    """The two bf16 numbers of each int32 word as fp32, the low half first."""
    return [to_float(words << 16), to_float(words & ~0xFFFF)]


def load_decoded(
    codes_ref: Any, scales_ref: Any, row: Any, start: Any, tile: Tile, source: Rows, dtype: Any
) -> jax.Array:
    """Decode the blocks of a payload row from ``start`` on into dtype[blocks, block], bf16 or fp32.

    Codes are exact in bf16, and the product is rounded once. So bf16 arithmetic gives the specified bits.
    """
    codes = tile.load(source.codes_of(codes_ref, row), start)
    scale = tile.load_each(source.scales_of(scales_ref, row), start)
    if dtype == jnp.bfloat16 and source.fmt in HALF_RANGE:
        return codes.astype(jnp.bfloat16) * tile.spread(scale)
    values = _values(codes) * tile.spread(scale.astype(jnp.float32))
    return values.astype(dtype)


def _values(codes: jax.Array) -> jax.Array:
    """fp32 values of codes. Integers are converted through bf16, which takes fewer instructions."""
    if codes.dtype == jnp.float8_e4m3fn:
        return codes.astype(jnp.float32)
    return codes.astype(jnp.bfloat16).astype(jnp.float32)
