"""The train spec, which stays the same for a run: the model, its layouts, and how parameters travel."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from zerojax.adapters.adapter import Adapter
from zerojax.adapters.loss import LossFn
from zerojax.matmul.lora import A, B, LoRA
from zerojax.optim.layerwise import LayerwiseOptimizer
from zerojax.optim.shard_check import Whole
from zerojax.sharding.fragments import Fragments
from zerojax.sharding.layout import OWNED, ParamLayout
from zerojax.sharding.memory import HOST
from zerojax.sharding.mesh import LOCAL, NODE, MeshShape
from zerojax.sharding.param_tree import Path
from zerojax.sharding.strategy import Level, ShardingStrategy
from zerojax.train.spikes import SpikeRule
from zerojax.weights import Weight
from zerojax.zero_config.config import ZeroConfig
from zerojax.zero_config.options import Stored

_EVERYONE = PartitionSpec()
# Compiled functions of layouts, which a policy, its critic and its reference share.
_ON_MESH: dict[tuple[Mesh, str], Any] = {}


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that travel together: the ones of a unit, or the ones outside of all units.

    Attributes:
        unit: the unit's name, or None.
        leaves: the layouts of trained parameters, in the model's order; adapters come last.
        frozen: the layouts of frozen parameters.
        every: both.
        stack: ``ParamLayout.stack``, which all parameters of a group share.
        layers: how many layers are stacked; 1 if none are.
    """

    unit: str | None
    leaves: tuple[ParamLayout, ...]
    frozen: tuple[ParamLayout, ...] = ()
    every: tuple[ParamLayout, ...] = field(init=False)
    stack: tuple[int, ...] = field(init=False)
    layers: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        every = (*self.leaves, *self.frozen)
        vars(self).update(every=every, stack=every[0].stack, layers=every[0].layers)


@dataclass(frozen=True, eq=False)
class TrainSpec:
    """A model, an optimizer, a loss, a mesh and a config that fit each other.

    Compared by identity, so that two specs in one process never share a compiled step.

    Attributes:
        world: extents of the devices that share one state: the mesh or, for the passes of local updates, a
            node.
        tx: the optimizer's transform of stored parameters; None for inference alone.
        leaves: layouts of the trained parameters: the model's, then the adapters'.
        frozen: layouts of the model's other parameters.
        lora: settings of the adapters, if there are any.
        whole: tells by its layout whether the optimizer needs a matrix whole; None if it needs none.
        layerwise: the optimizer's update of single layers, if its state is in host memory.
        axes: the mesh axes of ``world`` along which there are several devices.
        local_updates: whether nodes train their own weights. A state for inference alone has only the outer
            weights.
        streams: whether the optimizer updates one layer at a time, because its arrays are in host memory.
        training: the spec of a step's passes and update: this one, or with local updates the one in which
            each node trains alone.
        fragments: with local updates, the fragments of each of ``leaves``.
        updating: groups whose units refresh delta's replicas during the forward pass. There are none with
            several passes a step, or with resyncs. Then all replicas are refreshed before the first forward
            pass.
        updated_in_backward: groups whose layers the backward pass updates: stacks that share no weight with
            others.
    """

    mesh: Mesh
    world: MeshShape
    zero: ZeroConfig
    adapter: Adapter
    tx: optax.GradientTransformation | None
    loss_fn: LossFn
    leaves: tuple[ParamLayout, ...]
    groups: tuple[ParamGroup, ...]
    strategy: ShardingStrategy
    spikes: SpikeRule | None = None
    frozen: tuple[ParamLayout, ...] = ()
    lora: LoRA | None = None
    whole: Whole | None = None
    layerwise: LayerwiseOptimizer | None = None
    cache: dict[str, Any] = field(default_factory=dict, repr=False)
    axes: tuple[str, ...] = field(init=False)
    local_updates: bool = field(init=False)
    streams: bool = field(init=False)
    training: "TrainSpec" = field(init=False, repr=False)
    fragments: tuple[Fragments, ...] = field(init=False, repr=False)
    updating: tuple[ParamGroup, ...] = field(init=False)
    updated_in_backward: tuple[ParamGroup, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        zero, training = self.zero, self.tx is not None
        stacks = tuple(group for group in self.groups if group.unit in self.adapter.updating)
        before_passes = zero.passes > 1 or zero.delta_resync or self.world.nodes == 1
        in_backward = zero.update_in_backward and training
        local_updates = zero.every > 0 and training
        vars(self).update(
            axes=tuple(axis for axis in self.world.axes if self.mesh.shape[axis] > 1),
            local_updates=local_updates,
            streams=self.layerwise is not None,
            training=self._in_node() if local_updates else self,
            fragments=tuple(Fragments.of(zero, leaf) for leaf in self.leaves) if local_updates else (),
            updating=stacks if zero.weights_delta and not before_passes else (),
            updated_in_backward=tuple(group for group in stacks if group.leaves) if in_backward else (),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns itself, because the copy of a state uses the same compiled steps."""
        return self

    def once[T](self, name: str, make: Callable[[], T]) -> T:
        """The result of ``make``, such as a compiled function. It is called when ``name`` is first used."""
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]

    def once_on_mesh[T](self, name: str, make: Callable[[], T]) -> T:
        """Like ``once``, but all specs on this mesh share the result, so ``name`` must determine it."""
        key = self.mesh, name
        if key not in _ON_MESH:
            _ON_MESH[key] = make()
        return _ON_MESH[key]

    def first_opt_state(self, params: PyTree) -> PyTree:
        """The optimizer's state before the first step; with local updates one for every node."""
        if self.tx is None:
            return optax.EmptyState()
        if self.local_updates:
            return jax.vmap(self.tx.init, in_axes=None, axis_size=self.world.nodes)(params)
        return self.tx.init(params)

    @property
    def matrices(self) -> tuple[ParamLayout, ...]:
        """The trained parameters that the optimizer needs whole."""
        return tuple(leaf for leaf in self.leaves if self.whole and self.whole(leaf) and leaf.size)

    @cached_property
    def reading(self) -> "TrainSpec":
        """The spec of passes that only read a state.

        With local updates they stay within a node and read the outer weights, which are not encoded.
        """
        return dataclasses.replace(self.training, layerwise=None, cache={}) if self.local_updates else self

    def _in_node(self) -> "TrainSpec":
        layouts = self.by_path(lambda leaf: leaf.in_node)
        return self.with_layouts(layouts, self.zero.in_node, world=MeshShape(1, self.world.local))

    def with_layouts(
        self, layouts: Mapping[Path, ParamLayout], zero: ZeroConfig, **others: Any
    ) -> "TrainSpec":
        """The spec with other options, and with the layouts that ``layouts`` has for a path."""

        def of(leaves: Sequence[ParamLayout]) -> tuple[ParamLayout, ...]:
            return tuple(layouts.get(leaf.path, leaf) for leaf in leaves)

        return dataclasses.replace(
            self,
            zero=zero,
            strategy=ShardingStrategy.of(zero),
            leaves=of(self.leaves),
            frozen=of(self.frozen),
            groups=tuple(ParamGroup(group.unit, of(group.leaves), of(group.frozen)) for group in self.groups),
            cache={},
            **others,
        )

    def param_spec(self, leaf: ParamLayout) -> PartitionSpec:
        """The sharding of a parameter, its gradient and its moments. At stage 0 they are replicated."""
        # A world of one node is a part of the mesh if each node trains alone.
        within = leaf.in_every_node or self.world != MeshShape.of(self.mesh)
        return leaf.spec((leaf.owners if within else OWNED) if self.zero.stage > 0 else ())

    def in_host(self, arrays: Stored) -> bool:
        """Whether these arrays of a state are in host memory."""
        return self.zero.in_host(arrays) and (self.streams or arrays not in ("masters", "moments"))

    def held(self, spec: PartitionSpec, arrays: Stored) -> NamedSharding:
        """The sharding of arrays that may be in host memory."""
        sharding = self.sharding(spec)
        return sharding.with_memory_kind(HOST) if self.in_host(arrays) else sharding

    def param_sharding(self, leaf: ParamLayout) -> NamedSharding:
        """The sharding of a master weight."""
        return self.held(self.param_spec(leaf), "masters")

    def abstract_master(self, shape: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """The description of an fp32 array that is stored where master weights are."""
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.held(spec, "masters"))

    def stored(self, leaf: ParamLayout, level: Level, arrays: Stored | None = None) -> Weight:
        """The description of a weight that a state holds at a level, in the format of its next hop.

        ``arrays`` says which arrays of a state they are, if those may be in host memory.
        """
        where = leaf.spec({"primary": leaf.owners, "secondary": (LOCAL,), "full": ()}[level])
        codec = leaf.next_codec if level == "primary" else leaf.weights.local
        shape = (*leaf.stack, leaf.world.size * codec.row_items(leaf.shard))
        sharding = self.held(where, arrays) if arrays else self.sharding(where)
        values = jax.ShapeDtypeStruct(shape, codec.dtype, sharding=sharding)
        scale = self.abstract(leaf.stack, jnp.float32) if leaf.fp8 else None
        return Weight(values, leaf, level, scale, is_encoded=level == "primary" and not leaf.frozen)

    def abstract_residual(self, leaf: ParamLayout) -> jax.ShapeDtypeStruct:
        """The description of a parameter's error-feedback residual, which differs on every device."""
        if self.local_updates:
            shape = (self.world.nodes, *leaf.stored_shape)
            return self.abstract_master(shape, PartitionSpec(NODE, *leaf.spec((LOCAL,))))
        shape = (*leaf.stack, self.world.nodes, leaf.padded)
        return self.abstract(shape, jnp.float32, PartitionSpec(*(None for _ in leaf.stack), NODE, LOCAL))

    @cached_property
    def adapters(self) -> dict[Path, tuple[ParamLayout, ParamLayout]]:
        """The layouts of A and B for each weight that has an adapter, by the weight's path."""
        by_path = {leaf.path: leaf for leaf in self.leaves}
        parts = {leaf.path: ((*leaf.path, A), (*leaf.path, B)) for leaf in self.frozen if self.lora}
        return {path: (by_path[a], by_path[b]) for path, (a, b) in parts.items() if a in by_path}

    @cached_property
    def weights(self) -> tuple[ParamLayout, ...]:
        """The model's own parameters, trained and frozen, in its order; adapters are excluded."""
        adapters = {part.path for pair in self.adapters.values() for part in pair}
        every = (leaf for leaf in (*self.leaves, *self.frozen) if leaf.path not in adapters)
        return tuple(sorted(every, key=lambda leaf: leaf.index))

    @property
    def unit_groups(self) -> tuple[ParamGroup, ...]:
        """The groups that are units."""
        return tuple(group for group in self.groups if group.unit is not None)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A PartitionSpec on this mesh."""
        return NamedSharding(self.mesh, spec)

    def abstract(
        self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = _EVERYONE
    ) -> jax.ShapeDtypeStruct:
        """A ShapeDtypeStruct of an array on the mesh, replicated by default."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def by_path(self, make: Callable[[ParamLayout], Any]) -> dict[Path, Any]:
        """``make(leaf)`` for each leaf, by path."""
        return {leaf.path: make(leaf) for leaf in self.leaves}


def without_spec[T](x: T) -> T:
    """A copy of a dataclass without its ``spec``.

    JAX's caches keep the structure of a jitted function's arguments for as long as the process lives. With
    the spec they would keep the compiled programs of a state that is gone.
    """
    return dataclasses.replace(cast(Any, x), spec=None)


def with_spec[T](spec: TrainSpec, run: Callable[..., T]) -> Callable[..., T]:
    """``run`` as a function of ``without_spec(x)`` in place of its first argument ``x``."""

    @functools.wraps(run)
    def on_bare(x: Any, *others: Any) -> T:
        return run(dataclasses.replace(x, spec=spec), *others)

    return on_bare
