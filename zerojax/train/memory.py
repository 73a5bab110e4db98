"""What arrays take of a device's memory, and how much a train state leaves."""

import math
from typing import Any

import jax
import numpy as np

from zerojax.train.fields import abstract_fields
from zerojax.train.spec import TrainSpec

_SHARE = 0.85
"""The share of a device's memory to plan with; the rest is for a layer's work and fragments."""


def device_bytes(tree: Any) -> int:
    """Bytes on one device of a tree of arrays or ShapeDtypeStructs; of those without a sharding, all."""

    def one(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize  # which random keys have, too

    return sum(map(one, jax.tree.leaves(tree)))


def state_bytes(spec: TrainSpec) -> int:
    """Bytes of a state on one device."""
    return spec.once("bytes of the state", lambda: device_bytes(abstract_fields(spec)))


def free_memory(spec: TrainSpec) -> int:
    """MiB of a device's memory that are free with the state in it; unlimited where it is not known."""
    stats = [device.memory_stats() or {} for device in spec.mesh.local_devices]
    known = [one for one in stats if "bytes_limit" in one]
    if not known:
        return np.iinfo(np.int32).max
    free = (
        int(_SHARE * one["bytes_limit"]) - max(state_bytes(spec), one.get("bytes_in_use", 0)) for one in known
    )
    return max(0, min(free)) >> 20
