"""The weights of a generation phase: a copy of all of them in every node, made once, from a train state.

Making tokens reads every weight once per token, and updates none. So the copy is one of frozen weights
(``zerojax.train.frozen``): it is made by the hops of a forward pass, and has the very values that the
forward pass of training computes with. Afterwards no byte of it crosses nodes (ZeRO++, section 3.2, and the
hybrid engine of DeepSpeed-Chat, Yao et al., 2023). It has one of these forms:

- "gathered": the secondary partitions, spread over the devices of a node and gathered layer by layer. Weights
  that are frozen so already are shared with the state.
- "compute": whole on every device, in the compute dtype.
- "int8", "fp8": whole on every device, in blocks of 8-bit codes which are decoded layer by layer. Weights
  that are stored in 8 bits or fewer already, or computed with in fp8, keep their format.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from zerojax.comm.coalesced import gather_together
from zerojax.comm.parameter import decoded_weight
from zerojax.matmul import fp8
from zerojax.matmul.operand import Codes, array_of, with_values
from zerojax.schedule.sharded import Sharded
from zerojax.sharding.layout import ParamLayout, flatten, make_layout
from zerojax.sharding.mesh import LOCAL, MeshShape
from zerojax.sharding.param_tree import Path, from_tree
from zerojax.sharding.strategy import ShardingStrategy
from zerojax.train.memory import device_bytes
from zerojax.train.node_copy import abstract_in_node, node_layout, node_rows, per_node, stored_in_node
from zerojax.train.sources import place_group, rows_of
from zerojax.train.spec import ParamGroup, TrainSpec
from zerojax.train.state import TrainState
from zerojax.zero_config import ZeroConfig

Form = Literal["compute", "fp8", "int8", "gathered"]
Stored = dict[Path, Any]


@dataclass(frozen=True, eq=False)
class GenerationCopy:
    """How the weights of a generation phase are stored.

    Attributes:
        spec: of the train state.
        form: see this module.
        adapters: whether low-rank adapters are a part of it.
        leaves: the layout of each weight, as a frozen one.
    """

    spec: TrainSpec
    form: Form
    adapters: bool
    leaves: Mapping[Path, ParamLayout]

    @staticmethod
    def of(spec: TrainSpec, form: Form, *, adapters: bool = True) -> "GenerationCopy":
        """The copy for a train spec, in a form."""
        small = {part.path for pair in spec.adapters.values() for part in pair}
        leaves = {
            leaf.path: _stored_layout(spec, leaf, form, adapter=leaf.path in small)
            for leaf in (*spec.leaves, *spec.frozen)
            if adapters or leaf.path not in small
        }
        return GenerationCopy(spec, form, adapters, leaves)

    @property
    def strategy(self) -> ShardingStrategy:
        """Where units find the weights."""
        if self.form != "compute":
            return self.spec.strategy.in_node()
        return dataclasses.replace(self.spec.strategy.in_node("full"), in_place=True)

    @property
    def abstract(self) -> Stored:
        """The shape, dtype and sharding of each weight."""

        def stored(leaf: ParamLayout) -> Any:
            if self.form == "compute":
                return self.spec.abstract(leaf.unsharded_shape, self.strategy.weight_dtype(leaf))
            if self.form == "gathered":
                return abstract_in_node(self.spec, leaf)
            return self.spec.abstract_encoded(leaf, leaf.frozen_shape, PartitionSpec())

        return {path: stored(leaf) for path, leaf in self.leaves.items()}

    @property
    def specs(self) -> dict[Path, Any]:
        """The PartitionSpec of each weight."""
        return jax.tree.map(lambda x: x.sharding.spec, self.abstract)

    @property
    def device_bytes(self) -> int:
        """Bytes of the copy on one device, without what is gathered or decoded for a layer."""
        return device_bytes(self.abstract)

    @property
    def new_bytes(self) -> int:
        """``device_bytes``, without weights that the copy shares with the state."""
        shared = self.form == "gathered" and self.spec.strategy.frozen == "secondary"
        frozen = {leaf.path for leaf in self.spec.frozen} if shared else set[Path]()
        return device_bytes({path: x for path, x in self.abstract.items() if path not in frozen})

    def make(self, state: TrainState) -> Stored:
        """The copy of a state's weights: the only part of a generation phase that crosses nodes."""
        if self.form == "gathered":
            stored = from_tree(state.frozen) | stored_in_node(state)
            return {path: stored[path] for path in self.leaves}

        def compiled() -> Any:
            return per_node(self.spec, lambda shards: _whole(self, node_rows(self.spec, shards)), self.specs)

        return self.spec.once(f"generation copy {self.form} {self.adapters}", compiled)(state)

    def place(self, stored: Stored) -> dict[Path, Any]:
        """The weights as the model gets them, inside ``shard_map``: ``Sharded`` in units, whole elsewhere."""
        placed: dict[Path, Any] = {}
        for group in self.spec.groups:
            placed |= place_group(self.spec, group, self._sharded(group, stored), train=False)
        return placed

    def _sharded(self, group: ParamGroup, stored: Stored) -> dict[Path, Sharded]:
        seeds = jnp.zeros(group.stack, jnp.uint32)  # nothing random is left: dropout is off

        def one(leaf: ParamLayout) -> Sharded:
            source = stored[leaf.path]
            if self.form != "compute":
                source = jax.tree.map(lambda x: rows_of(x, leaf), source)
            return Sharded(source, None, seeds, leaf, self.strategy)

        return {leaf.path: one(self.leaves[leaf.path]) for leaf in group.every if leaf.path in self.leaves}


def _stored_layout(spec: TrainSpec, leaf: ParamLayout, form: Form, *, adapter: bool) -> ParamLayout:
    if form in ("gathered", "compute"):
        return node_layout(leaf)
    if _keeps_format(leaf):
        return dataclasses.replace(_gathered(leaf), frozen=True)
    zero = spec.zero
    options = ZeroConfig(
        compute_dtype=zero.compute_dtype,
        precise=zero.precise,
        block_size=zero.block_size,
        frozen=("*",),
        frozen_weights=None if adapter else form,
    )
    return make_layout(leaf, index=leaf.index, world=MeshShape(1, 1), zero=options, frozen=True)


def _gathered(leaf: ParamLayout) -> ParamLayout:
    """The layout of what is gathered over both axes: shards in their order, as if on nodes of one device."""
    return dataclasses.replace(leaf, world=MeshShape(leaf.world.size, 1))


def _keeps_format(leaf: ParamLayout) -> bool:
    """Whether a weight is stored in an 8-bit form as it comes."""
    return leaf.fp8 or (leaf.frozen and not leaf.weights.local.raw)


def _whole(copy: GenerationCopy, rows: Stored) -> Stored:
    """Gather secondary partitions over ``local`` and store whole weights, layer by layer."""
    stored: Stored = {}
    for group in copy.spec.groups:
        leaves = tuple(leaf for leaf in group.every if leaf.path in copy.leaves)
        layer = functools.partial(_whole_layer, copy, leaves)
        values = tuple(rows[leaf.path] for leaf in leaves)
        results = lax.map(layer, values) if group.stack else layer(values)
        stored |= {leaf.path: x for leaf, x in zip(leaves, results, strict=True)}
    return stored


def _whole_layer(
    copy: GenerationCopy, leaves: Sequence[ParamLayout], values: Sequence[Any]
) -> tuple[Any, ...]:
    arrived = [array_of(x).reshape(-1) for x in values]
    if copy.spec.world.local > 1:
        arrived = [x.reshape(-1) for x in gather_together(arrived, LOCAL)]
    return tuple(
        _stored_whole(copy, leaf, value, gathered)
        for leaf, value, gathered in zip(leaves, values, arrived, strict=True)
    )


def _stored_whole(copy: GenerationCopy, leaf: ParamLayout, value: Any, gathered: Array) -> Any:
    """One whole weight in the copy's form.

    Args:
        copy: says in which form.
        leaf: the weight's layout in the state.
        value: its secondary partition, for the scale.
        gathered: the encoded shards of all devices, in their order.
    """
    if copy.form != "compute" and _keeps_format(leaf):
        return with_values(value, gathered)
    weight = decoded_weight(gathered, _gathered(leaf), copy.spec.strategy.weight_dtype(leaf))
    if isinstance(weight, Codes):
        weight = (fp8.decode(weight.codes, jnp.float32) / value.scale).astype(weight.gradient.dtype)
    if copy.form == "compute":
        return weight
    own = copy.leaves[leaf.path]
    return own.weights.local.encode(flatten(weight, own)[None])[0]
