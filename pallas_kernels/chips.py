"""The CUDA chip that a program is lowered for."""

# jax.local_devices has no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

import jax

_KINDS = {"A100": 80, "A10": 86, "L4": 89, "H100": 90, "H200": 90, "H800": 90, "GH200": 90, "B200": 100}
_DEFAULT = 90


def _local_gpu() -> Any:  # a Device, whose compute_capability only GPU clients have
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None


def compute_capability() -> int:
    """Ten times the compute capability, 90 for an H100.

    Of a GPU of this process; without one, as when compiling for a cluster on a laptop, of the abstract device
    in context; without that, of Hopper.
    """
    gpu = _local_gpu()
    if gpu is not None:
        major, minor = gpu.compute_capability.split(".")
        return 10 * int(major) + int(minor)
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = abstract.device_kind if abstract is not None else ""
    return next((number for name, number in _KINDS.items() if kind.split(" ")[-1] == name), _DEFAULT)
