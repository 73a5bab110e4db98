"""Delta's secondary copies inside ``shard_map``, and the scales of fp8 products that go with them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from zerojax.comm.collectives import UnitComm, Values
from zerojax.matmul import fp8
from zerojax.matmul.operand import Scaled, array_of, with_values
from zerojax.sharding.mesh import AXES
from zerojax.sharding.param_tree import Path
from zerojax.sharding.wire_format import Seed
from zerojax.train.blocks import Blocks, by_group
from zerojax.train.spec import ParamGroup, TrainSpec


def with_scales(spec: TrainSpec, params: Blocks, secondary: Mapping[Path, Any]) -> tuple[Blocks, Blocks]:
    """Give the weights of fp8 products their scales: those of the largest magnitude that any owner has.

    Delta's copies keep theirs until it no longer fits, so that their codes rarely change all at once.

    Args:
        spec: what to run.
        params: master weights, flat blocks.
        secondary: delta's copies as the state has them; or empty.

    Returns:
        The master weights, some ``Scaled``; and the copies alone, in codes of the same scales.
    """
    chosen = [leaf for leaf in spec.leaves if leaf.fp8]
    codes = {path: array_of(copy) for path, copy in secondary.items()}
    if not chosen:
        return params, codes
    own = [jnp.max(jnp.abs(params[leaf.path]), axis=-1).reshape(-1) for leaf in chosen]
    with jax.named_scope("scales"):
        peaks = lax.pmax(jnp.concatenate(own), AXES)
    ends = list(itertools.accumulate(leaf.layers for leaf in chosen))
    scaled: dict[Path, Any] = dict(params)
    for leaf, peak in zip(chosen, jnp.split(peaks, ends[:-1]), strict=True):
        peak = peak.reshape(leaf.stack)
        scale = fp8.scale_for(peak, fp8.E4M3)
        if leaf.path in codes:
            before = secondary[leaf.path].scale
            scale = jnp.where((scale >= before) & (scale <= 4 * before), before, scale)
            codes[leaf.path] = _rescaled(codes[leaf.path], before, scale)
        scaled[leaf.path] = Scaled(params[leaf.path], scale)
    return scaled, codes


def _rescaled(codes: Array, before: Array, scale: Array) -> Array:
    """A copy's codes after a change of scale."""

    def change() -> Array:
        return fp8.encode(fp8.decode(codes, jnp.float32), (scale / before)[..., None])

    return lax.cond(jnp.any(scale != before), change, lambda: codes)


def stored_secondary(params: Blocks, secondary: Blocks) -> dict[Path, Any]:
    """Delta's copies as the state has them: codes with the scales that ``with_scales`` gave the weights."""
    return {path: with_values(params[path], copy) for path, copy in secondary.items()}


def first_secondary(spec: TrainSpec, params: Blocks) -> Blocks:
    """Delta's secondary copies, sent whole: flat blocks in, flat blocks out."""
    return by_group(spec, lambda comm, _, shards: _flat(comm.gather_exact(shards)), params)


def next_secondary(
    spec: TrainSpec, params: Blocks, secondary: Blocks, step: Array, later: Sequence[ParamGroup] = ()
) -> Blocks:
    """Delta's secondary copies, updated by the change of the weights, or resynchronised.

    Groups in ``later`` keep theirs.
    """

    def update() -> Blocks:
        return secondary | by_group(spec, _delta, params, secondary, skip=later)

    every = spec.zero.delta_resync
    if not every:
        return update()
    due = (step > 0) & (step % every == 0)
    return lax.cond(due, lambda: first_secondary(spec, params), update)


def last_secondary(
    spec: TrainSpec, params: Blocks, secondary: Blocks, updated: Blocks, updating: Sequence[ParamGroup]
) -> Blocks:
    """Delta's secondary copies after a step, where units in ``updating`` had to update theirs: ``updated``.

    A unit that the model did not call, or whose result was lost in a JAX transformation, has not: its copy is
    updated now.
    """
    missing = [g for g in updating if not all(leaf.path in updated for leaf in g.leaves)]
    done = [group for group in spec.groups if group not in missing]
    late = by_group(spec, _delta, params, secondary, skip=done)
    flat = {path: copy.reshape(secondary[path].shape) for path, copy in updated.items()}
    return secondary | flat | late


def _delta(comm: UnitComm, _: Seed, shards: Values, copies: Values) -> list[Array]:
    rows = tuple(x.reshape(comm.world.nodes, leaf.shard) for x, leaf in zip(copies, comm.leaves, strict=True))
    return _flat(comm.gather_node(shards, rows))


def _flat(rows: Sequence[Array]) -> list[Array]:
    return [x.reshape(-1) for x in rows]
