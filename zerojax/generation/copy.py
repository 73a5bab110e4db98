"""The weights of a generation phase: one copy per node of all weights, made from a train state.

Generation reads every weight once per token and updates none. The copy therefore consists of frozen weights
(``zerojax.train.frozen``). The hops of a forward pass make it, so it has exactly the values of training's
forward pass. After that no weight crosses nodes (ZeRO++, section 3.2, and the hybrid engine of
DeepSpeed-Chat, Yao et al., 2023). It has one of these forms:

- "gathered": the secondary partitions, spread over the devices of a node and gathered layer by layer. Weights
  that are already frozen in this form are shared with the state.
- "compute": whole on every device, in the compute dtype.
- "int8", "fp8": whole on every device, in blocks of 8-bit codes, decoded layer by layer. Weights that are
  already stored in 8 bits or fewer, or computed with in fp8, keep their format.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from zerojax.comm.coalesced import gather_together
from zerojax.formatting import size
from zerojax.generation.checks import abstract_model
from zerojax.generation.engine import Engine
from zerojax.matmul import fp8
from zerojax.schedule.unit import Sharded
from zerojax.sharding.layout import ParamLayout, flatten, make_layout
from zerojax.sharding.memory import to_device
from zerojax.sharding.mesh import LOCAL, MeshShape
from zerojax.sharding.param_tree import Path, from_tree
from zerojax.train.memory import device_bytes
from zerojax.train.model_pass import place_group
from zerojax.train.pass_weights import ByPath
from zerojax.train.replica import per_node, replicas_in_node
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState
from zerojax.weights import Weight, Weights
from zerojax.zero_config import ZeroConfig

Form = Literal["compute", "fp8", "int8", "gathered"]


@dataclass(frozen=True, eq=False)
class GenerationCopy:
    """The layout of a generation phase's weights.

    Attributes:
        spec: the train state's spec.
        form: see this module.
        adapters: whether the copy includes low-rank adapters.
        leaves: the layout of each weight, as a frozen one.
    """

    spec: TrainSpec
    form: Form
    adapters: bool
    leaves: Mapping[Path, ParamLayout]

    @staticmethod
    def of(spec: TrainSpec, form: Form, *, adapters: bool = True) -> "GenerationCopy":
        """The copy in this form for a train spec."""
        spec = spec.reading
        small = {part.path for pair in spec.adapters.values() for part in pair}
        leaves = {
            leaf.path: _stored_layout(spec, leaf, form, adapter=leaf.path in small)
            for leaf in (*spec.leaves, *spec.frozen)
            if adapters or leaf.path not in small
        }
        return GenerationCopy(spec, form, adapters, leaves)

    @property
    def abstract(self) -> ByPath:
        """The shape, dtype and sharding of each weight."""

        def stored(leaf: ParamLayout) -> Weight:
            if self.form == "compute":
                whole = self.spec.abstract(leaf.unsharded_shape, leaf.gathered_dtype)
                return Weight(whole, leaf, "full")
            if self.form == "gathered":
                return self.spec.stored(leaf, "secondary")
            # Every device has them whole. Their units decode them as if they were local shards.
            return dataclasses.replace(self.spec.stored(leaf, "full"), level="secondary")

        return {path: stored(leaf) for path, leaf in self.leaves.items()}

    @property
    def device_bytes(self) -> int:
        """Bytes of the copy on one device, without the gathered or decoded weights of a layer."""
        return device_bytes(self.abstract)

    @property
    def new_bytes(self) -> int:
        """``device_bytes`` without weights that the copy shares with the state."""
        there = not self.spec.zero.in_host("frozen")  # on the device
        shared = there and self.form == "gathered" and self.spec.strategy.frozen == "secondary"
        frozen = {leaf.path for leaf in self.spec.frozen} if shared else set[Path]()
        return device_bytes({path: x for path, x in self.abstract.items() if path not in frozen})

    def make(self, state: TrainState) -> ByPath:
        """Copy a state's weights. No other part of a generation phase sends bytes between nodes."""
        if self.form == "gathered":
            stored = from_tree(to_device(state.frozen)) | replicas_in_node(state, every=True)
            return {
                path: dataclasses.replace(stored[path], layout=leaf) for path, leaf in self.leaves.items()
            }

        def compiled() -> Callable[[TrainState], ByPath]:
            return per_node(self.spec, functools.partial(_whole, self), self.abstract)

        return self.spec.once(f"generation copy {self.form} {self.adapters}", compiled)(state)

    def place(self, stored: ByPath) -> dict[Path, Array | Sharded]:
        """The weights for the model, inside ``shard_map``: ``Sharded`` in units, whole outside."""
        placed: dict[Path, Array | Sharded] = {}
        strategy = dataclasses.replace(self.spec.strategy, in_place=self.form == "compute")
        for group in self.spec.groups:
            seeds = jnp.zeros(group.stack, jnp.uint32)  # unused: dropout is off
            sharded = {
                leaf.path: Sharded(stored[leaf.path], None, seeds, strategy)
                for leaf in group.every
                if leaf.path in stored
            }
            placed |= place_group(self.spec, group, sharded, train=False)
        return placed


def _stored_layout(spec: TrainSpec, leaf: ParamLayout, form: Form, *, adapter: bool) -> ParamLayout:
    if form in ("gathered", "compute"):
        return dataclasses.replace(leaf, frozen=True)
    if _keeps_format(leaf):
        # Shards stay in their order, as if each were a node of one device.
        return dataclasses.replace(leaf, world=MeshShape(leaf.world.size, 1), frozen=True)
    zero = spec.zero
    options = ZeroConfig(
        compute_dtype=zero.compute_dtype,
        precise=zero.precise,
        block_size=zero.block_size,
        frozen=("*",),
        frozen_weights=None if adapter else form,
    )
    return make_layout(leaf, index=leaf.index, world=MeshShape(1, 1), zero=options, frozen=True)


def _keeps_format(leaf: ParamLayout) -> bool:
    """Whether a weight is already stored in 8 bits or fewer."""
    return leaf.fp8 or (leaf.frozen and not leaf.weights.local.raw)


def _whole(copy: GenerationCopy, in_node: ByPath) -> ByPath:
    """Gather secondary partitions over ``local`` and store whole weights, layer by layer."""
    stored: ByPath = {}
    for group in copy.spec.groups:
        weights = tuple(in_node[leaf.path] for leaf in group.every if leaf.path in copy.leaves)
        layer = functools.partial(_whole_layer, copy)
        results = lax.map(layer, weights) if group.stack else layer(weights)
        stored |= {weight.layout.path: weight for weight in results}
    return stored


def _whole_layer(copy: GenerationCopy, weights: Weights) -> Weights:
    arrived = [to_device(weight.values) for weight in weights]
    if copy.spec.world.local > 1:
        arrived = [x.reshape(-1) for x in gather_together(arrived, LOCAL)]  # owners' shards in order
    return tuple(_stored_whole(copy, *pair) for pair in zip(weights, arrived, strict=True))


def _stored_whole(copy: GenerationCopy, weight: Weight, gathered: Array) -> Weight:
    """One whole weight in the copy's form."""
    leaf = weight.layout
    own = copy.leaves[leaf.path]
    if copy.form != "compute" and _keeps_format(leaf):
        return Weight(gathered, own, "secondary", weight.scale)
    values = weight.whole(gathered).values
    if weight.scale is not None:
        values = (fp8.decode(values, jnp.float32) / weight.scale).astype(leaf.gathered_dtype)
    if copy.form == "compute":
        return Weight(values, own, "full")
    return Weight(own.weights.local.encode(flatten(values, own)[None])[0], own, "secondary")


@dataclass(frozen=True)
class GenerationMemory:
    """Bytes on one device in addition to the state, without the gathered or computed arrays of a layer.

    Attributes:
        form: the form of the weights.
        weights: bytes of the copy that it does not share with the state.
        cache: bytes of the key-value cache.
        slots: rows of the cache.
        length: tokens of a slot.
    """

    form: Form
    weights: int
    cache: int
    slots: int
    length: int

    @staticmethod
    def of(copy: GenerationCopy, engine: Engine) -> "GenerationMemory":
        """The memory of a copy and its engine."""
        cache = cache_bytes(copy.spec, engine)
        return GenerationMemory(copy.form, copy.new_bytes, cache, engine.slots, engine.length)

    def __str__(self) -> str:
        return (
            f"weights={self.form}: on each device {size(self.weights)} of weights, and {size(self.cache)} of "
            f"key-value cache for {self.slots} slots of {self.length} tokens"
        )


def cache_bytes(spec: TrainSpec, engine: Engine) -> int:
    """Bytes of the key-value cache of a device's slots."""
    bind = functools.partial(abstract_model, spec)
    return device_bytes(jax.eval_shape(lambda: engine.empty_cache(bind, engine.slots, engine.length)))


def fitting_form(spec: TrainSpec, engine: Engine, room: int, *, adapters: bool = True) -> Form:
    """The form that fits into ``room`` MiB of a device together with the cache: "compute" if possible."""

    def whole() -> int:
        copy = GenerationCopy.of(spec, "compute", adapters=adapters)
        return copy.device_bytes + cache_bytes(spec, engine)

    needed = spec.once(f"bytes of generating with {engine} {adapters}", whole)
    return "compute" if needed <= room << 20 else "gathered"
