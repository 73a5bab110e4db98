"""Sharding strategies: the level at which a unit's weights start, where they are kept, where gradients end.

The stages of ZeRO and hpZ differ only in these three levels (see ``zerojax.sharding.layout``):

===================== ========= ========= ==========
                      source    keep      grad_level
===================== ========= ========= ==========
stages 0 and 1        full      full      full
stage 2               full      full      primary
stage 3               primary   primary   primary
stage 3, hpZ          primary   secondary primary
stage 3, delta        secondary secondary primary
===================== ========= ========= ==========

Frozen weights start at "secondary". With ``frozen_spread="world"`` they start at "primary", where trained
weights then start too. If the node hop is taken once per step, gradients end at the secondary partition.

A weight knows its own level (``zerojax.weights``), because two cases differ from the table. A pass that reads
the node's replica starts with every weight at "secondary". A stack that refreshes delta's replica during its
forward pass starts at "primary".
"""

from dataclasses import dataclass, field
from typing import Literal

from pallas_kernels.formats import RAW
from zerojax.sharding.mesh import LOCAL, NODE
from zerojax.zero_config.config import ZeroConfig
from zerojax.zero_config.options import Remat

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
    """The levels between which weights and gradients travel, and how they travel.

    Attributes:
        source: the level at which a step begins with the trained weights.
        keep: the lowest level from which the backward pass gathers again.
        grad_level: the level at which a unit leaves its gradients.
        grad_dtype: dtype of gradients left at level "full".
        remat: the rematerialisation policy within the unit.
        hops: collectives that sum a gradient over all devices. 2 send M bytes between nodes for each node. 1
            is a single all-to-all over both axes (the paper's Figure 3) and sends M for each device.
        chunks: pieces into which the owner's block is cut if there are two hops.
        separate_stream: whether hops between nodes, of weights too, run on a separate stream
            (``zerojax.comm.coalesced``).
        frozen: the level at which frozen weights are stored; "primary" only if trained weights start and are
            kept there.
        sums_in_pass: whether the backward pass sends gradient sums to all nodes layer by layer, for the
            parameters whose masters every node holds (``ParamLayout.in_every_node``). Gradients then have the
            size of "secondary". Otherwise these sums are sent once per step, after the passes.
        in_place: whether products read a layer's weights inside their stack (``LayerOperand``), which is
            faster for few tokens.
        residuals_in_host: the fraction of a ``Stack``'s residuals that is kept in host memory.
        reads_layers: whether the optimizer reads gradients layer by layer because its state is in host
            memory.
        summed_at: the level at which a gradient is summed: ``grad_level`` or, if that is "full", the owner.
        backward_axes: the mesh axes over which a unit's backward pass communicates.
    """

    source: Level
    keep: Level
    grad_level: Level
    grad_dtype: str
    remat: Remat
    hops: int = 2
    chunks: int = 1
    separate_stream: bool = False
    frozen: Literal["primary", "secondary"] = "secondary"
    sums_in_pass: bool = False
    in_place: bool = False
    residuals_in_host: float = 0.0
    reads_layers: bool = False
    summed_at: Literal["secondary", "primary"] = field(init=False, compare=False, repr=False)
    backward_axes: frozenset[str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        summed_at: Level = "secondary" if self.grad_level == "secondary" else "primary"
        sums = frozenset[str]() if self.grad_level == "full" else DIFFERING[summed_at]
        vars(self).update(summed_at=summed_at, backward_axes=DIFFERING[self.keep] | sums)

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
            # One micro-batch's gradients are not added to anything before they are reduced.
            grad_dtype=str(zero.compute_dtype) if zero.passes == 1 else "float32",
            remat=zero.remat,
            hops=zero.grads_hops,
            chunks=zero.chunks,
            separate_stream=_separate_stream(zero, keep, grad_level),
            frozen="primary" if zero.frozen_spread == "world" else "secondary",
            sums_in_pass=zero.stage == 3 and grad_level == "primary" and zero.passes == 1,
            residuals_in_host=zero.host_activations if zero.in_host("activations") else 0.0,
            reads_layers=zero.updates_by_layers,
        )


def _separate_stream(zero: ZeroConfig, keep: Level, grad_level: Level) -> bool:
    """Whether hops between nodes run on a separate stream from hops within a node.

    A separate stream needs one collective per hop. It is therefore off with chunks, with raw gradients
    (joining would copy them at full size), and if the backward pass also gathers from other nodes. It is also
    off if no micro-batch crosses nodes.
    """
    crosses = grad_level == "primary" or not zero.weights_delta or zero.passes == 1
    quantized = zero.grad_formats.local not in RAW
    return crosses and keep == "secondary" and quantized and zero.grads_hops == 2 and zero.chunks == 1
