"""The cluster of a plan, and the layout of a train spec on it, without its devices."""

from dataclasses import dataclass
from typing import cast

from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.typing import DTypeLike

from zerojax.adapters.adapter import Parameter
from zerojax.analysis.gpus import (
    BOTH_WAYS,
    FP8_EFFICIENCY,
    HOST_EFFICIENCY,
    LINK_EFFICIENCY,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Gpu,
)
from zerojax.analysis.link_report import LinkReport, Op
from zerojax.errors import ConfigurationError
from zerojax.sharding.mesh import AXES, MeshShape
from zerojax.train.build import check_host_weights, check_options, check_update_in_backward, lay_out
from zerojax.train.spec import TrainSpec
from zerojax.validation.bounds import MAX_DEVICES
from zerojax.validation.spelling import dtype_name
from zerojax.zero_config.config import COMPUTE_FORMAT, ZeroConfig

NETWORK_EFFICIENCY = 0.94
"""Payload over link rate, after Ethernet, IP and TCP headers at frames of 1500 bytes: 1448 / 1538."""

MEMORY_FRACTION = 0.75
"""Fraction of a GPU's memory that JAX takes for arrays, unless XLA_CLIENT_MEM_FRACTION says otherwise."""

_ABSURD = 1e24  # FLOP/s, bytes and bytes/s: above any hardware, and far below float overflow


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs.

    Attributes:
        nodes: number of nodes.
        local: GPUs per node.
        gpu: kind of GPU.
        bandwidth: bytes/s of one node's link, all its adapters together, in each direction.
        local_bandwidth: bytes/s that one GPU sends to the other GPUs of its node while it computes; None is
            the data sheet's rate times ``LINK_EFFICIENCY``.
        efficiency: fraction of the GPU's peak that matmuls and attention reach.
        memory_fraction: fraction of its memory available for arrays.
        host_memory: bytes of a host's memory; None if unknown.
        host_bandwidth: bytes/s of a copy between a GPU and its host in one direction; None is PCIe's rate
            times ``HOST_EFFICIENCY``.
        links: measurements between such nodes. They replace ``bandwidth``.
    """

    nodes: int
    local: int
    gpu: Gpu
    bandwidth: float
    local_bandwidth: float | None = None
    efficiency: float = MATMUL_EFFICIENCY
    memory_fraction: float = MEMORY_FRACTION
    host_memory: float | None = None
    host_bandwidth: float | None = None
    links: LinkReport | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.local < 1:
            raise ConfigurationError(
                f"a cluster must have at least 1 node of 1 GPU, not {self.nodes} of {self.local}"
            )
        if self.nodes * self.local > MAX_DEVICES:
            raise ConfigurationError(f"{self.nodes} nodes of {self.local} GPUs: at most {MAX_DEVICES:,} GPUs")
        if self.nodes > 1 and self.bandwidth <= 0 and self.links is None:
            raise ConfigurationError(
                "the rate of the network between the nodes is missing: give --bandwidth, such as 100gbit, or "
                "--links"
            )
        figures = [self.gpu.flops, self.gpu.memory, self.gpu.memory_rate, self.link_rate, self.host_rate]
        figures += [] if self.host_memory is None else [self.host_memory]
        if not 0 < min(figures) <= max(*figures, self.bandwidth) < _ABSURD:
            raise ConfigurationError(
                f"a GPU's FLOP/s, memory and rates must be above 0 and below {_ABSURD:g}"
            )
        for name in ("efficiency", "memory_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigurationError(f"{name.replace('_', '-')} {getattr(self, name)} must lie in (0, 1]")

    @property
    def world(self) -> MeshShape:
        """The mesh's extents."""
        return MeshShape(self.nodes, self.local)

    @property
    def budget(self) -> float:
        """Bytes of one GPU available to a step."""
        return self.gpu.memory * self.memory_fraction

    @property
    def link_rate(self) -> float:
        """Bytes/s at which one GPU sends to the other GPUs of its node."""
        listed = self.gpu.link_rate * LINK_EFFICIENCY
        return listed if self.local_bandwidth is None else self.local_bandwidth

    @property
    def host_rate(self) -> float:
        """Bytes/s of a copy between a GPU and its host while nothing is copied in the other direction."""
        listed = self.gpu.host_rate * HOST_EFFICIENCY
        return listed if self.host_bandwidth is None else self.host_bandwidth

    def host_seconds(self, arriving: float, leaving: float) -> float:
        """Seconds to copy ``arriving`` bytes from the host and ``leaving`` bytes to it at the same time."""
        shorter, longer = sorted((arriving, leaving))
        return (shorter / BOTH_WAYS + longer - shorter) / self.host_rate

    def network_seconds(self, op: Op, sent: float, messages: int) -> float:
        """Seconds of collectives between nodes.

        Args:
            op: the collective.
            sent: bytes that each device sends to other nodes.
            messages: number of collectives. Without measured links they have no latency.
        """
        if not sent:
            return 0.0
        if self.links is None:
            return sent * self.local / (self.bandwidth * NETWORK_EFFICIENCY)
        latency, rate = self.links.expected(op)
        return messages * latency + sent * self.local / rate

    @property
    def memory_rate(self) -> float:
        """Bytes/s at which a GPU's kernels read and write its memory."""
        return self.gpu.memory_rate * MEMORY_EFFICIENCY

    def flops(self, dtype: DTypeLike) -> float:
        """FLOP/s that matmuls reach in bfloat16, or in float32 (TF32: half as many)."""
        name = dtype_name(dtype, "dtype", tuple(COMPUTE_FORMAT))
        return self.gpu.flops * self.efficiency / (2 if name == "float32" else 1)

    def fp8_flops(self, dtype: DTypeLike) -> float:
        """FLOP/s that products with weights reach in fp8, or in ``dtype`` on a GPU without fp8."""
        reached = FP8_EFFICIENCY / MATMUL_EFFICIENCY * self.efficiency
        return self.gpu.fp8_flops * reached or self.flops(dtype)


def on_world(spec: TrainSpec, world: MeshShape, zero: ZeroConfig) -> TrainSpec:
    """The spec of the same model and optimizer with other options on another mesh, for inspection only.

    Args:
        spec: built for any mesh. If ``zero`` keeps the optimizer in host memory, so does the spec.
        world: extents of the other mesh.
        zero: the other options. Their ``units`` are ignored; the spec's are taken.
    """
    check_options(zero, world)
    streams = zero.updates_by_layers and spec.tx is not None
    if streams and spec.layerwise is None:
        raise ConfigurationError(
            "this spec was built with the optimizer on the device. To plan the optimizer in host memory, "
            "build the spec with it there."
        )
    # A layout needs only the extents and names of a mesh, no devices.
    mesh = cast(Mesh, AbstractMesh((world.nodes, world.local), AXES, axis_types=(AxisType.Auto,) * len(AXES)))
    zero = zero.replace(units=spec.zero.units)
    own = {leaf.path for leaf in spec.weights}
    moved = {
        leaf.path: lay_out(
            Parameter(leaf.path, leaf.shape, leaf.dtype, leaf.stack, group.unit, leaf.of_experts),
            leaf.index, world, zero,
            adapter=leaf.path not in own, whole=spec.whole,
        )
        for group in spec.groups
        for leaf in group.every
    }  # fmt: skip
    check_host_weights(zero, spec.frozen)
    layerwise = spec.layerwise if streams else None
    there = spec.with_layouts(moved, zero, mesh=mesh, world=world, layerwise=layerwise)
    check_update_in_backward(there)
    return there
