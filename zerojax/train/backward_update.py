"""The update of stacks by their backward pass: its arguments, the update of a layer, and its results.

See ``ZeroConfig.update_in_backward``; ``zerojax.schedule.layer_update`` says when layers are updated. All
functions run inside ``shard_map``, on one device's part. An optimizer that needs no norm computes each
element from that element's values.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, PyTree

from zerojax.comm.reduction import Values
from zerojax.optim.layerwise import places
from zerojax.schedule.layer_update import (
    MASTER,
    Facts,
    LayerState,
    LayerUpdate,
    Updated,
    as_encoded,
    as_floats,
)
from zerojax.sharding.param_tree import Path, from_tree
from zerojax.train.blocks import without_padding
from zerojax.train.fields import Shards, field_specs
from zerojax.train.host_update import InBackward, encoded_layer
from zerojax.train.spec import TrainSpec
from zerojax.weights import Weight, Weights


class OptimizerShards(NamedTuple):
    """The fields that updates in the backward pass read besides ``Shards``; or their PartitionSpecs.

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
        """Take these fields from an optimizer's state."""
        assert spec.layerwise is not None
        every, moments = places(opt_state), spec.layerwise.moments
        paths = {leaf.path for group in spec.updated_in_backward for leaf in group.leaves}
        return OptimizerShards(
            {place: x for place, x in every.items() if moments.get(place) in paths},
            {place: x for place, x in every.items() if place not in moments},
            limit,
        )


def specs(spec: TrainSpec) -> tuple[OptimizerShards, InBackward]:
    """The PartitionSpecs of the arrays that the passes read for updates, and of the updated arrays."""
    fields = field_specs(spec)
    scalar = jax.sharding.PartitionSpec()
    entering = OptimizerShards.of(spec, fields["opt_state"], scalar)
    paths = [leaf.path for group in spec.updated_in_backward for leaf in group.leaves]
    params = from_tree(fields["params"])
    encoded = {path: fields["encoded"][path] for path in paths}
    return entering, InBackward({path: params[path] for path in paths}, entering.moments, encoded, scalar)


@dataclass(frozen=True)
class BackwardUpdate:
    """The update of one step.

    Attributes:
        spec: the train spec.
        shards: of the state.
        state: of the optimizer.
    """

    spec: TrainSpec
    shards: Shards
    state: OptimizerShards

    @functools.cached_property
    def rule(self) -> LayerUpdate:
        """How layers are updated."""
        return LayerUpdate(self.state.counters, functools.partial(_updated, self.spec))

    @functools.cached_property
    def sinks(self) -> dict[Path, LayerState]:
        """The sinks of the weights that are updated, by path."""
        assert self.spec.layerwise is not None
        masters, encoded = from_tree(self.shards.params), self.shards.encoded
        moments: dict[Path, dict[str, Array]] = {}
        for place, x in self.state.moments.items():
            moments.setdefault(self.spec.layerwise.moments[place], {})[place] = as_floats(x)
        return {
            leaf.path: LayerState(
                {MASTER: masters[leaf.path]} | moments.get(leaf.path, {}),
                as_floats(encoded[leaf.path].values),
                encoded[leaf.path].scale,
                jnp.float32(0),
            )
            for group in self.spec.updated_in_backward
            for leaf in group.leaves
        }

    def facts(self, loss: Float32[Array, ""], tokens: Float32[Array, ""]) -> Facts:
        """The facts of a step that updates need, from its mean loss and number of tokens."""
        taken = jnp.isfinite(loss) & ~(loss > self.state.limit)
        return Facts(tokens, taken.astype(jnp.float32))

    def done(self, after: Mapping[Path, LayerState]) -> InBackward:
        """The updated arrays, from the sinks' cotangents."""
        encoded = {path: self.shards.encoded[path] for path in after}
        return InBackward(
            {path: sink.held[MASTER] for path, sink in after.items()},
            {
                place: as_encoded(x, self.state.moments[place].dtype)
                for sink in after.values()
                for place, x in sink.held.items()
                if place != MASTER
            },
            {
                path: dataclasses.replace(
                    w, values=as_encoded(after[path].encoded, w.values.dtype), scale=after[path].scale
                )
                for path, w in encoded.items()
            },
            sum(sink.squares for sink in after.values()),
        )


def _updated(
    spec: TrainSpec,
    sums: Values,
    here: Sequence[dict[str, Array]],
    weights: Weights,
    counters: dict[str, Array],
    facts: Facts,
    squares: Float32[Array, ""],
) -> Updated:
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
        own = sum(jnp.sum(jnp.square(grad)) for grad in grads.values())
        squares = squares + (lax.psum(own, spec.axes) if spec.axes else own)
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
    each = [sent[leaf.path] for leaf in leaves]
    return Updated(held, tuple(w.values for w in each), [w.scale for w in each], squares)
