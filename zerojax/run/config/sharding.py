"""Settings of the mesh, of sharding and adapters, and of a job of several processes."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from jax.sharding import Mesh

from pallas_kernels import Format
from zerojax.matmul.lora import LoRA
from zerojax.sharding.mesh import make_mesh
from zerojax.validation.bounds import MAX_DEVICES, MAX_EMULATED, check_numbers, require
from zerojax.validation.dtypes import dtype_name
from zerojax.zero_config import (
    COMPUTE_FORMAT,
    MATMUL_WEIGHTS,
    PRESETS,
    AccumulateOrder,
    FrozenSpread,
    GradSync,
    MatmulDtype,
    Preset,
    Remat,
    Rounding,
    ZeroConfig,
)

WireFormat = Literal["compute", Format]
FrozenFormat = Literal["compute", Format, "nf4"]


@dataclass(frozen=True)
class MeshSection:
    """The (node, local) mesh: `local` is the fast domain, `node` the slow one.

    Attributes:
        nodes: Nodes; 0 is one per process.
        local: Devices per node; 0 is all devices of a node.
        emulate: On CPU, split the host into nodes x local devices that emulate the cluster.
    """

    nodes: int = 0
    local: int = 0
    emulate: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "mesh.{}".format)
        require(self.nodes >= 0, "mesh.nodes must be 0 (from the processes) or more")
        require(self.local >= 0, "mesh.local must be 0 (all the devices of a node) or more")
        require(
            not self.emulate or (self.nodes > 0 and self.local > 0),
            "mesh.emulate needs mesh.nodes and mesh.local, the numbers of devices to emulate",
        )
        most = MAX_EMULATED if self.emulate else MAX_DEVICES
        require(
            max(self.nodes, 1) * max(self.local, 1) <= most,
            f"mesh.nodes {self.nodes} x mesh.local {self.local}: at most {most:,} devices"
            f"{' can be emulated' * self.emulate}",
        )

    def to_mesh(self) -> Mesh:
        """The mesh of this job's devices.

        Raises:
            ConfigurationError: as ``zerojax.make_mesh``.
        """
        return make_mesh(self.nodes or None, self.local or None)


@dataclass(frozen=True)
class ZeroSection:
    """How the state is sharded and what is sent.

    `preset` sets everything; every other option overrides the preset. The wire format "compute" sends the
    compute dtype.

    Attributes:
        preset: "zero3" is exact, "zero++" sends a quarter of its bytes, "delta" a sixth; "zero++-paper" is
            ZeRO++ as published, with int4 gradients within nodes, too, which trains less exactly.
        stage: ZeRO stage 0, 1, 2 or 3.
        compute_dtype: Dtype of the forward and backward pass: bfloat16 (bf16) or float32 (fp32).
        remat: What is kept of a layer for the backward pass: "none" keeps the results of matmuls,
            "attention" only attention's output, "full" only the layer's input. The rest is recomputed.
        accumulate_order: Micro-batches one by one through the whole model ("depth"), or all through each
            layer before the next ("breadth"), which communicates once per step, beside compute, and keeps
            the activations of all micro-batches.
        weights: Wire format of the weights between nodes.
        weights_delta: Send the change of the weights instead of the weights.
        delta_resync: Steps between sending whole weights in place of changes; 0 is never.
        local_weights: Wire format of the weights within a node.
        hpz: Keep a secondary copy of the weights in each node for the backward pass.
        grads: Wire formats of the gradients within a node and between nodes.
        grads_hops: Reduce gradients in 1 or 2 hops.
        grad_sync: Reduce gradients between nodes for each micro-batch, or once per step.
        block_size: Elements that share a quantization scale; best a divisor of the model's width.
        rounding: Rounding of gradients before they are sent.
        rotation: Width of the Hadamard rotation before encoding; 0 is none.
        error_feedback: Add the rounding error to the next step's gradient.
        chunks: Pieces that gradients are cut into, so that the two hops overlap.
        precise: Pairs of a path pattern and a wire format: weights and gradients whose path matches
            are never sent in fewer bits.
        matmul_dtype: Dtype of the matmuls of blocks: "fp8", or "compute", the compute dtype.
        fp8: Path patterns of the weights to compute with in fp8; "!" leaves one out, the last match decides.
        frozen: Path patterns of the weights that are not trained, as for `fp8`; by default all with adapters
            (`[lora]`), else none.
        frozen_weights: Format in which frozen weights are stored and gathered: "compute", a wire format, or
            "nf4".
        frozen_spread: "node" stores frozen weights once in each node, so they never cross nodes; "world" once
            over all devices, which takes less memory and sends them between nodes in both passes.
    """

    preset: Preset = "zero3"
    stage: int | None = None
    compute_dtype: str | None = None
    remat: Remat | None = None
    accumulate_order: AccumulateOrder | None = None
    weights: WireFormat | None = None
    weights_delta: bool | None = None
    delta_resync: int | None = None
    local_weights: WireFormat | None = None
    hpz: bool | None = None
    grads: tuple[WireFormat, WireFormat] | None = None
    grads_hops: int | None = None
    grad_sync: GradSync | None = None
    block_size: int | None = None
    rounding: Rounding | None = None
    rotation: int | None = None
    error_feedback: bool | None = None
    chunks: int | None = None
    precise: tuple[tuple[str, WireFormat], ...] | None = None
    matmul_dtype: MatmulDtype | None = None
    fp8: tuple[str, ...] | None = None
    frozen: tuple[str, ...] | None = None
    frozen_weights: FrozenFormat | None = None
    frozen_spread: FrozenSpread | None = None

    def __post_init__(self) -> None:
        if self.compute_dtype is not None:
            name = dtype_name(self.compute_dtype, "zero.compute_dtype", tuple(COMPUTE_FORMAT))
            object.__setattr__(self, "compute_dtype", name)

    def spelled_out(self) -> Self:
        """The same options, with those of the preset: they stay what they are if a preset changes."""
        chosen = PRESETS[self.preset]
        return dataclasses.replace(self, **{k: v for k, v in chosen.items() if getattr(self, k) is None})

    def to_zero(self, **settings: Any) -> ZeroConfig:
        """The library's `ZeroConfig`: the preset, overridden by what is set here and `settings`.

        Raises:
            ConfigurationError: options that contradict each other.
        """
        given = {
            f.name: value
            for f in dataclasses.fields(self)
            if f.name != "preset" and (value := getattr(self, f.name)) is not None
        }
        for name in ("weights", "local_weights", "frozen_weights"):
            if given.get(name) == "compute":
                given[name] = None
        if "grads" in given:
            given["grads"] = tuple(None if g == "compute" else g for g in given["grads"])
        return ZeroConfig.preset(self.preset, **given, **settings)


@dataclass(frozen=True)
class LoRASection:
    """Low-rank adapters of frozen weights (Hu et al., 2021).

    Attributes:
        rank: Rank of the adapters; 0 trains none.
        alpha: An adapter is multiplied by alpha / rank.
        targets: Path patterns of the two-dimensional weights that get one; "!" leaves one out, the last match
            decides.
        dropout: Probability of zeroing an element of an adapter's input.
        rslora: Multiply by alpha / sqrt(rank) instead.
        pieces: Tuples of a path pattern, columns, rank and alpha: weights whose path matches have an adapter
            of their own for so many columns, from left to right; 0 columns are all that are left.
    """

    rank: int = 0
    alpha: float = 32.0
    targets: tuple[str, ...] = MATMUL_WEIGHTS
    dropout: float = 0.0
    rslora: bool = False
    pieces: tuple[tuple[str, int, int, float], ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self, "lora.{}".format)
        require(self.rank >= 0, "lora.rank must be 0 (no adapters) or more")
        self.to_lora()

    def to_lora(self) -> LoRA | None:
        """The library's `LoRA`, or None without adapters.

        Raises:
            ConfigurationError: a value that cannot work.
        """
        return LoRA(**vars(self)) if self.rank else None


@dataclass(frozen=True)
class ClusterSection:
    """Timeouts of the processes of a run; docs/clusters.md says what happens at each.

    Attributes:
        join_timeout: Seconds to wait for all processes at the start.
        peer_timeout: Seconds of silence after which a process counts as lost, and the others end.
        insecure: Run without a token (ZEROJAX_JOB_TOKEN) even if the network can reach process 0.
        step_factor: End the run when a step takes this many times the median of recent ones; 0 never does.
        step_timeout: Seconds that any step may take, whatever the median.
        phase_timeout: Seconds that compilation, an evaluation or a checkpoint may take; 0 is no limit.
    """

    join_timeout: float = 300.0
    peer_timeout: float = 60.0
    insecure: bool = False
    step_factor: float = 10.0
    step_timeout: float = 300.0
    phase_timeout: float = 3600.0

    def __post_init__(self) -> None:
        check_numbers(self, "cluster.{}".format)
        for name in ("join_timeout", "peer_timeout"):
            require(getattr(self, name) >= 1, f"cluster.{name} must be at least 1 second")
        for name in ("step_factor", "step_timeout", "phase_timeout"):
            require(getattr(self, name) >= 0, f"cluster.{name} must not be negative")
