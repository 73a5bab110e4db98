"""Sharding strategies: the level at which a unit's weights start, are kept, and its gradients end.

The stages of ZeRO and hpZ differ only in these (levels as in ``zerojax.sharding.layout``):

===================== ========= ========= ==========
                      source    keep      grad_level
===================== ========= ========= ==========
stages 0 and 1        full      full      full
stage 2               full      full      primary
stage 3               primary   primary   primary
stage 3, hpZ          primary   secondary primary
stage 3, delta        secondary secondary primary
===================== ========= ========= ==========

Frozen weights start at "secondary", or with ``frozen_spread`` at "primary", as the trained ones do then. If
the node hop is taken once per step, gradients end at the secondary partition.

A weight knows its own level (``zerojax.weights``). A pass by copies that every node has finds all of them at
"secondary", and a stack whose layers update delta's copies as they are gathered finds its own at "primary".
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Num

from pallas_kernels import RAW
from zerojax.sharding.layout import OWNED, ParamLayout
from zerojax.sharding.mesh import LOCAL, NODE, MeshShape
from zerojax.zero_config.config import Remat, ZeroConfig

Level = Literal["primary", "secondary", "full"]
LEVELS: tuple[Level, ...] = ("primary", "secondary", "full")
"""The levels in the order in which a weight is gathered."""
DIFFERING: dict[Level, frozenset[str]] = {
    "primary": frozenset((NODE, LOCAL)),
    "secondary": frozenset((LOCAL,)),
    "full": frozenset(),
}
"""The mesh axes along which weights at a level differ between devices, and over which they are gathered."""


@dataclass(frozen=True)
class ShardingStrategy:
    """Between which levels weights and gradients travel, when, and how.

    Attributes:
        source: the level at which a step begins with the trained weights.
        keep: the level from which the backward pass gathers again, at the lowest.
        grad_level: the level at which a unit leaves its gradients.
        compute_dtype: of the gathered weights.
        grad_dtype: of gradients left at level "full".
        remat: the rematerialisation policy within the unit.
        hops: of a gradient that is summed over the world: 2, or 1 for a single all-to-all over both axes (the
            paper's Figure 3), in which every device sends every other its block: M between nodes per device,
            while two hops send M per node.
        chunks: the number of pieces of the owner's block if there are two hops.
        own_stream: whether hops between nodes, also those of the weights, have a stream of their own
            (``zerojax.comm.coalesced``).
        frozen: the level at which the weights that are not trained are stored; "primary" only if the others
            start and are kept there.
        sums_in_pass: whether the backward pass, layer by layer, sends sums of gradients to all nodes where
            those need them (``ParamLayout.in_every_node``), and leaves them in the size of "secondary". Else
            they are sent once per step, after the passes.
        in_place: whether products read a layer's weights in their stack (``LayerOperand``): where there are
            few tokens.
        residuals_in_host: the part of what a ``Stack`` keeps for its backward pass that is in host memory.
        reads_layers: whether the optimizer reads gradients layer by layer, its state being in host memory.
    """

    source: Level
    keep: Level
    grad_level: Level
    compute_dtype: str
    grad_dtype: str
    remat: Remat
    hops: int = 2
    chunks: int = 1
    own_stream: bool = False
    frozen: Literal["primary", "secondary"] = "secondary"
    sums_in_pass: bool = False
    in_place: bool = False
    residuals_in_host: float = 0.0
    reads_layers: bool = False

    @staticmethod
    def of(zero: ZeroConfig) -> "ShardingStrategy":
        """The strategy for a config."""
        source: Level = "full"
        keep: Level = "full"
        if zero.stage == 3:
            source = "secondary" if zero.weights_delta else "primary"
            keep = "secondary" if zero.hpz else "primary"
        grad_level: Level = "full"
        if zero.stage >= 2:
            grad_level = "secondary" if zero.node_hop_once else "primary"
        return ShardingStrategy(
            source=source,
            keep=keep,
            grad_level=grad_level,
            compute_dtype=str(zero.compute_dtype),
            # One micro-batch's gradients are not added to anything before they are reduced.
            grad_dtype=str(zero.compute_dtype) if zero.passes == 1 else "float32",
            remat=zero.remat,
            hops=zero.grads_hops,
            chunks=zero.chunks,
            own_stream=_own_stream(zero, keep, grad_level),
            frozen="primary" if zero.frozen_spread == "world" else "secondary",
            sums_in_pass=zero.stage == 3 and grad_level == "primary" and zero.passes == 1,
            residuals_in_host=zero.host_activations if "activations" in zero.host else 0.0,
            reads_layers="optimizer" in zero.host,
        )

    def weight_dtype(self, leaf: ParamLayout) -> jnp.dtype:
        """The dtype to compute with a parameter in: never wider than the model's own."""
        return min(jnp.dtype(self.compute_dtype), jnp.dtype(leaf.dtype), key=lambda d: d.itemsize)

    @property
    def summed_at(self) -> Literal["secondary", "primary"]:
        """The level at which a gradient is summed: ``grad_level`` or, if that is "full", the owner."""
        return "secondary" if self.grad_level == "secondary" else "primary"

    def axes(self, world: MeshShape) -> tuple[str | tuple[str, str], ...]:
        """The mesh axes that a gradient crosses to be summed, in order, without those of extent 1."""
        if self.summed_at == "primary" and self.hops == 1:
            return (OWNED,) if world.size > 1 else ()
        extents = {LOCAL: world.local} | ({NODE: world.nodes} if self.summed_at == "primary" else {})
        return tuple(axis for axis, extent in extents.items() if extent > 1)

    def reduces_between_nodes(self, world: MeshShape) -> bool:
        """Whether gradients cross the nodes on their way to ``grad_level``."""
        return self.grad_level == "primary" and world.nodes > 1

    @property
    def backward_axes(self) -> frozenset[str]:
        """The mesh axes over which a unit's backward pass communicates."""
        sums = DIFFERING["primary" if self.grad_level == "primary" else "secondary"]
        return DIFFERING[self.keep] | (frozenset() if self.grad_level == "full" else sums)

    def zero_sink(self, leaf: ParamLayout) -> Num[Array, "..."]:
        """A gradient of zeros at ``grad_level``; of all layers, if the parameter is stacked."""
        if self.grad_level == "full":
            return jnp.zeros(leaf.on_device.unsharded_shape, self.grad_dtype)
        return jnp.zeros((*leaf.stack, self.grad_size(leaf)), jnp.float32)

    def grad_size(self, leaf: ParamLayout) -> int:
        """Elements of one layer of a gradient at ``grad_level``, which is not "full", on one device."""
        if self.grad_level == "secondary":
            return leaf.secondary
        return leaf.owned if self.sums_in_pass else leaf.shard


def _own_stream(zero: ZeroConfig, keep: Level, grad_level: Level) -> bool:
    """Whether hops between nodes get a stream of their own, apart from hops within a node.

    That needs one collective per hop. So it is off if the backward pass also gathers from other nodes, with
    chunks, with raw gradients, which joining would copy at full size, and if no micro-batch crosses nodes.
    """
    crosses = grad_level == "primary" or not zero.weights_delta or zero.passes == 1
    quantized = zero.grad_formats.local not in RAW
    return crosses and keep == "secondary" and quantized and zero.grads_hops == 2 and zero.chunks == 1
