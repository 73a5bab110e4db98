"""Specification of ``pallas_kernels.grouped_rows``, ``grouped_sums``, their fp8 forms, and fp8 operands.

The rows are cut into tiles. Each tile is multiplied once for each group with rows in it. So the cost depends
on the number of rows, and hardly on the number of groups.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class _Tiles(NamedTuple):
    """The pairs of a tile and a group with rows in it, in order.

    There are fewer pairs than tiles and groups together, which is the arrays' length. Entries after the last
    pair repeat it without rows.

    Attributes:
        group: index of the pair's group.
        offset: the tile's first row.
        start: the group's first row.
        stop: the row after the group's last row; 0 after the last pair.
        first: whether the pair is the first of its group.
    """

    group: Array
    offset: Array
    start: Array
    stop: Array
    first: Array


def _tile_rows(rows: int, groups: int) -> int:
    """Rows of a tile: about as many as a group has, so that few rows are computed twice."""
    return int(np.clip(1 << max(rows // groups, 1).bit_length(), 8, 128))


def _tiles(sizes: Array, rows: int, tile: int) -> _Tiles:
    stops = jnp.cumsum(sizes)
    starts = stops - sizes
    counts = jnp.where(sizes > 0, (stops - 1) // tile - starts // tile + 1, 0)
    ends = jnp.cumsum(counts)
    index = jnp.arange(-(-rows // tile) + len(sizes))
    pair = jnp.clip(index, 0, jnp.maximum(ends[-1] - 1, 0))
    group = jnp.minimum(jnp.searchsorted(ends, pair, side="right"), len(sizes) - 1)
    nth = pair - (ends - counts)[group]
    real = index < ends[-1]
    offset = (starts[group] // tile + nth) * tile
    return _Tiles(group, offset, starts[group], jnp.where(real, stops[group], 0), real & (nth == 0))


def _padded(x: Array, tile: int) -> Array:
    return jnp.pad(x, ((0, -len(x) % tile), (0, 0)))


def _own(x: Array, pair: _Tiles, tile: int) -> tuple[Array, Array]:
    """The rows of a pair's tile, and a mask [tile, 1] of the rows of its group."""
    index = pair.offset + jnp.arange(tile)[:, None]
    return lax.dynamic_slice_in_dim(x, pair.offset, tile), (index >= pair.start) & (index < pair.stop)


_dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)


def grouped_rows(x: Array, w: Array, sizes: Array, *, transposed: bool) -> Array:
    """See ``pallas_kernels.grouped_rows``."""
    tile = _tile_rows(len(x), len(w))
    padded = _padded(x, tile)

    def add(out: Array, pair: _Tiles) -> tuple[Array, None]:
        rows, own = _own(padded, pair, tile)
        found = _dot(rows, w[pair.group], (((1,), (1 if transposed else 0,)), ((), ())))
        before = lax.dynamic_slice_in_dim(out, pair.offset, tile)
        after = jnp.where(own, found.astype(out.dtype), before)
        return lax.dynamic_update_slice_in_dim(out, after, pair.offset, 0), None

    out = jnp.zeros((len(padded), w.shape[1 if transposed else 2]), x.dtype)
    return lax.scan(add, out, _tiles(sizes, len(x), tile))[0][: len(x)]


def grouped_rows_fp8(
    x: Array, w: Array, sizes: Array, scale: Array, *,
    transposed: bool, dtype: jnp.dtype, multiply: Callable[..., Array] = grouped_rows,
) -> Array:  # fmt: skip
    """See ``pallas_kernels.grouped_rows_fp8``. Every fp8 number is exact in bf16 and fp32."""
    wide = jnp.promote_types(dtype, jnp.bfloat16)  # fp16 lacks the range of sums before they are scaled
    out = multiply(x.astype(wide), w.astype(wide), sizes, transposed=transposed)
    return (out * scale.astype(wide)).astype(dtype)


def grouped_sums(x: Array, g: Array, sizes: Array) -> Array:
    """See ``pallas_kernels.grouped_sums``."""
    tile = _tile_rows(len(x), len(sizes))
    padded, against = _padded(x, tile), _padded(g, tile)

    def add(carry: tuple[Array, Array], pair: _Tiles) -> tuple[tuple[Array, Array], None]:
        total, out = carry
        rows, own = _own(padded, pair, tile)
        others, _ = _own(against, pair, tile)
        # Both operands, because the rows of another group may be infinite.
        rows, others = jnp.where(own, rows, 0), jnp.where(own, others, 0)
        total = jnp.where(pair.first, 0, total) + _dot(rows, others, (((0,), (0,)), ((), ())))
        return (total, out.at[pair.group].set(total.astype(out.dtype))), None

    shape = (x.shape[1], g.shape[1])
    carry = (jnp.zeros(shape, jnp.float32), jnp.zeros((len(sizes), *shape), x.dtype))
    return lax.scan(add, carry, _tiles(sizes, len(x), tile))[0][1]


COLUMNS = 128
"""Multiple to which ``grouped_columns`` pads a group: the terms that a kernel sums before it adds in fp32."""


def padded_sizes(sizes: Array) -> Array:
    """The columns of each group in the result of ``grouped_columns``."""
    return (sizes + COLUMNS - 1) // COLUMNS * COLUMNS


def blocks_of(sizes: Array, rows: int) -> tuple[Array, Array]:
    """For each COLUMNS columns of ``grouped_columns`` their first row and the row after their last one."""
    stops, ends = jnp.cumsum(sizes), jnp.cumsum(padded_sizes(sizes))
    first = jnp.arange((rows + len(sizes) * (COLUMNS - 1)) // COLUMNS) * COLUMNS
    group = jnp.sum(first[:, None] >= ends, axis=1)
    own = jnp.minimum(group, len(sizes) - 1)
    start = stops[own] - sizes[own] + first - (ends - padded_sizes(sizes))[own]
    count = jnp.where(group < len(sizes), jnp.clip(stops[own] - start, 0, COLUMNS), 0)
    return start.astype(jnp.int32), (start + count).astype(jnp.int32)


def grouped_columns(x: Array, sizes: Array, index: Array | None) -> Array:
    """See ``pallas_kernels.grouped_columns``."""
    starts, stops = blocks_of(sizes, len(x if index is None else index))
    row = starts[:, None] + jnp.arange(COLUMNS)
    own = row < stops[:, None]
    row = jnp.where(own, row, 0)
    found = x[row if index is None else index[row]]
    return jnp.where(own[..., None], found, 0).reshape(-1, x.shape[1]).T


def cast_transpose(x: Array, scale: Array, sizes: Array | None, *, dtype: jnp.dtype) -> tuple[Array, Array]:
    """See ``pallas_kernels.cast_transpose``."""
    top = float(jnp.finfo(dtype).max)
    cast = jnp.clip(x.astype(jnp.float32) * scale, -top, top).astype(dtype)
    # Without the barrier XLA fuses the transpose with the cast, and is three times slower than with bytes.
    cast = lax.optimization_barrier(cast)
    return cast, cast.T if sizes is None else grouped_columns(cast, sizes, None)


def gather_rows(x: Array, index: Array) -> Array:
    """See ``pallas_kernels.gather_rows``."""
    return x.at[index].get(mode="promise_in_bounds")


def grouped_sums_fp8(
    x: Array, g: Array, sizes: Array, scale: Array, *,
    dtype: jnp.dtype, add: Callable[..., Array] = grouped_sums,
) -> Array:  # fmt: skip
    """See ``pallas_kernels.grouped_sums_fp8``. Every fp8 number is exact in bf16 and fp32."""
    wide = jnp.promote_types(dtype, jnp.bfloat16)
    out = add(x.T.astype(wide), g.T.astype(wide), padded_sizes(sizes))
    return (out * scale.astype(wide)).astype(dtype)
