"""Grouped matmuls in bf16 and fp8 on Hopper's tensor cores, specified by ``grouped_reference``.

Every kernel is persistent: one program per multiprocessor walks through tiles of the result. One warpgroup
copies operands to shared memory, several steps ahead and across the ends of tiles. Two other warpgroups
multiply, each half of a tile's rows. A tile has 2 x 64 rows of results. Groups may have any number of rows:

- The 64 rows of a warpgroup may start anywhere within a group. If they would end beyond the group, they start
  earlier. Two warpgroups then compute the same rows twice, with equal results. Only groups of fewer than 64
  rows are written row by row.
- A sum over a group's rows also ends with the group's last 64 rows. Rows already summed count as 0.

Tensor cores need shared memory in tiles of 8 rows of 128 bytes. A copy that cuts global memory into such
tiles can only start at every eighth row. If rows may start anywhere, copies use another view of the same
shared memory, in lines (``_views``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.mosaic.tiles import store

HALF = 64
"""Rows of a warpgroup, the fewest that Hopper's tensor cores multiply at once."""
STEP = 64
"""Terms of the sums in one copy in bf16: a swizzle of 128 bytes."""
_EIGHT = 8
"""Rows of a tile of shared memory."""
_WARPGROUPS = 2
_COPIER = 2
_REGISTERS = {"copier": 40, "others": 232}


@dataclass(frozen=True)
class Tuning:
    """The parameters of a compiled kernel.

    Attributes:
        columns: width of a tile of the result.
        stages: steps in the buffer in shared memory.
        band: tiles along the rows that are computed before tiles of the next columns.
    """

    columns: int = 256
    stages: int = 4
    band: int = 8


def step_of(dtype: DTypeLike) -> int:
    """Terms of each sum whose operands one copy to shared memory brings: 128 bytes of a row."""
    return 128 // jnp.dtype(dtype).itemsize


def _tiles(shape: tuple[int, ...], dtype: DTypeLike = jnp.bfloat16) -> Any:
    transforms = plgpu.TilingTransform((_EIGHT, step_of(dtype))), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _lines(shape: tuple[int, ...], dtype: DTypeLike = jnp.bfloat16) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(128),))


def _views(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> Any:
    """Two views of shared memory [..., rows, 128 bytes], as tiles and as lines, with one order of bytes."""
    return plgpu.RefUnion(_tiles(shape, dtype), _lines(shape, dtype))


def _both(union: Any) -> tuple[Any, Any]:
    """The two views of shared memory: tiles for tensor cores and warpgroups, lines for copies."""
    return union[0], union[1]


def multiprocessors() -> int:
    """The number of multiprocessors of the GPU that a program is lowered for."""
    try:
        gpu: Any = jax.local_devices(backend="cuda")[0]
        return gpu.core_count
    except RuntimeError:
        abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
        return getattr(abstract, "num_cores", None) or 132


def _in_bands(index: jax.Array, rows: Any, columns: int, band: int) -> tuple[jax.Array, jax.Array]:
    """The tile (row, column) with number ``index``, in bands of ``band`` tiles along the rows."""
    first = lax.div(index, jnp.int32(band * columns))
    within = index - first * (band * columns)
    height = jnp.minimum(band, rows - first * band)
    column = lax.div(within, height)
    return first * band + within - column * height, column


def _launch(
    body: Callable[..., None], out: jax.ShapeDtypeStruct, tuning: Tuning, buffers: tuple[Any, Any],
    copies: int,
    *arrays: jax.Array,
) -> jax.Array:  # fmt: skip
    """Run ``body`` once per multiprocessor, with three warpgroups.

    ``body`` gets the arrays, which are in global memory, the result, and the scratch. Each operand has a
    buffer, and each step of it arrives in a number of copies.
    """
    call = plgpu.kernel(
        body,
        out_type=out,
        grid=(multiprocessors(),),
        grid_names=("program",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[
            *buffers,
            plgpu.RefUnion(
                _tiles((_WARPGROUPS, 2, HALF, HALF)),
                _lines((_WARPGROUPS, 2, HALF, HALF)),
                # As large as the lines, because the two warpgroups must not share a part.
                plgpu.SMEM((_WARPGROUPS, 2, HALF, HALF), jnp.bfloat16),
            ),
            plgpu.Barrier(num_arrivals=copies, num_barriers=tuning.stages),
            plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=tuning.stages),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return call(*arrays)


def _walk(
    count: jax.Array, steps_of: Callable[[jax.Array], jax.Array],
    copy: Callable[[jax.Array], Callable[[jax.Array, jax.Array], None]],
    multiply: Callable[[jax.Array, jax.Array], None],
    free: Any, stages: int,
) -> None:  # fmt: skip
    """Walk through the tiles of this program, as the copying warpgroup or as a multiplying one.

    Args:
        count: number of tiles.
        steps_of: the number of steps of a tile.
        copy: for a tile, a function that starts to copy the operands of (step, slot of the buffer).
        multiply: computes a tile, given the number of steps before it.
        free: barriers of the slots, passed when a slot may be overwritten.
        stages: number of slots.
    """

    def copy_tile(turn: jax.Array, done: jax.Array) -> jax.Array:
        begin = copy(turn)

        def copy_step(step: jax.Array, done: jax.Array) -> jax.Array:
            slot = lax.rem(done, stages)

            @pl.when(done >= stages)
            def _() -> None:
                plgpu.barrier_wait(free.at[slot])

            begin(step, slot)
            return done + 1

        return lax.fori_loop(0, steps_of(turn), copy_step, done)

    def multiply_tile(turn: jax.Array, done: jax.Array) -> jax.Array:
        multiply(turn, done)
        return done + steps_of(turn)

    copier = lax.axis_index("warpgroup") == _COPIER

    @pl.when(copier)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS["copier"], action="decrease")
        done = lax.fori_loop(0, count, copy_tile, jnp.int32(0))

        def wait(step: jax.Array, carry: None) -> None:
            plgpu.barrier_wait(free.at[lax.rem(step, stages)])

        # All warpgroups wait for the barriers that others pass, because the interpreter requires it.
        lax.fori_loop(jnp.maximum(done - stages, 0), done, wait, None)

    @pl.when(jnp.logical_not(copier))
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS["others"], action="increase")
        lax.fori_loop(0, count, multiply_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _total(
    columns: int, steps: jax.Array, done: jax.Array, tuning: Tuning, full: Any, free: Any,
    product: Callable[[Any, jax.Array, jax.Array], None],
    scale: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """The sum of a tile's products, bf16 [HALF, columns].

    Args:
        columns: columns of the tile.
        steps: steps of the tile.
        done: steps before the tile.
        tuning: of the kernel.
        full: barriers of the buffer's slots, passed when operands have arrived.
        free: see ``_walk``.
        product: adds the product of (step, slot) to an accumulator.
        scale: factor of the sum; None for 1.
    """

    def add_all(total: Any) -> jax.Array:
        def add(step: jax.Array, done: jax.Array) -> jax.Array:
            slot = lax.rem(done, tuning.stages)
            plgpu.barrier_wait(full.at[slot])
            product(total, step, slot)
            plgpu.wgmma_wait(1)  # the previous product is done; this one runs during the next wait

            @pl.when(step > 0)
            def _() -> None:
                plgpu.barrier_arrive(free.at[lax.rem(done - 1, tuning.stages)])

            return done + 1

        lax.fori_loop(0, steps, add, done)
        return total[...]

    total = pl.run_scoped(add_all, plgpu.ACC((HALF, columns), jnp.float32))

    @pl.when(steps > 0)
    def _() -> None:
        plgpu.barrier_arrive(free.at[lax.rem(done + steps - 1, tuning.stages)])

    return (total if scale is None else total * scale).astype(jnp.bfloat16)


@dataclass(frozen=True)
class _Columns:
    """Columns of the result in tiles. The last tile may be narrower.

    Attributes:
        n: number of columns.
        tuning: columns of a tile, and stages of the buffer.
        by_columns: whether the operand in the buffer is [columns, step], not [step, columns].
        anywhere: whether the operand's rows may start anywhere in global memory.
        dtype: of the operand. Only operands by columns may have another one than bf16.
    """

    n: int
    tuning: Tuning
    by_columns: bool = False
    anywhere: bool = False
    dtype: DTypeLike = jnp.bfloat16

    @property
    def last(self) -> int:
        """Columns of the last tile, which uses the first part of a whole tile's buffer."""
        left = (self.n - 1) % self.tuning.columns // HALF * HALF + HALF
        return self.tuning.columns if self.tuning.columns % left else left

    @property
    def buffer(self) -> Any:
        """The buffer of the operand."""

        def of(columns: int) -> list[Any]:
            stages = self.tuning.stages * self.tuning.columns // columns
            step = step_of(self.dtype)
            shape = (columns, step) if self.by_columns else (step, columns)
            tiles = _tiles((stages, *shape), self.dtype)
            if not self.anywhere:
                return [tiles]
            return [tiles, _lines((stages, STEP // _EIGHT, columns // HALF, _EIGHT, HALF))]

        return plgpu.RefUnion(*of(self.tuning.columns), *of(self.last))

    def slot(self, buffer: Any, slot: jax.Array, width: int, view: int = 0) -> Any:
        """A slot of the buffer for a tile of ``width`` columns, as tiles (view 0) or as lines (view 1)."""
        views = list(buffer)
        whole, part = views[view], views[len(views) // 2 + view]
        columns = self.tuning.columns
        return whole.at[slot] if width == columns else part.at[slot * (columns // width)]

    def each(self, column: jax.Array, work: Callable[[int], None]) -> None:
        """Run ``work(width)`` with the width of the tile that starts at ``column``."""
        if self.last == self.tuning.columns:
            work(self.last)
        else:
            whole = column + self.tuning.columns <= self.n
            lax.cond(whole, lambda: work(self.tuning.columns), lambda: work(self.last))


def _begin_rows(
    source: Any, first: jax.Array, column: jax.Array, width: int,
    slot_of: Callable[[int], Any], full: Any,
) -> None:  # fmt: skip
    """Copy STEP rows that may start anywhere, eight rows (the height of a tile) at a time.

    ``source`` is in global memory, [rows, n / 64, 64]. ``slot_of`` is like ``_Columns.slot``. ``full`` is a
    barrier, passed after STEP / 8 copies.
    """
    columns = pl.ds(lax.div(column, jnp.int32(HALF)), width // HALF)
    for index in range(STEP // _EIGHT):
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(first + index * _EIGHT, _EIGHT), columns],
            slot_of(1).at[index].transpose((1, 0, 2)),
            full,
        )


def _in_columns(g: jax.Array) -> jax.Array:
    """Reshape [rows, n] to [rows, n / 64, 64], the source of ``_begin_rows``."""
    return g.reshape(len(g), -1, HALF)


def _store(value: jax.Array, staged: Any, lines: Any, out: Callable[[int], Any]) -> None:
    """Copy [HALF, n] of a warpgroup to global memory. ``out(c)`` is the place of 64 columns from c on.

    The copies read ``lines``, which is ``staged`` or another view of it.
    """
    for index, column in enumerate(range(0, value.shape[1], HALF)):
        # A copy of the previous tile may still read the buffer, because only that tile's branch waits for it.
        plgpu.wait_smem_to_gmem(int(index > 0), wait_read_only=True)
        slot = index % 2
        staged[slot] = value[:, column : column + HALF]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lines.at[slot], out(column))


def _store_rows(
    value: jax.Array, count: jax.Array, columns: jax.Array, plain: Any,
    out: Callable[[jax.Array, int], Any],
) -> None:  # fmt: skip
    """Copy the first ``count`` rows of [HALF, n]. ``out(r, c)`` is the place of 64 columns of row r.

    Only the first ``columns`` are copied, because the copy of a whole row would continue beyond the edge of
    the array, in the next row.
    """
    for column in range(0, value.shape[1], HALF):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store(plain, value[:, column : column + HALF])
        plgpu.commit_smem()

        def copy(row: jax.Array, carry: None, column: int = column) -> None:
            plgpu.copy_smem_to_gmem(plain.at[pl.ds(row, 1)], out(row, column))

        lax.fori_loop(0, jnp.where(column < columns, count, 0), copy, None)


def rows_plan(sizes: jax.Array, rows: int) -> jax.Array:
    """The tiles of rows, int32[1 + 4 x bound].

    First their number. Then for each tile its group, the first rows of its two halves, and the number of rows
    of a half. Rows after the last group form another group.
    """
    stops = jnp.cumsum(jnp.concatenate([sizes, rows - jnp.sum(sizes, keepdims=True)]), dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), stops[:-1]])
    counts = (stops - starts + 2 * HALF - 1) // (2 * HALF)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    bound = rows // (2 * HALF) + len(stops)
    index = jnp.arange(bound, dtype=jnp.int32)
    group = jnp.sum(
        index[:, None] >= ends[None], axis=1, dtype=jnp.int32
    )  # nobody reads entries after the last tile
    group = jnp.minimum(group, len(sizes))
    start, stop = starts[group], stops[group]
    begin = start + 2 * HALF * (index - (ends - counts)[group])
    last = jnp.maximum(stop - HALF, start)
    halves = jnp.minimum(begin, last), jnp.minimum(begin + HALF, last)
    plan = jnp.stack([group, *halves, jnp.minimum(stop - start, HALF)], axis=1)
    return jnp.concatenate([ends[-1:], plan.reshape(-1)])


def rows_product(
    x: jax.Array, w: jax.Array, plan: jax.Array, *scale: jax.Array, transposed: bool, tuning: Tuning
) -> jax.Array:
    """``x[i] @ w[group of i]``, or with the matrix's transpose.

    Args:
        x: bf16 or fp8 [rows, k].
        w: bf16 [groups, k, n], or bf16 or fp8 [groups, n, k] if ``transposed``. Tensor cores only read 8-bit
            matrices along the contracted axis.
        plan: of ``rows_plan``.
        scale: factor of the sums, fp32 [1]; may be omitted.
        transposed: whether to multiply by the matrices' transposes.
        tuning: of the kernel.

    Returns:
        bf16 [rows, n].
    """
    (rows, k), groups = x.shape, w.shape[0]
    n, columns = w.shape[1 if transposed else 2], tuning.columns
    across, length = pl.cdiv(n, columns), step_of(x.dtype)
    tiles = _Columns(n, tuning, by_columns=transposed, dtype=w.dtype)

    def body(plan: Any, x: Any, w: Any, *others: Any) -> None:
        *scale, out, x_buffer, w_buffer, union, full, free = others
        (staged, lines), plain = _both(union), union[2]
        x_tiles, x_lines = _both(x_buffer)
        program, programs = lax.axis_index("program"), lax.axis_size("program")
        warpgroup = lax.axis_index("warpgroup")
        down = plan[0]

        def tile_at(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
            """The tile's place in the plan, and its first column."""
            row, column = _in_bands(program + turn * programs, down, across, tuning.band)
            return 1 + 4 * row, column * columns

        def steps_of(turn: jax.Array) -> jax.Array:
            return jnp.where(plan[tile_at(turn)[0]] < groups, pl.cdiv(k, length), 0)

        def copy(turn: jax.Array) -> Callable[[jax.Array, jax.Array], None]:
            place, column = tile_at(turn)
            group = jnp.minimum(plan[place], groups - 1)
            begins = [plan[place + 1 + half] for half in range(_WARPGROUPS)]

            def begin(step: jax.Array, slot: jax.Array) -> None:
                terms = pl.ds(step * length, length)
                for half, first in enumerate(begins):
                    plgpu.copy_gmem_to_smem(
                        x.at[pl.ds(first, HALF), terms],
                        x_lines.at[slot, half],
                        full.at[slot],
                    )

                def copy_matrix(width: int) -> None:
                    own = pl.ds(column, width)
                    source = w.at[group, own, terms] if transposed else w.at[group, terms, own]
                    plgpu.copy_gmem_to_smem(source, tiles.slot(w_buffer, slot, width), full.at[slot])

                tiles.each(column, copy_matrix)

            return begin

        def multiply(turn: jax.Array, done: jax.Array) -> None:
            place, column = tile_at(turn)
            begin, own = plan[place + 1 + warpgroup], plan[place + 3]

            def multiply_width(width: int) -> None:
                def product(total: Any, step: jax.Array, slot: jax.Array) -> None:
                    del step
                    left = x_tiles.at[slot, warpgroup]
                    right = tiles.slot(w_buffer, slot, width)
                    plgpu.wgmma(total, left, right.transpose((1, 0)) if transposed else right)

                factor = scale[0][0] if scale else None
                value = _total(width, steps_of(turn), done, tuning, full, free, product, factor)

                @pl.when(own == HALF)
                def _() -> None:
                    where = pl.ds(begin, HALF)
                    _store(
                        value, staged.at[warpgroup], lines.at[warpgroup],
                        lambda c: out.at[where, pl.ds(column + c, HALF)],
                    )  # fmt: skip

                @pl.when(own < HALF)
                def _() -> None:
                    _store_rows(
                        value, own, n - column, plain.at[warpgroup, 0],
                        lambda r, c: out.at[pl.ds(begin + r, 1), pl.ds(column + c, HALF)],
                    )  # fmt: skip

            tiles.each(column, multiply_width)

        count = lax.div(down * across - program + programs - 1, jnp.int32(programs))
        _walk(count, steps_of, copy, multiply, free, tuning.stages)

    kind = jax.ShapeDtypeStruct((rows, n), jnp.bfloat16)
    buffers = _views(tuning.stages, _WARPGROUPS, HALF, length, dtype=x.dtype), tiles.buffer
    return _launch(body, kind, tuning, buffers, 1 + _WARPGROUPS, plan, x, w, *scale)


_OVERHEAD = 3
"""The cost of a tile in addition to its steps, in steps."""


def sums_plan(sizes: jax.Array, k: int, n: int, tuning: Tuning, step: int = STEP) -> jax.Array:
    """The order of groups, int32[1 + 3 x groups], for sums with ``step`` terms a step.

    First the number of heavy groups. Then group, first row and number of rows of each, from the largest to
    the smallest. A tile of a heavy group is more work than a multiprocessor's share of the whole.
    """
    tiles, programs = _sums_tiles(k, n, tuning), multiprocessors()
    index = jnp.arange(len(sizes))
    # Comparing all pairs takes one small kernel, a sort several.
    mine, others = sizes[:, None], sizes[None]
    before = (mine < others) | ((mine == others) & (index[:, None] > index[None]))
    rank = jnp.sum(before, axis=1)
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    work = (sizes + step - 1) // step + _OVERHEAD
    heavy = jnp.sum(work * programs > jnp.sum(work) * tiles, keepdims=True, dtype=jnp.int32)
    rows = jnp.stack([index.astype(jnp.int32), starts, sizes], axis=1)
    placed = jnp.sum(
        jnp.where((rank[None] == index[:, None])[:, :, None], rows[None], 0), axis=1, dtype=jnp.int32
    )
    return jnp.concatenate([heavy, placed.reshape(-1)])


def _sums_tiles(k: int, n: int, tuning: Tuning) -> int:
    """The number of tiles of a group's result."""
    return pl.cdiv(k, _WARPGROUPS * HALF) * pl.cdiv(n, tuning.columns)


@dataclass(frozen=True)
class _Sums:
    """The tiles of a program that computes sums over groups. A tile has 2 x 64 rows of a group's matrix.

    Attributes:
        plan: of ``sums_plan``, in memory.
        groups: number of groups.
        k: rows of a group's matrix.
        n: columns of a group's matrix.
        tuning: of the kernel.
        step: terms of a step.
    """

    plan: Any
    groups: int
    k: int
    n: int
    tuning: Tuning
    step: int

    @property
    def each(self) -> int:
        """Tiles of a group."""
        return _sums_tiles(self.k, self.n, self.tuning)

    def _shares(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The program's index, the heavy groups' tiles, and the number of programs that share the others."""
        heavy = self.plan[0] * self.each  # each of these tiles has a multiprocessor to itself
        return lax.axis_index("program"), heavy, jnp.maximum(lax.axis_size("program") - heavy, 1)

    def _position(self, turn: jax.Array) -> jax.Array:
        program, heavy, others = self._shares()
        own = program - heavy
        # Back and forth, because tiles become smaller.
        forth = jnp.where(lax.rem(turn, 2) == 0, own, others - 1 - own)
        return jnp.where(program < heavy, program, heavy + turn * others + forth)

    @property
    def count(self) -> jax.Array:
        """Tiles of this program."""
        program, heavy, others = self._shares()
        turns = lax.div(self.groups * self.each - heavy, others)
        turns = jnp.where(self._position(turns) < self.groups * self.each, turns + 1, turns)
        return jnp.where(program < heavy, 1, turns)

    def tile_at(self, turn: jax.Array) -> tuple[jax.Array, ...]:
        """The group, its first row and number of rows, and the tile's first row and column."""
        place = self._position(turn)
        rank = lax.div(place, jnp.int32(self.each))
        across = pl.cdiv(self.n, self.tuning.columns)
        down = pl.cdiv(self.k, _WARPGROUPS * HALF)
        row, column = _in_bands(place - rank * self.each, down, across, self.tuning.band)
        group, start, size = (self.plan[1 + 3 * rank + i] for i in range(3))
        return group, start, size, row * _WARPGROUPS * HALF, column * self.tuning.columns

    def steps_of(self, turn: jax.Array) -> jax.Array:
        """Steps of a tile."""
        size = self.plan[3 + 3 * lax.div(self._position(turn), jnp.int32(self.each))]
        return lax.div(size + self.step - 1, jnp.int32(self.step))


def sums_of_products(
    x: jax.Array, g: jax.Array, plan: jax.Array, *, groups: int, tuning: Tuning
) -> jax.Array:
    """Sum the outer products of the rows of ``x`` and ``g`` over each group.

    Args:
        x: bf16 [rows, k].
        g: bf16 [rows, n].
        plan: of ``sums_plan``.
        groups: number of groups.
        tuning: of the kernel.

    Returns:
        bf16 [groups, k, n].
    """
    k, n = x.shape[1], g.shape[1]
    tiles = _Columns(n, tuning, anywhere=True)

    def body(
        plan: Any, x: Any, g: Any, out: Any, x_buffer: Any, g_buffer: Any, union: Any, full: Any, free: Any
    ) -> None:
        staged, x_tiles, x_lines = union[0], *_both(x_buffer)
        warpgroup, walk = lax.axis_index("warpgroup"), _Sums(plan, groups, k, n, tuning, STEP)

        def copy(turn: jax.Array) -> Callable[[jax.Array, jax.Array], None]:
            _, start, size, row, column = walk.tile_at(turn)
            last = jnp.maximum(start + size - STEP, start)

            def begin(step: jax.Array, slot: jax.Array) -> None:
                first = jnp.minimum(start + step * STEP, last)
                for half in range(_WARPGROUPS):
                    plgpu.copy_gmem_to_smem(
                        x.at[pl.ds(first, STEP), pl.ds(row + half * HALF, HALF)],
                        x_lines.at[slot, half],
                        full.at[slot],
                    )

                def copy_right(width: int) -> None:
                    slot_of = partial(tiles.slot, g_buffer, slot, width)
                    _begin_rows(g, first, column, width, slot_of, full.at[slot])

                tiles.each(column, copy_right)

            return begin

        def keep(buffer: Any, first: jax.Array, stop: jax.Array) -> None:
            """Set the rows of [STEP, 64] outside [first, stop) to 0."""
            index = plgpu.broadcasted_iota(jnp.int32, (STEP, HALF), 0, layout=plgpu.Layout.WGMMA)
            value = plgpu.load(buffer, layout=plgpu.Layout.WGMMA)
            buffer[...] = jnp.where((index >= first) & (index < stop), value, jnp.bfloat16(0))

        def multiply(turn: jax.Array, done: jax.Array) -> None:
            group, _, size, row, column = walk.tile_at(turn)
            steps, short = walk.steps_of(turn), size < STEP

            def multiply_width(width: int) -> None:
                def product(total: Any, step: jax.Array, slot: jax.Array) -> None:
                    left = x_tiles.at[slot, warpgroup]
                    right = tiles.slot(g_buffer, slot, width)

                    @pl.when((step == steps - 1) & (steps * STEP > size))
                    def _() -> None:
                        keep(left, jnp.where(short, 0, steps * STEP - size), jnp.where(short, size, STEP))

                        # The rows of other groups may be infinite. Both warpgroups write the same zeros.
                        @pl.when(short)
                        def _() -> None:
                            for c in range(0, width, HALF):
                                keep(right.at[:, pl.ds(c, HALF)], jnp.int32(0), size)

                        plgpu.commit_smem()

                    plgpu.wgmma(total, left.transpose((1, 0)), right)

                value = _total(width, steps, done, tuning, full, free, product)
                where = pl.ds(row + warpgroup * HALF, HALF)
                _store(
                    value, staged.at[warpgroup], staged.at[warpgroup],
                    lambda c: out.at[group, where, pl.ds(column + c, HALF)],
                )  # fmt: skip

            tiles.each(column, multiply_width)

        _walk(walk.count, walk.steps_of, copy, multiply, free, tuning.stages)

    kind = jax.ShapeDtypeStruct((groups, k, n), x.dtype)
    buffers = _views(tuning.stages, _WARPGROUPS, STEP, HALF), tiles.buffer
    copies = _WARPGROUPS + STEP // _EIGHT
    return _launch(body, kind, tuning, buffers, copies, plan, x, _in_columns(g))


PROMOTED = Tuning(columns=128, stages=6)
"""For sums of sums: registers hold both, of a tile. On an H200 wider tiles were up to 10% slower."""


def _promoted_total(
    columns: int, steps: jax.Array, done: jax.Array, tuning: Tuning, full: Any, free: Any,
    product: Callable[[Any, jax.Array, jax.Array], None],
    scale: jax.Array,
) -> jax.Array:  # fmt: skip
    """As ``_total``, but tensor cores sum the products of one step, and these sums are added in fp32.

    Hopper's tensor cores sum fp8 products with about 14 bits. While a warpgroup adds, the other multiplies.
    """

    def add(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, total = carry
        slot = lax.rem(done, tuning.stages)
        plgpu.barrier_wait(full.at[slot])

        def sums(partial: Any) -> jax.Array:
            product(partial, step, slot)
            return partial[...]

        total += pl.run_scoped(sums, plgpu.ACC((HALF, columns), jnp.float32))
        plgpu.barrier_arrive(free.at[slot])
        return done + 1, total

    zeros = plgpu.layout_cast(jnp.zeros((HALF, columns), jnp.float32), plgpu.Layout.WGMMA)
    return (lax.fori_loop(0, steps, add, (done, zeros))[1] * scale).astype(jnp.bfloat16)


def sums_of_columns(
    x: jax.Array, g: jax.Array, plan: jax.Array, scale: jax.Array, *, groups: int, tuning: Tuning
) -> jax.Array:
    """Sum the outer products of the columns of ``x`` and ``g`` over each group, times ``scale``.

    Args:
        x: fp8 [k, columns]. Each group has a multiple of 128 columns.
        g: fp8 [n, columns].
        plan: of ``sums_plan`` for these numbers of columns, with steps of 128.
        scale: factor of the sums, fp32 [1].
        groups: number of groups.
        tuning: of the kernel.

    Returns:
        bf16 [groups, k, n].
    """
    (k, n), step = (len(x), len(g)), step_of(x.dtype)
    tiles = _Columns(n, tuning, by_columns=True, dtype=g.dtype)

    def body(
        plan: Any, x: Any, g: Any, scale: Any, out: Any, x_buffer: Any, g_buffer: Any, union: Any, full: Any,
        free: Any,
    ) -> None:  # fmt: skip
        staged, warpgroup = union[0], lax.axis_index("warpgroup")
        walk = _Sums(plan, groups, k, n, tuning, step)

        def copy(turn: jax.Array) -> Callable[[jax.Array, jax.Array], None]:
            _, start, _, row, column = walk.tile_at(turn)

            def begin(number: jax.Array, slot: jax.Array) -> None:
                terms = pl.ds(start + number * step, step)
                left = x.at[pl.ds(row, _WARPGROUPS * HALF), terms]
                plgpu.copy_gmem_to_smem(left, x_buffer.at[slot], full.at[slot])

                def copy_right(width: int) -> None:
                    right = g.at[pl.ds(column, width), terms]
                    plgpu.copy_gmem_to_smem(right, tiles.slot(g_buffer, slot, width), full.at[slot])

                tiles.each(column, copy_right)

            return begin

        def multiply(turn: jax.Array, done: jax.Array) -> None:
            group, _, _, row, column = walk.tile_at(turn)

            def multiply_width(width: int) -> None:
                def product(total: Any, step: jax.Array, slot: jax.Array) -> None:
                    del step
                    left = x_buffer.at[slot, pl.ds(warpgroup * HALF, HALF)]
                    plgpu.wgmma(total, left, tiles.slot(g_buffer, slot, width).transpose((1, 0)))

                given = width, walk.steps_of(turn), done, tuning, full, free, product, scale[0]
                where = pl.ds(row + warpgroup * HALF, HALF)
                _store(
                    _promoted_total(*given), staged.at[warpgroup], staged.at[warpgroup],
                    lambda c: out.at[group, where, pl.ds(column + c, HALF)],
                )  # fmt: skip

            tiles.each(column, multiply_width)

        _walk(walk.count, walk.steps_of, copy, multiply, free, tuning.stages)

    kind = jax.ShapeDtypeStruct((groups, k, n), jnp.bfloat16)
    buffers = _tiles((tuning.stages, _WARPGROUPS * HALF, step), x.dtype), tiles.buffer
    return _launch(body, kind, tuning, buffers, 2, plan, x, g, scale)
