"""The CUDA chip that a program is lowered for."""

# jax.local_devices has no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

import jax

_KINDS = {
    **{"A100": 80, "A10": 86, "A40": 86, "L4": 89, "L40S": 89},
    **{"H100": 90, "H200": 90, "H800": 90, "GH200": 90, "B200": 100, "5090": 120},
}
"""By the last word of what a GPU calls itself."""
_DEFAULT = 90


def compute_capability() -> int:
    """Ten times the compute capability, 90 for an H100.

    Of a GPU of this process; without one, as when compiling for a cluster on a laptop, of the abstract device
    in context; without that, of Hopper.
    """
    try:
        gpu: Any = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
        kind = abstract.device_kind if abstract is not None else ""
        return _KINDS.get(kind.split(" ")[-1], _DEFAULT)
    major, minor = gpu.compute_capability.split(".")  # which only devices of GPU clients have
    return 10 * int(major) + int(minor)
