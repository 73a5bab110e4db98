"""How arrays leave the devices for a checkpoint: beside the next steps where there is room, or at once.

Orbax copies what it saves to host memory before its call returns, because the caller may overwrite it. What
zerojax saves are copies of its own, so that can wait for the background, if the devices can hold them until
then. Copies go to page-locked memory, several times faster than to other memory, in portions: it is slow to
come by, and XLA limits how much a process has.
"""

import math

import jax
import numpy as np
from jax.sharding import NamedSharding
from orbax.checkpoint import v1 as ocp

# Orbax documents these, as part of an option, but does not export them.
from orbax.checkpoint._src.serialization.types import DefaultSerializationStatusCallback, TransferPriority

from zerojax.errors import RunError
from zerojax.run.checkpoints.canonical import abstract_canonical
from zerojax.sharding.mesh import on_gpus
from zerojax.train.state import TrainState

PORTION = 2 << 30
"""Bytes of a process that are on their way to a file at a time; an array of more goes alone."""


class _InBackground(DefaultSerializationStatusCallback):
    """Tells Orbax that no array has to be copied before its call returns."""

    def key_priority(self, _: object) -> TransferPriority:
        return TransferPriority.ASYNCHRONOUS_PRIORITIZED


def fit_beside_training(state: TrainState) -> bool:
    """Whether this process's devices can hold a second copy of a state beside what steps need at their peak.

    Args:
        state: of a run whose steps have run in this process: only then is their peak known.

    Returns:
        True as well where a device does not tell how much memory it has, as CPUs do not.
    """
    needed = sum(size for sizes in _sizes(state).values() for size in sizes)
    return needed <= _room([device.memory_stats() or {} for device in state.program.mesh.local_devices])


def _room(memories: list[dict[str, int]]) -> float:
    """Bytes that were never in use, of the device that has fewest."""
    known = [memory for memory in memories if "bytes_limit" in memory]
    return min((memory["bytes_limit"] - memory["peak_bytes_in_use"] for memory in known), default=math.inf)


def transfer_options(state: TrainState, *, beside_training: bool) -> ocp.Context:
    """What Orbax is told about the way to the host.

    Args:
        state: that is saved.
        beside_training: copy portion by portion, in the background, each when the one before is written.
    """
    pinned = on_gpus(state.program.mesh.devices.flat)
    array_options = ocp.options.ArrayOptions(
        saving=ocp.options.ArrayOptions.Saving(enable_pinned_host_transfer=pinned)
    )
    if not beside_training:
        return ocp.Context(array_options=array_options)
    memory_options = ocp.options.MemoryOptions(
        transfer_concurrent_bytes=PORTION, serialization_status_callback=_InBackground()
    )
    return ocp.Context(array_options=array_options, memory_options=memory_options)


def reserve_host_memory(state: TrainState) -> None:
    """Let XLA lock the memory that saving a state will need, once and before a run begins.

    The driver lets nothing onto the GPUs meanwhile (seconds for some gigabytes), which training should not
    have to wait for. Without GPUs there is nothing to do.

    Args:
        state: filled or abstract.

    Raises:
        RunError: there is not so much, or XLA may not have it.
    """
    mesh = state.program.mesh
    if not on_gpus(mesh.devices.flat):
        return
    devices = mesh.local_devices
    needed = sum(
        min(len(devices) * sum(sizes), max(PORTION, len(devices) * max(sizes)))
        for sizes in _sizes(state).values()
    )
    on_host = jax.sharding.SingleDeviceSharding(devices[0], memory_kind="pinned_host")
    try:
        jax.block_until_ready(jax.device_put(np.zeros(needed, np.uint8), on_host))
    except jax.errors.JaxRuntimeError as error:
        raise RunError(
            f"checkpoints need {needed / 1e9:.1f} GB of page-locked host memory for each process, which are "
            "not to be had: let XLA have more by XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB (64 by default), or start "
            "more processes with fewer GPUs each"
        ) from error


def _sizes(state: TrainState) -> dict[str, list[int]]:
    """The bytes of a device's part of every array that a checkpoint has, by kind."""

    def size(x: jax.ShapeDtypeStruct) -> int:
        assert isinstance(x.sharding, NamedSharding)  # as everything in a state is placed
        return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return {
        kind: [size(x) for x in jax.tree.leaves(tree)] for kind, tree in abstract_canonical(state).items()
    }
