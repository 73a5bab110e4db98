"""Data sheets of GPUs for the planner and the MFU, and XLA's descriptions for ``zerojax.analysis.aot``.

The ``.txtpb`` files are GpuTargetConfigProto texts.
"""

from dataclasses import dataclass

from zerojax.errors import ConfigurationError

MATMUL_EFFICIENCY = 0.61
"""Fraction of the peak that a step's matmuls and attention reach, recomputed ones counted; measured on H200.

One and four sequences a GPU under ``remat="full"`` differ by 106.9 ms and 65 TFLOP (docs/benchmark-notes.md).
"""

CUDNN_EFFICIENCY = 0.87
"""The rate of cuDNN's attention relative to the rate of matmuls; measured on H100 and H200.

The rows had 32,768 to 1,048,576 tokens (docs/planner.md). FlashAttention-4 is as fast as matmuls there.
"""

FP8_EFFICIENCY = 0.55
"""Fraction of the fp8 peak that products with weights reach, without conversions; measured on H200.

Together with the conversions of ``zerojax.analysis.plan.speed`` it fits three stacks, of widths 2048, 4096
and 8192 (tests/analysis/plan/test_speed.py).
"""

MEMORY_EFFICIENCY = 0.9
"""Fraction of the memory bandwidth that a plain device copy reaches; measured on H200 (docs/kernels.md)."""

LINK_EFFICIENCY = 0.68
"""Fraction of the link's rate that hops within a node reach during compute; measured on H200.

It is the bytes of a step of one sequence over the step's time without matmuls and optimizer.
"""

HOST_EFFICIENCY = 0.84
"""Fraction of PCIe's rate that copies between a GPU and page-locked host memory reach.

Measured on H100: 54 GB/s in either direction.
"""

BOTH_WAYS = 0.8
"""Fraction of that rate that each direction reaches while both copy; measured on H100: 43 GB/s each."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, by its data sheet.

    Attributes:
        kind: the part of JAX's ``device_kind`` that identifies it.
        flops: peak dense FLOP/s in bf16 (V100: in fp16, it has no bf16).
        memory: bytes of its memory.
        memory_rate: bytes/s of its memory.
        link_rate: bytes/s that it sends to the other GPUs of its node, by NVLink or PCIe, in one direction.
        host_rate: bytes/s of PCIe to its host, in one direction.
        fp8_flops: peak dense FLOP/s in fp8; 0 for a GPU without fp8 matmuls.
        generation: its major compute capability.
        measured: whether the efficiencies above were measured on this GPU. Other GPUs are assumed to be
            alike.
    """

    kind: str
    flops: float
    memory: float
    memory_rate: float
    link_rate: float
    host_rate: float
    fp8_flops: float = 0.0
    generation: int = 8
    measured: bool = False

    @property
    def workspace(self) -> int:
        """Bytes that cuBLAS reserves for matmuls."""
        return (32 if self.generation >= 9 else 8) << 20


GPUS: dict[str, Gpu] = {
    "b200": Gpu("B200", 2250e12, 192e9, 8000e9, 900e9, 64e9, 4500e12, generation=10),
    "h200": Gpu("H200", 989e12, 150e9, 4800e9, 450e9, 64e9, 1979e12, generation=9, measured=True),
    "h100": Gpu("H100", 989e12, 84.9e9, 3350e9, 450e9, 64e9, 1979e12, generation=9),
    "h100-pcie": Gpu("H100 PCIe", 756e12, 84.9e9, 2000e9, 64e9, 64e9, 1513e12, generation=9),
    "a100-80": Gpu("A100-SXM4-80GB", 312e12, 84.9e9, 2039e9, 300e9, 32e9),
    "a100-40": Gpu("A100-SXM4-40GB", 312e12, 42.4e9, 1555e9, 300e9, 32e9),
    "v100-32": Gpu("V100-SXM2-32GB", 125e12, 34.1e9, 900e9, 150e9, 16e9, generation=7),
    "v100-16": Gpu("V100-SXM2-16GB", 125e12, 16.9e9, 900e9, 150e9, 16e9, generation=7),
    "l40s": Gpu("L40S", 362e12, 48e9, 864e9, 32e9, 32e9, 733e12),
    "l4": Gpu("L4", 121e12, 24e9, 300e9, 32e9, 32e9, 242e12),
    "a10g": Gpu("A10G", 70e12, 24e9, 600e9, 32e9, 32e9),
    "a6000": Gpu("A6000", 155e12, 48e9, 768e9, 32e9, 32e9),
    "rtx4090": Gpu("4090", 165e12, 24e9, 1008e9, 32e9, 32e9, 330e12),
}
"""GPUs by their names for ``zerojax plan --gpu``."""


def find_gpu(name: str) -> Gpu:
    """The GPU of this name, in upper or lower case.

    Raises:
        ConfigurationError: the name is unknown; lists the known ones.
    """
    if (known := GPUS.get(name.lower())) is None:
        raise ConfigurationError(
            f"unknown GPU {name!r}: choose one of {', '.join(GPUS)}. For any other GPU choose the most "
            "similar one, and correct it with --peak-tflops, --memory-gb, --memory-bandwidth, "
            "--local-bandwidth and --host-bandwidth"
        )
    return known
