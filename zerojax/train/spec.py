"""The train spec, which stays the same for a run: the model, its layouts, and how parameters travel."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from zerojax.adapters import Adapter, LossFn, Model, adapt
from zerojax.adapters.adapter import Parameter
from zerojax.errors import ConfigurationError
from zerojax.matmul.lora import A, B, LoRA
from zerojax.optim.layerwise import LayerwiseOptimizer
from zerojax.optim.low_precision import with_moments_as_set
from zerojax.optim.shard_check import OnLayout, Optimizer, Whole, on_shards
from zerojax.sharding.fragments import Fragments
from zerojax.sharding.layout import OWNED, ParamLayout, make_layout
from zerojax.sharding.memory import HOST
from zerojax.sharding.mesh import LOCAL, NODE, MeshShape, checked_mesh, refuse_another
from zerojax.sharding.param_tree import Path, by_name
from zerojax.sharding.strategy import Level, ShardingStrategy
from zerojax.train.spikes import SpikeRule
from zerojax.validation.patterns import refuse_idle
from zerojax.weights import Weight
from zerojax.zero_config.config import ZeroConfig
from zerojax.zero_config.options import MATMUL_WEIGHTS, Stored

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

    def encoded(self, leaf: ParamLayout) -> Weight:
        """The description of a trained weight as its owners send it next."""
        codec = leaf.next_codec
        shape = (*leaf.stack, leaf.world.size * codec.row_items(leaf.shard))
        sharding = self.held(leaf.spec(leaf.owners), "encoded")
        values = jax.ShapeDtypeStruct(shape, codec.dtype, sharding=sharding)
        scale = self.abstract(leaf.stack, jnp.float32) if leaf.fp8 else None
        return Weight(values, leaf, "primary", scale, is_encoded=True)

    def stored(self, leaf: ParamLayout, level: Level) -> Weight:
        """The description of a weight that a state holds at a level, in the local hop's format."""
        axes = {"primary": OWNED, "secondary": (LOCAL,), "full": ()}[level]
        codec = leaf.weights.local
        shape = (*leaf.stack, leaf.world.size * codec.row_items(leaf.shard))
        values = self.abstract(shape, codec.dtype, leaf.spec(axes))
        scale = self.abstract(leaf.stack, jnp.float32) if leaf.fp8 else None
        return Weight(values, leaf, level, scale)

    def stored_frozen(self, leaf: ParamLayout) -> Weight:
        """The description of a frozen weight in a state."""
        stored = self.stored(leaf, self.strategy.frozen)
        there = self.held(stored.values.sharding.spec, "frozen")
        return stored.replace(stored.values.update(sharding=there))

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


def build(
    model: Model,
    tx: Optimizer | None,
    loss_fn: LossFn,
    *,
    mesh: Mesh,
    zero: ZeroConfig,
    sample_batch: Any,
    spikes: SpikeRule | None = None,
    lora: LoRA | None = None,
) -> TrainSpec:
    """Check that a model, an optimizer, a loss, a mesh and a config fit each other; uses no device.

    Raises:
        ConfigurationError: they do not fit; the message says which ones and what to do.
    """
    mesh = checked_mesh(mesh)
    refuse_another(mesh)
    world = MeshShape.of(mesh)
    check_options(zero, world)
    adapter = adapt(model, zero.units, loss_fn, sample_batch, world)
    if not adapter.parameters:
        raise ConfigurationError("the model has no floating-point parameters to train.")
    by_name([p.path for p in adapter.parameters])
    parameters = (*adapter.parameters, *adapter_parameters(adapter.parameters, zero, lora))
    own = len(adapter.parameters)
    whole = tx.whole if isinstance(tx, OnLayout) else None
    layouts = [lay_out(p, i, world, zero, adapter=i >= own, whole=whole) for i, p in enumerate(parameters)]
    leaves = tuple(leaf for leaf in layouts if not leaf.frozen)
    frozen = tuple(leaf for leaf in layouts if leaf.frozen)
    if not leaves and tx is not None:
        raise ConfigurationError(
            f"ZeroConfig.frozen={zero.frozen} leaves nothing to train: give the state adapters by lora=, or "
            'leave weights out by a last pattern such as "!*lm_head*". A state for inference alone has no '
            "optimizer (tx=None)."
        )
    zero.check_patterns([p.name for p in adapter.parameters])
    if zero.matmul_dtype == "fp8" and not any(leaf.fp8 for leaf in layouts):
        why = {str(_without_fp8(zero, p)): p.name for p in reversed(adapter.parameters)}
        reasons = "; ".join(f"{name!r}: {reason}" for reason, name in why.items())
        raise ConfigurationError(f'matmul_dtype="fp8" applies to no weight ({reasons}).')
    units = [p.unit for p in parameters]
    if zero.accumulate_order == "breadth" and all(unit is None for unit in units):
        raise ConfigurationError(
            'accumulate_order="breadth" runs micro-batches through one unit after another, and no unit is '
            "named: name the model's block classes in ZeroConfig.units, or use zerojax.Stack."
        )
    check_host_weights(zero, frozen)
    if zero.in_host("activations") and not adapter.stacks:
        raise ConfigurationError(
            'ZeroConfig.host=("activations", ...) moves the residuals of a zerojax.Stack, '
            "and the model has no stack: stack its blocks (an NNX model), or leave the activations "
            "on the device."
        )

    def of_unit(unit: str | None, some: Sequence[ParamLayout]) -> tuple[ParamLayout, ...]:
        return tuple(leaf for leaf in some if units[leaf.index] == unit)

    groups = tuple(
        ParamGroup(unit, of_unit(unit, leaves), of_unit(unit, frozen)) for unit in dict.fromkeys(units)
    )
    if zero.stage == 3 and all(unit is None for unit in units):
        warnings.warn(
            "no unit is named, so the whole model is gathered at once: name its block classes in "
            "ZeroConfig.units, or use zerojax.Stack, to gather layer by layer.",
            stacklevel=4,
        )
    # With local updates each node has its own optimizer.
    updated = tuple(leaf.in_node for leaf in leaves) if zero.every else leaves
    transform = layerwise = None
    if tx is not None:
        transform = with_moments_as_set(on_shards(tx, mesh, updated, zero), zero)
        if zero.updates_by_layers:
            paths = [[leaf.path for leaf in group.leaves] for group in groups if group.leaves]
            layerwise = LayerwiseOptimizer(tx, transform, mesh, updated, paths, zero)
    strategy = ShardingStrategy.of(zero)
    spec = TrainSpec(
        mesh,
        world,
        zero,
        adapter,
        transform,
        loss_fn,
        leaves,
        groups,
        strategy,
        spikes,
        frozen=frozen,
        lora=lora,
        whole=whole,
        layerwise=layerwise,
    )
    check_update_in_backward(spec)
    return spec


def adapter_parameters(
    parameters: Sequence[Parameter], zero: ZeroConfig, lora: LoRA | None
) -> list[Parameter]:
    """The parameters of low-rank adapters for a model's weights.

    Raises:
        ConfigurationError: no weight gets an adapter; a target matches nothing, or is not frozen; or dropout
            with micro-batches in breadth.
    """
    if lora is None:
        return []
    names = [p.name for p in parameters]
    refuse_idle("LoRA.targets", lora.targets, names, default=MATMUL_WEIGHTS)
    refuse_idle("LoRA.pieces", [pattern for pattern, *_ in lora.pieces], names)
    if lora.dropout and zero.accumulate_order == "breadth":
        raise ConfigurationError(
            "LoRA.dropout would zero the same elements in all micro-batches in breadth: set "
            'accumulate_order="depth", or dropout=0.'
        )
    chosen = [p for p in parameters if lora.without(p.name, p.shape, p.unit, of_experts=p.of_experts) is None]
    if not chosen:
        raise ConfigurationError(
            f"no weight gets an adapter: LoRA.targets={lora.targets} matches no two-dimensional weight of a "
            "unit, and none of Flax's attention or of experts. Give patterns of such weights."
        )
    if trained := [p.name for p in chosen if not zero.is_frozen(p.name)]:
        raise ConfigurationError(
            f"an adapter needs a frozen weight, and {trained[0]!r} is trained: freeze the model by "
            f"ZeroConfig(frozen=(\"*\",)), or leave the weight out by LoRA(targets=(..., '!{trained[0]}'))."
        )
    return [
        Parameter((*p.path, name), shape, "float32", p.stack, p.unit, p.of_experts)
        for p in chosen
        for name, shape in lora.shapes(p.name, p.shape).items()
    ]


def lay_out(
    p: Parameter,
    index: int,
    world: MeshShape,
    zero: ZeroConfig,
    *,
    adapter: bool = False,
    whole: Whole | None = None,
) -> ParamLayout:
    """The layout of a parameter of the model, or of an adapter.

    Args:
        p: the parameter.
        index: its number.
        world: extents of the mesh.
        zero: the options.
        adapter: whether it belongs to an adapter.
        whole: tells whether the optimizer needs a matrix whole. If the options say so, every node then holds
            the matrix.
    """
    fp8 = not adapter and _without_fp8(zero, p) is None
    frozen = not adapter and zero.is_frozen(p.name)
    parts = zero.parts_of(p.name, p.shape[0], world.local) if p.of_experts else 1
    make = functools.partial(
        make_layout,
        p,
        index=index,
        world=world,
        zero=zero,
        fp8=fp8,
        frozen=frozen,
        parts=parts,
        of_experts=p.of_experts,
    )
    layout = make()
    if frozen or zero.stage < 3 or world.nodes == 1 or zero.every:
        return layout
    needed = zero.matrix_spread == "node" and whole is not None and whole(layout)
    return make(in_every_node=True) if needed or zero.state_spread == "node" else layout


def _without_fp8(zero: ZeroConfig, p: Parameter) -> str | None:
    return zero.without_fp8(p.name, p.shape, p.unit, of_experts=p.of_experts)


def check_host_weights(zero: ZeroConfig, frozen: Sequence[ParamLayout]) -> None:
    """Refuse host memory for weights if all master weights are on the device."""
    if zero.in_host("encoded") and not zero.in_host("masters") and not frozen:
        raise ConfigurationError(
            'ZeroConfig.host has "weights" without "optimizer", and no weight is frozen: the fp32 master '
            'weights, which are larger, stay on the device. Use ("optimizer", "weights").'
        )


def check_update_in_backward(spec: TrainSpec) -> None:
    """Refuse updates in the backward pass that the optimizer or the model does not support.

    Raises:
        ConfigurationError: the optimizer needs gradients of several layers, or there is no stack to update.
    """
    if not spec.zero.update_in_backward or spec.layerwise is None:
        return
    spec.layerwise.refuse_in_backward()
    if not spec.updated_in_backward:
        raise ConfigurationError(
            "ZeroConfig.update_in_backward updates the layers of a zerojax.Stack, and the model has none "
            "that is trained and shares no weight: stack its blocks (an NNX model), or leave it out."
        )


def check_options(zero: ZeroConfig, world: MeshShape) -> None:
    """Refuse options that do not fit a mesh, or each other on it.

    Raises:
        ConfigurationError: naming the options.
    """
    if not isinstance(zero, ZeroConfig):
        raise ConfigurationError(f'zero={zero!r}: give a ZeroConfig, such as ZeroConfig.preset("zero++").')
    if zero.error_feedback and world.nodes == 1 and not zero.every:
        raise ConfigurationError("error_feedback corrects the node hop, and a mesh of one node has none.")
    if world.local % zero.sequence_parallel:
        raise ConfigurationError(
            f"sequence_parallel={zero.sequence_parallel} devices of a node would share a row, which does not "
            f"divide its {world.local} devices: choose a divisor, or another local in make_mesh (mesh.local)."
        )
    if zero.chunks > 1 and zero.node_hop_once:
        raise ConfigurationError(
            "chunks overlap the two gradient hops, which lie a whole step apart when the node hop is "
            "taken once per step: leave chunks at 1."
        )
