"""From the weights as a state stores them to those that a model gets, inside ``shard_map``."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from zerojax.adapters.weight_sum import MasterWeights
from zerojax.matmul.operand import array_of, with_values
from zerojax.schedule.sharded import Sharded
from zerojax.schedule.unit import materialise
from zerojax.sharding.layout import OWNED, ParamLayout, from_stored
from zerojax.sharding.param_tree import Path
from zerojax.sharding.wire_format import Seed, mix
from zerojax.train.blocks import Blocks, by_group
from zerojax.train.secondary import next_secondary, stored_secondary, with_scales
from zerojax.train.spec import ParamGroup, TrainSpec


class Weights(NamedTuple):
    """The weights that units start from.

    Attributes:
        sources: per path, at the strategy's source level; at "primary" if there is a copy.
        copies: delta's copies ``[.., nodes, shard]`` of the units that update them themselves.
        masters: per path this device's shard ``[.., shard]`` of the master weights.
        frozen: per path a weight that is not trained: the secondary partition ``[.., nodes, m]``, or at
            "primary" this device's encoded shard ``[.., m]``.
    """

    sources: Blocks
    copies: Blocks
    masters: Blocks
    frozen: Blocks


class Placed(NamedTuple):
    """The weights in a loss function's model.

    Attributes:
        weights: per path, ``Sharded`` in units and whole elsewhere.
        masters: for ``zerojax.weight_sum``.
    """

    weights: dict[Path, Any]
    masters: MasterWeights


def sources(
    spec: TrainSpec,
    params: Blocks,
    secondary: Blocks,
    frozen: Mapping[Path, Any],
    updating: Sequence[ParamGroup] = (),
) -> Weights:
    """The weights that units start from; those in ``updating`` update delta's copies themselves."""
    strategy, copies = spec.strategy, {}
    if strategy.source == "primary":
        found = params
    elif strategy.source == "secondary":
        rows = {
            leaf.path: secondary[leaf.path].reshape(*leaf.stack, leaf.world.nodes, leaf.shard)
            for leaf in spec.leaves
        }
        later = [leaf.path for group in updating for leaf in group.leaves]
        found = stored_secondary(params, rows) | {path: params[path] for path in later}
        copies = {path: rows[path] for path in later}
    elif spec.zero.stage == 0:
        found = {
            leaf.path: from_stored(params[leaf.path], leaf).astype(strategy.weight_dtype(leaf))
            for leaf in spec.leaves
        }
    else:
        found = by_group(spec, lambda comm, _, x: comm.gather_local(comm.gather_node(x)), params)
    rows = dict(frozen)
    if strategy.frozen == "secondary":
        rows = {
            leaf.path: jax.tree.map(lambda x, leaf=leaf: rows_of(x, leaf), frozen[leaf.path])
            for leaf in spec.frozen
        }
    return Weights(found, copies, _masters(spec, params), rows)


def in_node(spec: TrainSpec, params: Blocks, rows: dict[Path, Any]) -> Weights:
    """The weights of units that begin with the secondary partitions of all (``ShardingStrategy.in_node``)."""
    trained, frozen = ({leaf.path: rows[leaf.path] for leaf in each} for each in (spec.leaves, spec.frozen))
    return Weights(trained, {}, _masters(spec, params), frozen)


def secondary_partitions(
    spec: TrainSpec, params: Blocks, secondary: Mapping[Path, Any], step: Array
) -> dict[Path, Any]:
    """The secondary partition of every trained weight, as the next forward pass computes with it.

    Args:
        spec: the train spec.
        params: master weights, flat blocks.
        secondary: delta's copies as the state has them; or empty.
        step: steps taken.

    Returns:
        ``[.., nodes, m]`` in the local format; those that fp8 products read as ``Scaled`` codes.
    """
    params, copies = with_scales(spec, params, secondary)
    if copies:
        rows = next_secondary(spec, params, copies, step)
    else:
        own = params if spec.zero.stage > 0 else _masters(spec, params)
        rows = by_group(spec, lambda comm, _, shards: comm.gather_node(shards), own)
    return {leaf.path: with_values(params[leaf.path], rows_of(rows[leaf.path], leaf)) for leaf in spec.leaves}


def rows_of(x: Array, leaf: ParamLayout) -> Array:
    """This device's secondary partition of a weight by the shards in it; a scale as it is."""
    return x.reshape(*leaf.stack, leaf.world.nodes, -1) if x.ndim > len(leaf.stack) else x


def _masters(spec: TrainSpec, params: Blocks) -> Blocks:
    """This device's shards of the master weights, which at stage 0 every device has whole."""
    if spec.zero.stage > 0:
        return {path: array_of(x) for path, x in params.items()}
    own = {}
    for leaf in spec.leaves:
        first = lax.axis_index(OWNED) * leaf.shard
        own[leaf.path] = lax.dynamic_slice_in_dim(params[leaf.path], first, leaf.shard, axis=-1)
    return own


def place_weights(
    spec: TrainSpec,
    weights: Weights,
    sinks: Blocks,
    seed: Seed,
    *,
    train: bool = True,
    adapters: bool = True,
) -> Placed:
    """Every weight in the form that the model gets; a frozen one by itself without ``adapters``."""
    placed: dict[Path, Any] = {}
    for number, group in enumerate(spec.groups):
        own = mix(seed, number)
        if group.stack:
            own = jax.vmap(lambda i, own=own: mix(own, i))(jnp.arange(group.layers)).reshape(group.stack)
        strategy = spec.strategy
        if any(leaf.path in weights.copies for leaf in group.leaves):
            strategy = dataclasses.replace(strategy, source="primary")
        sharded = {
            leaf.path: Sharded(
                weights.sources[leaf.path],
                sinks[leaf.path],
                own,
                leaf,
                strategy,
                weights.copies.get(leaf.path),
            )
            for leaf in group.leaves
        }
        for leaf in group.frozen:
            sharded[leaf.path] = Sharded(weights.frozen[leaf.path], None, own, leaf, strategy)
        placed |= place_group(spec, group, sharded, train=train, adapters=adapters)
    return Placed(placed, MasterWeights(spec.leaves, weights.masters, sinks, spec.strategy.sink))


def place_group(
    spec: TrainSpec, group: ParamGroup, sharded: dict[Path, Sharded], *, train: bool, adapters: bool = True
) -> dict[Path, Any]:
    """A group's weights in the form that the model gets: joined with their adapters, and whole outside units.

    Args:
        spec: the train spec.
        group: of the weights.
        sharded: they and the matrices of their adapters, by path.
        train: whether adapters drop out.
        adapters: whether they take part.
    """
    joined = dict(sharded)
    for leaf in group.frozen:
        parts = [joined.pop(part.path, None) for part in spec.adapters.get(leaf.path, ())]
        adapter = tuple(part for part in parts if part is not None)
        if adapter and adapters:
            assert spec.lora is not None
            lora = spec.lora if train else dataclasses.replace(spec.lora, dropout=0.0)
            joined[leaf.path] = dataclasses.replace(joined[leaf.path], adapter=adapter, lora=lora)
    values: Sequence[Any] = list(joined.values())
    if group.unit is None:
        values = materialise(values)
    return dict(zip(joined, values, strict=True))
