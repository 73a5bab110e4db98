"""What never changes during a run: the model, where its leaves live, and how they travel."""

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
        unit: the unit's name, or None for what belongs to no unit.
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
        """How many layers it stacks; 1 where it is no stack."""
        return self.leaves[0].layers


@dataclass(frozen=True, eq=False)
class TrainSpec:
    """A model, an optimizer, a loss, a mesh and a config, fitted to each other.

    Compared by identity, so that two programs in one process never share a compiled step.
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
        """A compiled function, made at its first use."""
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]

    def param_spec(self, leaf: ParamLayout) -> PartitionSpec:
        """How a parameter, its gradient and its moments are stored: at stage 0 by everyone."""
        return leaf.spec(OWNED if self.zero.stage > 0 else ())

    def secondary_spec(self, leaf: ParamLayout) -> Any:
        """How delta's secondary copy is stored: spread over each node's devices; everyone has its scale."""
        copy = leaf.spec((LOCAL,))
        return Scaled(copy, _EVERYONE) if leaf.fp8 else copy

    def abstract_secondary(self, leaf: ParamLayout) -> Any:
        """Delta's secondary copy of a parameter, as stored: ``Scaled`` codes, where fp8 products read it."""
        dtype, spec = leaf.weights.local.dtype, leaf.spec((LOCAL,))
        copy = self.abstract((*leaf.stack, leaf.padded), dtype, spec)
        return Scaled(copy, self.abstract(leaf.stack, jnp.float32)) if leaf.fp8 else copy

    def abstract_residual(self, leaf: ParamLayout) -> jax.ShapeDtypeStruct:
        """The error-feedback residual of a parameter: every device its own."""
        shape = (*leaf.stack, self.world.nodes, leaf.padded)
        return self.abstract(shape, jnp.float32, PartitionSpec(*(None for _ in leaf.stack), NODE, LOCAL))

    @property
    def updating(self) -> tuple[ParamGroup, ...]:
        """Groups whose units bring delta's copies up to date on their way, beside the forward pass.

        With several passes a step, or copies sent whole from time to time, none does: it is done
        before the first forward pass.
        """
        zero = self.zero
        if not zero.weights_delta or zero.passes > 1 or zero.delta_resync or self.world.nodes == 1:
            return ()
        return tuple(group for group in self.groups if group.unit in self.adapter.updating)

    @property
    def batch_spec(self) -> PartitionSpec:
        """How a batch is sharded: its leading axis over all devices."""
        return PartitionSpec(AXES)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A PartitionSpec on this mesh."""
        return NamedSharding(self.mesh, spec)

    def abstract(
        self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = _EVERYONE
    ) -> jax.ShapeDtypeStruct:
        """The shape, dtype and place of an array that does not exist yet; by default everyone has it."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(spec))

    def by_path(self, make: Callable[[ParamLayout], Any]) -> dict[Path, Any]:
        """Something for each leaf."""
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
    """Fit a model, an optimizer, a loss, a mesh and a config to each other; no device is touched.

    Raises:
        ConfigurationError: they don't fit; the message says which and what to do.
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
    groups = tuple(_group(unit, leaves, units) for unit in dict.fromkeys(units))
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
    """Refuse options that do not go with a mesh, or with each other there.

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


def _group(unit: str | None, leaves: tuple[ParamLayout, ...], units: list[str | None]) -> ParamGroup:
    own = tuple(leaf for leaf, name in zip(leaves, units, strict=True) if name == unit)
    return ParamGroup(unit, own)
