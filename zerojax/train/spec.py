"""The train spec, which is fixed for a run: the model, its leaves' layouts, and how they travel."""

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.adapters import Adapter, LossFn, Model, adapt
from zerojax.errors import ConfigurationError
from zerojax.matmul.operand import Scaled
from zerojax.optim.shard_check import OnLayout, Optimizer, check_shardable
from zerojax.sharding.layout import OWNED, ParamLayout, make_layout
from zerojax.sharding.mesh import AXES, LOCAL, NODE, MeshShape
from zerojax.sharding.param_tree import Path
from zerojax.sharding.strategy import ShardingStrategy
from zerojax.train.spikes import SpikeRule
from zerojax.zero_config import ZeroConfig

_EVERYONE = PartitionSpec()


@dataclass(frozen=True)
class ParamGroup:
    """Leaves that travel together: those of one unit, or the rest of the model.

    Attributes:
        unit: the unit's name, or None for leaves of no unit.
        leaves: their layouts, in the model's order.
    """

    unit: str | None
    leaves: tuple[ParamLayout, ...]

    @property
    def stack(self) -> tuple[int, ...]:
        """As ``ParamLayout.stack``, which all of them share."""
        return self.leaves[0].stack

    @property
    def layers(self) -> int:
        """How many layers are stacked; 1 if none are."""
        return self.leaves[0].layers


@dataclass(frozen=True, eq=False)
class TrainSpec:
    """A model, an optimizer, a loss, a mesh and a config that fit each other.

    Compared by identity, so that two specs in one process never share a compiled step.
    """

    mesh: Mesh
    zero: ZeroConfig
    adapter: Adapter
    tx: optax.GradientTransformation
    loss_fn: LossFn
    leaves: tuple[ParamLayout, ...]
    groups: tuple[ParamGroup, ...]
    strategy: ShardingStrategy
    spikes: SpikeRule | None = None
    cache: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def world(self) -> MeshShape:
        """The mesh's extents."""
        return MeshShape.of(self.mesh)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of ``make``, which is called on the first use of ``name``: a compiled function."""
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]

    def param_spec(self, leaf: ParamLayout) -> PartitionSpec:
        """The sharding of a parameter, its gradient and its moments; at stage 0 they are replicated."""
        return leaf.spec(OWNED if self.zero.stage > 0 else ())

    def secondary_spec(self, leaf: ParamLayout) -> Any:
        """The sharding of delta's secondary copy: spread over a node; its scale is replicated."""
        copy = leaf.spec((LOCAL,))
        return Scaled(copy, _EVERYONE) if leaf.fp8 else copy

    def abstract_secondary(self, leaf: ParamLayout) -> Any:
        """Delta's secondary copy of a parameter; ``Scaled`` codes, if fp8 products read it."""
        dtype, spec = leaf.weights.local.dtype, leaf.spec((LOCAL,))
        copy = self.abstract((*leaf.stack, leaf.padded), dtype, spec)
        return Scaled(copy, self.abstract(leaf.stack, jnp.float32)) if leaf.fp8 else copy

    def abstract_residual(self, leaf: ParamLayout) -> jax.ShapeDtypeStruct:
        """The error-feedback residual of a parameter; every device has its own."""
        shape = (*leaf.stack, self.world.nodes, leaf.padded)
        return self.abstract(shape, jnp.float32, PartitionSpec(*(None for _ in leaf.stack), NODE, LOCAL))

    @property
    def updating(self) -> tuple[ParamGroup, ...]:
        """Groups whose units update delta's copies during the forward pass.

        There are none with several passes a step, or with resyncs: then all copies are updated before the
        first forward pass.
        """
        zero = self.zero
        if not zero.weights_delta or zero.passes > 1 or zero.delta_resync or self.world.nodes == 1:
            return ()
        return tuple(group for group in self.groups if group.unit in self.adapter.updating)

    @property
    def batch_spec(self) -> PartitionSpec:
        """The sharding of a batch: its leading axis over all devices."""
        return PartitionSpec(AXES)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A PartitionSpec on this mesh."""
        return NamedSharding(self.mesh, spec)

    def abstract(
        self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = _EVERYONE
    ) -> jax.ShapeDtypeStruct:
        """An array's shape, dtype and sharding, replicated by default."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(spec))

    def by_path(self, make: Callable[[ParamLayout], Any]) -> dict[Path, Any]:
        """``make(leaf)`` for each leaf, by path."""
        return {leaf.path: make(leaf) for leaf in self.leaves}


def build(
    model: Model,
    tx: Optimizer,
    loss_fn: LossFn,
    *,
    mesh: Mesh,
    zero: ZeroConfig,
    sample_batch: Any,
    spikes: SpikeRule | None = None,
) -> TrainSpec:
    """Check that a model, an optimizer, a loss, a mesh and a config fit each other; no device is used.

    Raises:
        ConfigurationError: they do not fit; the message says which and what to do.
    """
    if tuple(mesh.axis_names) != AXES:
        raise ConfigurationError(f"the mesh has axes {mesh.axis_names}: make it by zerojax.make_mesh().")
    world = MeshShape.of(mesh)
    check_options(zero, world)
    adapter = adapt(model, zero.units, loss_fn, sample_batch, world)
    if not adapter.parameters:
        raise ConfigurationError("the model has no floating-point parameters to train.")
    leaves = tuple(
        make_layout(
            p.path,
            p.shape,
            p.dtype,
            p.stack,
            index=i,
            world=world,
            zero=zero,
            fp8=zero.without_fp8("/".join(p.path), p.shape, p.unit) is None,
        )
        for i, p in enumerate(adapter.parameters)
    )
    zero.check_fp8_patterns([leaf.name for leaf in leaves])
    if zero.matmul_dtype == "fp8" and not any(leaf.fp8 for leaf in leaves):
        raise ConfigurationError(
            'matmul_dtype="fp8", and no weight is computed with in it: it takes two-dimensional weights of '
            f"units with sizes that are multiples of 16, which ZeroConfig.fp8={zero.fp8} matches."
        )
    units = [p.unit for p in adapter.parameters]
    if zero.accumulate_order == "breadth" and all(unit is None for unit in units):
        raise ConfigurationError(
            'accumulate_order="breadth" runs micro-batches through one unit after another, and no unit is '
            "named: name the model's block classes in ZeroConfig.units, or use zerojax.Stack."
        )
    groups = tuple(
        ParamGroup(unit, tuple(leaf for leaf, own in zip(leaves, units, strict=True) if own == unit))
        for unit in dict.fromkeys(units)
    )
    if zero.stage == 3 and all(unit is None for unit in units):
        warnings.warn(
            "no unit is named, so the whole model is gathered at once: name its block classes in "
            "ZeroConfig.units, or use zerojax.Stack, to gather layer by layer.",
            stacklevel=4,
        )
    if isinstance(tx, OnLayout):
        tx = tx.make(mesh, leaves, zero)
    else:
        check_shardable(tx, leaves)
    return TrainSpec(mesh, zero, adapter, tx, loss_fn, leaves, groups, ShardingStrategy.of(zero), spikes)


def check_options(zero: ZeroConfig, world: MeshShape) -> None:
    """Refuse options that do not fit a mesh, or each other on it.

    Raises:
        ConfigurationError: naming the options.
    """
    if zero.error_feedback and world.nodes == 1:
        raise ConfigurationError("error_feedback corrects the node hop, and a mesh of one node has none.")
    if zero.chunks > 1 and zero.node_hop_once:
        raise ConfigurationError(
            "chunks overlap the two gradient hops, which lie a whole step apart when the node hop is "
            "taken once per step: leave chunks at 1."
        )
