"""Peak FLOP/s and memory use of the devices."""

import resource
import sys

import jax

from zerojax.analysis.gpus import GPUS

# Dense bf16 FLOP/s from data sheets, for chips that the planner's table lacks.
_OTHERS = {
    "A100": 312e12,
    "A800": 312e12,
    "GB200": 2.5e15,
    "H800": 989e12,
    "TPU v4": 275e12,
    "TPU v5": 197e12,
    "TPU v5p": 459e12,
    "TPU v6": 918e12,
}
_PEAK_BF16 = _OTHERS | {gpu.kind: gpu.flops for gpu in GPUS.values()}


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of a ``jax.Device.device_kind``; None if the chip is unknown."""
    names = [name for name in _PEAK_BF16 if name in device_kind]
    return _PEAK_BF16[max(names, key=len)] if names else None


def most_memory() -> int:
    """The peak of bytes in use on this process's fullest device; the process's own peak on CPUs.

    The peak is logged because at the time of logging, between steps, only the state is in memory.
    """
    most = [
        stats["peak_bytes_in_use"]
        for device in jax.local_devices()
        if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats
    ]
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes, Linux in KiB
    return max(most, default=unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
