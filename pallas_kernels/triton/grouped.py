"""Triton kernels of ``pallas_kernels.gather_rows``, ``grouped_rows`` and ``grouped_sums``.

They are for any CUDA chip and any sides. A program computes one tile of a result. It reads the tile's rows
and group from a plan, which XLA computes from the sizes of the groups. Sums are in fp32. Products of fp32
numbers do not use TF32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl


class Tile(NamedTuple):
    """The tiles of a kernel.

    Attributes:
        rows: rows of the result (for sums: of a group's matrix).
        columns: columns of the result.
        step: elements of the contracted axis at a time.
        warps: warps of a program.
        stages: steps with operands in shared memory or on their way to it.
    """

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


# A block has 227 KB of shared memory on Hopper and B200, 163 on A100, and 99 on the chips of workstations
# (86, 89 and 120). Each stage holds a step of both operands. Two warpgroups (8 warps) share the widest tile,
# because 128 x 256 sums do not fit into the registers of one. On an H200 these tiles were within 9% of the
# fastest of seven for each product and shape in docs/kernels.md.
_BF16 = {
    80: Tile(128, 128, 64, 8, 4),
    86: Tile(128, 128, 32, 8, 4),
    90: Tile(128, 256, 64, 8, 4),
    100: Tile(128, 256, 64, 8, 4),
    120: Tile(128, 128, 32, 8, 4),
}
_FP32 = Tile(64, 64, 16, 4, 3)
"""For fp32, without tensor cores: every thread has 32 sums and reads its operands from shared memory."""
_LEAST = 16
"""Rows of the smallest tile that tensor cores multiply."""
ROWS_TOGETHER = 8
"""Tiles of rows computed at about the same time, which share a matrix's columns in the L2 cache."""


def tile_for(chip: int, dtype: jnp.dtype, rows_per_group: int | None = None) -> Tile:
    """The tiles for a compute capability (times ten) and a dtype.

    ``rows_per_group`` is the average number of rows of a group, if a tile's rows belong to groups. Rows of a
    tile beyond its group are computed in vain.
    """
    tile = _FP32 if dtype == jnp.float32 else _BF16[max((c for c in _BF16 if c <= chip), default=80)]
    if rows_per_group is None:
        return tile
    rows = max(_LEAST, min(tile.rows, int(triton.next_power_of_2(rows_per_group))))
    return tile._replace(rows=rows, warps=tile.warps if rows >= 64 else 4)


def plan_of_rows(sizes: jax.Array, rows: int, tile: int) -> jax.Array:
    """The tiles of rows, int32 [tiles, 3]: the group, the first row, and the row after the group's last one.

    The rows of no group form another group. The number of tiles is sufficient for any sizes. Unused tiles
    have no rows.
    """
    stops = jnp.cumsum(jnp.concatenate([sizes, rows - jnp.sum(sizes, keepdims=True)]), dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), stops[:-1]])
    counts = (stops - starts + tile - 1) // tile
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(rows // tile + len(stops), dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32), len(sizes))
    first = starts[group] + (index - (ends - counts)[group]) * tile
    return jnp.stack([group, first, stops[group]], axis=1)


def plan_of_sums(sizes: jax.Array) -> jax.Array:
    """The groups, largest first, int32 [groups, 3]: the group, its first row, and the row after its last one.

    A large group takes longest, so its programs start first.
    """
    stops = jnp.cumsum(sizes, dtype=jnp.int32)
    group = jnp.argsort(-sizes).astype(jnp.int32)
    return jnp.stack([group, (stops - sizes)[group], stops[group]], axis=1)


@triton.jit
def rows_kernel(
    x_ptr,
    w_ptr,
    plan_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    TILES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """out[ROWS, N] = x[ROWS, K] @ w[group], w of [GROUPS, K, N] or, TRANSPOSED, [GROUPS, N, K]."""
    across: tl.constexpr = (N + TILE_N - 1) // TILE_N
    band = tl.program_id(0) // (TOGETHER * across)
    height = tl.minimum(TILES - band * TOGETHER, TOGETHER)
    within = tl.program_id(0) % (TOGETHER * across)
    tile = band * TOGETHER + within % height
    n = within // height * TILE_N + tl.arange(0, TILE_N)
    group = tl.load(plan_ptr + 3 * tile)
    first = tl.load(plan_ptr + 3 * tile + 1)
    stop = tl.load(plan_ptr + 3 * tile + 2)
    if first < stop:
        m = first + tl.arange(0, TILE_M)
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        # Rows beyond the group are multiplied but not stored. Rows beyond the array are not read.
        rows = x_ptr + tl.minimum(m, ROWS - 1).to(tl.int64)[:, None] * K
        matrix = w_ptr + tl.minimum(group, GROUPS - 1).to(tl.int64) * (K * N)
        steps = tl.where(group < GROUPS, (K + STEP - 1) // STEP, 0)  # the rows of no group are zeros
        for step in range(steps):
            k = step * STEP + tl.arange(0, STEP)
            if K % STEP == 0:
                a = tl.load(rows + k[None, :])
            else:
                a = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            if TRANSPOSED:
                place = n[:, None] * K + k[None, :]
                inside = (n < N)[:, None] & (k < K)[None, :]
            else:
                place = k[:, None] * N + n[None, :]
                inside = (k < K)[:, None] & (n < N)[None, :]
            if K % STEP == 0 and N % TILE_N == 0:
                b = tl.load(matrix + place)
            else:
                b = tl.load(matrix + place, mask=inside, other=0.0)
            total = tl.dot(a, tl.trans(b) if TRANSPOSED else b, total, input_precision="ieee")
        out = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(m < stop)[:, None] & (n < N)[None, :])


@triton.jit
def sums_kernel(
    x_ptr,
    g_ptr,
    plan_ptr,
    out_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
):
    """out[group] = the sum of x[row]^T g[row] over the group's rows, of [rows, K] and [rows, N]."""
    down: tl.constexpr = (K + TILE_M - 1) // TILE_M
    across: tl.constexpr = (N + TILE_N - 1) // TILE_N
    place = tl.program_id(0) // (down * across)
    within = tl.program_id(0) % (down * across)
    k = within % down * TILE_M + tl.arange(0, TILE_M)
    n = within // down * TILE_N + tl.arange(0, TILE_N)
    group = tl.load(plan_ptr + 3 * place)
    first = tl.load(plan_ptr + 3 * place + 1)
    stop = tl.load(plan_ptr + 3 * place + 2)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(first, stop, STEP):
        row = start + tl.arange(0, STEP)
        # Both are masked, because another group's rows may be infinite, and infinity times zero is NaN.
        own = (row < stop)[:, None]
        wide = row.to(tl.int64)[:, None]
        a = tl.load(x_ptr + wide * K + k[None, :], mask=own & (k < K)[None, :], other=0.0)
        b = tl.load(g_ptr + wide * N + n[None, :], mask=own & (n < N)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
    out = out_ptr + group.to(tl.int64) * (K * N) + k[:, None] * N + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(k < K)[:, None] & (n < N)[None, :])


@triton.jit
def gather_kernel(x_ptr, index_ptr, out_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """out[row] = x[index[row]], rows of WIDTH elements."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    place = tl.load(index_ptr + row).to(tl.int64) * WIDTH + n
    tl.store(out_ptr + row * WIDTH + n, tl.load(x_ptr + place, mask=n < WIDTH), mask=n < WIDTH)
