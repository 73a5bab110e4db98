"""The layout of a tile of blocks in the registers of a program's 128 threads.

A tile is [blocks, elements of a block], one block per row. ``lanes`` neighbouring threads share a row. Each
thread holds vectors of ``vector`` neighbouring elements, and a load or store moves one vector. So rows are
read in pieces of lanes * vector elements, a block's maximum takes log2(lanes) shuffles, and nothing passes
through shared memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

_WARPS = 4
_WARP_LANES = 32
_MIN_LANES = 8


def _layout(tiles: Any, warp_dims: Any, lane_dims: Any) -> plgpu.Layout:
    layout = mgpu.TiledLayout(
        plgpu.Tiling(tiles), warp_dims, lane_dims, vector_dim=-1, _check_canonical=False
    ).canonicalize()
    parts = (layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)
    return plgpu.Layout.TILED(*parts)  # pyrefly: ignore[bad-return]  (a member is callable)


@dataclass(frozen=True)
class Tile:
    """A program's share of the work.

    Attributes:
        lanes: threads that share a block, a power of two up to 32.
        vector: neighbouring elements moved by one load or store.
        blocks: blocks of the tile, a multiple of 128 / lanes.
        width: elements of a block.
    """

    lanes: int
    vector: int
    blocks: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """The tile's shape, (blocks, width)."""
        return self.blocks, self.width

    @property
    def layout(self) -> plgpu.Layout:
        """The layout of arrays [blocks, width]."""
        rows, columns = _WARP_LANES // self.lanes, self.lanes * self.vector
        return _layout(((_WARPS * rows, columns), (rows, columns), (self.vector,)), (-5,), (-3, -2))

    def _pieces_layout(self, count: int) -> plgpu.Layout:
        """The layout of [blocks, count], in which every thread of a block holds its whole row."""
        rows = _WARP_LANES // self.lanes
        tiles = ((_WARPS * rows, count), (rows, count), (1, count))
        return _layout(tiles, (-6,), (-4, plgpu.Replicated(self.lanes)))

    def load(self, ref: Any, start: jax.Array) -> jax.Array:
        """[blocks, width] of a GMEM ref [all blocks, width], from block ``start`` on."""
        rows = ref.at[pl.ds(start, self.blocks)]
        return plgpu.load(rows, layout=self.layout, optimized=False)

    def load_each(self, ref: Any, start: jax.Array) -> jax.Array:
        """[blocks] of a GMEM ref [all blocks], from ``start`` on."""
        values = ref.at[pl.ds(start, self.blocks)]
        return plgpu.load(values, layout=self.layout.reduce(1), optimized=False)

    def spread(self, values: jax.Array) -> jax.Array:
        """Broadcast [blocks], one number per block, to [blocks, width]."""
        wide = lax.broadcast_in_dim(values, self.shape, (0,))
        return plgpu.layout_cast(wide, self.layout)

    def pieces(self, values: jax.Array, bits: int, count: int) -> jax.Array:
        """Split int32[blocks] into ``count`` pieces of ``bits`` bits, lowest first: int32[blocks, count]."""
        layout = self._pieces_layout(count)
        shape = (self.blocks, count)
        wide = plgpu.layout_cast(lax.broadcast_in_dim(values, shape, (0,)), layout)
        return wide >> plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) * bits


def store(ref: Any, values: jax.Array) -> None:
    """Write an array in its layout to a ref of its shape, even in narrow vectors or with bank conflicts."""
    plain: Callable[..., None] | None = getattr(plgpu, "store", None)
    if plain is None:
        ref[...] = values
    else:
        # From JAX 0.12 an assignment refuses vectors of less than four bytes, and bank conflicts.
        plain(ref, values, optimized=False)


def choose_tile(blocks: int, width: int, vector: int, elements: int) -> Tile | None:
    """The tile for rows of ``blocks`` blocks; None if a row is too short for any tile.

    Args:
        blocks: blocks of a row.
        width: elements of a block, a power of two.
        vector: elements that one load or store may move.
        elements: elements per thread, if the row is long enough.
    """
    most = min(_WARP_LANES, width)
    lanes = min(most, max(_MIN_LANES, width // elements))
    threads = _WARPS * _WARP_LANES
    while lanes < most and threads // lanes > blocks:
        lanes *= 2
    rows = threads // lanes
    if rows > blocks:
        return None
    repeats = 1
    while 2 * repeats * rows <= blocks and 2 * repeats * width <= elements * lanes:
        repeats *= 2
    return Tile(lanes, min(vector, width // lanes), repeats * rows, width)
