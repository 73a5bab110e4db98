"""What the devices could do, and how full they are."""

import jax
import psutil

# Dense bf16 FLOP/s from the makers' data sheets (without sparsity); the first match counts.
_PEAK_BF16 = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("A6000", 155e12),
    ("L4", 121e12),
    ("TPU v6", 918e12),
    ("TPU v5p", 459e12),
    ("TPU v5", 197e12),
    ("TPU v4", 275e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of a `jax.Device.device_kind`, or None where the chip is not known."""
    return next((peak for name, peak in _PEAK_BF16 if name in device_kind), None)


def memory_in_use() -> int:
    """Bytes in use: on the fullest device of this process, or, where devices do not tell, by it."""
    in_use = [
        stats["bytes_in_use"]
        for device in jax.local_devices()
        if (stats := device.memory_stats()) and "bytes_in_use" in stats
    ]
    return max(in_use) if in_use else psutil.Process().memory_info().rss
