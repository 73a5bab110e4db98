"""Builds a train spec of a model, an optimizer, a loss, a mesh and a config, which fit each other."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.adapters import LossFn, Model, adapt
from zerojax.adapters.adapter import Parameter
from zerojax.errors import ConfigurationError
from zerojax.matmul.lora import LoRA
from zerojax.optim.layerwise import LayerwiseOptimizer
from zerojax.optim.low_precision import with_moments_as_set
from zerojax.optim.shard_check import OnLayout, Optimizer, Whole, on_shards
from zerojax.sharding.layout import ParamLayout, make_layout
from zerojax.sharding.mesh import MeshShape, checked_mesh, refuse_another
from zerojax.sharding.param_tree import by_name
from zerojax.sharding.strategy import ShardingStrategy
from zerojax.train.spec import ParamGroup, TrainSpec
from zerojax.train.spikes import SpikeRule
from zerojax.validation.patterns import refuse_idle
from zerojax.zero_config.config import ZeroConfig
from zerojax.zero_config.options import MATMUL_WEIGHTS


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
    if jax.config.jax_disable_jit:
        raise ConfigurationError(
            "jax.disable_jit (JAX_DISABLE_JIT): a step exists only as a compiled program. Turn it off here, "
            "and debug the model or the loss outside zerojax, or by jax.debug.print."
        )
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
        raise ConfigurationError(
            f'matmul_dtype="fp8" applies to no weight ({reasons}). Leave it out, or change what excludes '
            "them."
        )
    units = [p.unit for p in parameters]
    if zero.accumulate_order == "breadth" and all(unit is None for unit in units):
        raise ConfigurationError(
            'accumulate_order="breadth" runs micro-batches through one unit after another, and no unit is '
            "named: name the model's block classes in ZeroConfig.units, or use zerojax.Stack."
        )
    check_host_weights(zero, frozen)
    if zero.in_host("activations") and not adapter.ends:
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
        raise ConfigurationError(
            "error_feedback corrects the node hop, and a mesh of one node has none: set error_feedback=False."
        )
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
