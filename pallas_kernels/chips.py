"""The CUDA chip that a program is lowered for."""

# jax.local_devices has no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

import jax

_KINDS = {
    **{"A100": 80, "A10": 86, "A40": 86, "L4": 89, "L40S": 89},
    **{"H100": 90, "H200": 90, "H800": 90, "GH200": 90, "B200": 100, "5090": 120},
}
"""Ten times the compute capability by the last word of a GPU's name."""
_DEFAULT = 90


def compute_capability() -> int:
    """Ten times the compute capability, such as 90 for an H100.

    It describes a GPU of this process. A process without GPUs, such as one that compiles for a cluster, takes
    the abstract device in context, or else Hopper.
    """
    try:
        gpu: Any = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
        kind = abstract.device_kind if abstract is not None else ""
        return _KINDS.get(kind.split(" ")[-1], _DEFAULT)
    major, minor = gpu.compute_capability.split(".")  # only devices of GPU clients have it
    return 10 * int(major) + int(minor)
