"""The update of stacks by their backward pass: the arrays that it changes, and the update of a layer.

See ``ZeroConfig.update_in_backward``; ``zerojax.schedule.layer_update`` says when layers are updated.
Layers are updated inside ``shard_map``, on one device's part. An optimizer that needs no norm computes each
element from that element's values.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, PyTree

from zerojax.optim.layerwise import places
from zerojax.schedule.layer_update import MASTER, Facts, LayerState, LayerUpdate, as_encoded, as_floats
from zerojax.sharding.layout import Values
from zerojax.sharding.param_tree import Path, from_tree
from zerojax.train.blocks import without_padding
from zerojax.train.pass_weights import encoded_layer
from zerojax.train.spec import TrainSpec
from zerojax.weights import Weight, Weights


class OptimizerShards(NamedTuple):
    """The optimizer's state as updates in the backward pass read it; or its PartitionSpecs.

    Attributes:
        moments: the moments of stacks, by their places in the optimizer's state.
        counters: the rest of the optimizer's state, by place.
        limit: the largest loss that is not a spike, fp32.
    """

    moments: dict[str, Any]
    counters: dict[str, Any]
    limit: Any

    @staticmethod
    def of(spec: TrainSpec, opt_state: PyTree[Any], limit: Any) -> "OptimizerShards":
        """Take them from an optimizer's state."""
        assert spec.layerwise is not None
        every, moments = places(opt_state), spec.layerwise.moments
        paths = {leaf.path for group in spec.updated_in_backward for leaf in group.leaves}
        return OptimizerShards(
            {place: x for place, x in every.items() if moments.get(place) in paths},
            {place: x for place, x in every.items() if place not in moments},
            limit,
        )


def layer_states(
    spec: TrainSpec,
    params: PyTree[Any],
    encoded: Mapping[Path, Weight],
    moments: Mapping[str, Any],
    *,
    squares: Any,
) -> dict[Path, LayerState]:
    """The arrays that the backward pass updates, or their PartitionSpecs, by the weight's path.

    Args:
        spec: the train spec.
        params, encoded: the fields of a state.
        moments: by their places in the optimizer's state.
        squares: ``LayerState.squares``.
    """
    assert spec.layerwise is not None
    masters = from_tree(params)
    paths = [leaf.path for group in spec.updated_in_backward for leaf in group.leaves]
    held = {path: {MASTER: masters[path]} for path in paths}
    for place, x in moments.items():
        held[spec.layerwise.moments[place]][place] = x
    return {
        path: LayerState(held[path], encoded[path].values, encoded[path].scale, squares) for path in paths
    }


def layer_update(spec: TrainSpec, optimizer: OptimizerShards) -> LayerUpdate:
    """How the backward pass of a step updates layers."""
    return LayerUpdate(optimizer.counters, optimizer.limit, functools.partial(_updated, spec))


_owners = operator.attrgetter("owners")


def _updated(
    spec: TrainSpec,
    sums: Values,
    here: Sequence[dict[str, Array]],
    weights: Weights,
    counters: dict[str, Array],
    facts: Facts,
    squares: Float32[Array, ""],
) -> list[LayerState]:
    """See ``zerojax.schedule.layer_update.UpdateLayer``."""
    optimizer = spec.layerwise
    assert optimizer is not None
    leaves = [dataclasses.replace(w.layout, stack=()) for w in weights]
    each = list(zip(leaves, sums, here, strict=True))
    grads = {
        leaf.path: (without_padding(leaf, x) / facts.tokens).reshape(own[MASTER].shape)
        for leaf, x, own in each
    }
    with jax.named_scope("metrics"):
        for axes, alike in itertools.groupby(sorted(leaves, key=_owners), key=_owners):
            own = sum(jnp.sum(jnp.square(grads[leaf.path])) for leaf in alike)
            # Devices along other axes hold the same shard.
            squares = squares + lax.psum(own, tuple(axis for axis in axes if axis in spec.axes))
    taken = (facts.taken > 0) & jnp.isfinite(squares)
    with jax.named_scope("optimizer"):
        masters = {leaf.path: own[MASTER] for leaf, _, own in each}
        state = {
            place: as_encoded(x, optimizer.dtypes[place])
            for _, _, own in each
            for place, x in own.items()
            if place != MASTER
        }
        after, moments = optimizer.update_shard(grads, counters | state, masters)
        held = [
            {
                key: jnp.where(taken, after[leaf.path] if key == MASTER else as_floats(moments[key]), x)
                for key, x in own.items()
            }
            for leaf, _, own in each
        ]
    masters = {
        leaf.path: Weight(own[MASTER], leaf, "primary") for leaf, own in zip(leaves, held, strict=True)
    }
    # With delta the weights are the node's replicas.
    replicas = {
        leaf.path: dataclasses.replace(w, layout=leaf) for leaf, w in zip(leaves, weights, strict=True)
    }
    sent = encoded_layer(masters, replicas if spec.zero.weights_delta else {})
    found = zip(held, (sent[leaf.path] for leaf in leaves), strict=True)
    return [LayerState(own, w.values, w.scale, squares) for own, w in found]
