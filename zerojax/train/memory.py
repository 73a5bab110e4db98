"""Memory that arrays take on a device and on its host, and how much a train state leaves free."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.comm.gather import gather_from_all
from zerojax.errors import ConfigurationError, RunError
from zerojax.formatting import size
from zerojax.sharding.host_memory import (
    LIMIT,
    SAVING,
    host_limit,
    locked_bytes,
    memory_limits,
    piece_bytes,
    pool_bytes,
    shortage,
)
from zerojax.sharding.memory import HOST, to_host
from zerojax.sharding.mesh import on_gpus
from zerojax.train.fields import abstract_fields
from zerojax.train.spec import TrainSpec

_SHARE = 0.85
"""The share of a device's memory to plan with; the rest is for a layer's work and fragments."""

_reserved: list[int] = []
"""Bytes for each GPU that this process has reserved. A reservation may use what an earlier one left free, so
the largest counts.
"""


def device_bytes(tree: Any) -> int:
    """Bytes in one device's memory of a tree of arrays or ShapeDtypeStructs.

    Arrays without a sharding count whole; arrays in host memory do not count.
    """
    return sum(_part_bytes(x) for x in jax.tree.leaves(tree) if not _in_host(x))


def host_bytes(tree: Any) -> int:
    """Bytes in host memory, for one device, of a tree of arrays or ShapeDtypeStructs with shardings."""
    return sum(_part_bytes(x) for x in jax.tree.leaves(tree) if _in_host(x))


def _in_host(x: Any) -> bool:
    return getattr(getattr(x, "sharding", None), "memory_kind", None) == HOST


def _part_bytes(x: Any) -> int:
    """Bytes of one device's part of an array; 0 for a Python number that a program has set."""
    if not hasattr(x, "dtype"):
        return 0
    sharding = getattr(x, "sharding", None)
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize  # which random keys have, too


def state_bytes(spec: TrainSpec) -> int:
    """Bytes of a state in one device's memory."""
    return spec.once("bytes of the state", lambda: device_bytes(abstract_fields(spec)))


def held_in_host(spec: TrainSpec, activations: int = 0) -> int:
    """Bytes in host memory for one device: of a state, and of a step's residuals."""
    return host_bytes(abstract_fields(spec)) + activations


def check_host_memory(spec: TrainSpec, activations: int = 0, *, saves: bool = False) -> None:
    """Refuse arrays that do not fit in this host's memory, or in the part of it that XLA may lock.

    All processes call it together, before arrays are made, because processes on a host share its memory.
    Memory that a process has reserved counts as its own.

    Args:
        spec: of a state whose devices exist.
        activations: bytes a device that a step keeps in host memory.
        saves: whether checkpoints are saved, which takes additional memory.

    Raises:
        ConfigurationError: says how much is needed, how much there is, and what to do.
    """
    devices = len(spec.mesh.local_devices)
    held = held_in_host(spec, activations)
    if not held:
        return
    what = (
        f"ZeroConfig.host={spec.zero.host} keeps {size(devices * held)} in the memory of a host, for "
        f"{devices} device{'s' * (devices > 1)} of a process"
    )
    pools = on_gpus(spec.mesh.local_devices)
    pool, locked = (pool_bytes(held), locked_bytes(held)) if pools else (held, held)
    saves = saves and spec.streams
    needed = devices * max(0, locked - max(_reserved, default=0)) + SAVING * saves
    if short := shortage(gather_from_all((needed, memory_limits()))):
        need = "It needs" if short.processes == 1 else f"{short.processes} processes here need together"
        besides = ", checkpoints included" if saves else ""
        doubled = (
            f" XLA's pools double, to {size(locked)} for each device: set {LIMIT}={pool >> 30} in the "
            f"command that starts the program, and they end at {size(pool)}."
        )
        raise ConfigurationError(
            f"{what}. {need} {size(short.needed)}{besides}, and {size(short.free)} are free here: use a host "
            "(or a container's limit) with more memory, more hosts, which share it, or keep less on the "
            f"host.{doubled * (locked > pool)}"
        )
    if pools and pool > host_limit():
        raise ConfigurationError(
            f"{what}, and XLA locks at most {size(host_limit())} for each. It reads its limit when it starts "
            f"the GPUs: set it before, in the command that starts the program:\n\n"
            f"    {LIMIT}={pool >> 30} python ...\n\n"
            "zerojax train, zerojax launch and zerojax.distributed.joined() set it if they come first, to "
            "each GPU's share of 85% of the free memory."
        )


def reserve_host_memory(size: int, devices: Sequence[jax.Device] | None = None) -> None:
    """Have XLA lock host memory in one piece for each GPU of this process, for arrays of any sizes.

    Otherwise a GPU's pool grows in pieces that double. A step's activations in host memory are one array of
    all layers, and need a separate piece behind the state. ``zerojax train`` reserves the memory that a run
    needs; in your own program, call it before a state is made. It takes as long as the driver locks pages:
    about a second for 2 GiB. A piece is 5% larger than ``size``, for gaps, and XLA rounds it up to a power of
    two, or down to the rest of its limit. Memory that is free in a pool is not locked again. Does nothing
    without GPUs.

    Args:
        size: bytes of one GPU's arrays in host memory, of all that exist at a time.
        devices: the devices of this process that will have such arrays, as ``mesh.local_devices``; by default
            all.

    Raises:
        RunError: the memory is not there, or above XLA's limit.

    Examples:
        >>> zerojax.reserve_host_memory(96 << 30)
    """
    devices = jax.local_devices() if devices is None else devices
    if not size or not on_gpus(devices):
        return
    piece = piece_bytes(size)
    mesh = Mesh(np.array(devices), "gpu")
    there = NamedSharding(mesh, PartitionSpec("gpu"), memory_kind=HOST)

    # Compiled, it only allocates: nothing is copied, and no device needs room. By jit's sharding alone each
    # device would make the pieces of all in its own memory, and copy its own.
    def pieces() -> Array:
        return lax.pcast(to_host(lax.empty((piece,), jnp.uint8)), "gpu", to="varying")

    mapped = jax.shard_map(pieces, mesh=mesh, in_specs=(), out_specs=PartitionSpec("gpu"))
    try:
        jax.block_until_ready(jax.jit(mapped, out_shardings=there)())
    except jax.errors.JaxRuntimeError as error:
        raise RunError(
            f"cannot allocate {piece / 1e9:.1f} GB of page-locked host memory for each of "
            f"{len(devices)} GPUs: raise {LIMIT} ({host_limit() >> 30} now), or keep less in host memory"
        ) from error
    _reserved.append(locked_bytes(size))


def free_memory(spec: TrainSpec) -> int:
    """MiB of a device's memory that are free with the state in it; int32's maximum where it is not known."""
    stats = [device.memory_stats() or {} for device in spec.mesh.local_devices]
    known = [one for one in stats if "bytes_limit" in one]
    if not known:
        return np.iinfo(np.int32).max
    free = (
        int(_SHARE * one["bytes_limit"]) - max(state_bytes(spec), one.get("bytes_in_use", 0)) for one in known
    )
    return max(0, min(free)) >> 20
