"""Transfers a checkpoint's arrays to the host during the next steps, and finds out where copies fit.

By default Orbax copies arrays to host memory before its call returns, because the caller may overwrite them.
zerojax passes Orbax its own copies, on the devices if they have room. The transfer can then run in the
background. It goes to page-locked memory, which is several times faster, in portions: such memory is slow to
allocate, and XLA limits how much a process has.
"""

import math
from collections.abc import Sequence

import jax
from orbax.checkpoint import v1 as ocp

# Orbax documents these, as part of an option, but does not export them.
from orbax.checkpoint._src.serialization.types import DefaultSerializationStatusCallback, TransferPriority

from zerojax.comm.gather import gather_from_all
from zerojax.run.checkpoints.canonical import abstract_canonical
from zerojax.sharding.host_memory import free_host_memory, host_limit, pool_bytes
from zerojax.sharding.mesh import on_gpus
from zerojax.train.memory import device_bytes, host_bytes, reserve_host_memory
from zerojax.train.state import TrainState

PORTION = 2 << 30
"""Bytes per process in transfer at a time; a larger array is transferred alone."""


class _InBackground(DefaultSerializationStatusCallback):
    """Lets Orbax return before any array is copied."""

    def key_priority(self, _: object) -> TransferPriority:
        return TransferPriority.ASYNCHRONOUS_PRIORITIZED


def fit_beside_training(states: Sequence[TrainState]) -> bool:
    """Whether this process's devices can hold copies of states on top of the peak memory of their steps.

    The run must have taken steps in this process, because only then is the peak known.

    Returns:
        True also for devices that do not report their memory, such as CPUs.
    """
    needed = sum(size for sizes in _sizes(states) for size in sizes)
    return needed <= _room([device.memory_stats() or {} for device in states[0].spec.mesh.local_devices])


def fit_beside_host_state(states: Sequence[TrainState]) -> bool:
    """Whether all processes' hosts have room for copies of the arrays that the states have in host memory.

    All processes call it together.
    """
    devices = states[0].spec.mesh.local_devices
    copies = sum(host_bytes(abstract_canonical(state)) for state in states)
    pool = pool_bytes(2 * copies + PORTION) if on_gpus(devices) else 0
    return all(gather_from_all(len(devices) * copies <= free_host_memory() and pool <= host_limit()))


def _room(memories: list[dict[str, int]]) -> float:
    """Bytes that were never used so far, on the device with the fewest."""
    known = [memory for memory in memories if "bytes_limit" in memory]
    return min((memory["bytes_limit"] - memory["peak_bytes_in_use"] for memory in known), default=math.inf)


def transfer_options(state: TrainState) -> ocp.Context:
    """Orbax's options for the transfer to the host: a portion follows when the one before is written."""
    pinned = on_gpus(state.spec.mesh.devices.flat)
    array_options = ocp.options.ArrayOptions(
        saving=ocp.options.ArrayOptions.Saving(enable_pinned_host_transfer=pinned)
    )
    memory_options = ocp.options.MemoryOptions(
        transfer_concurrent_bytes=PORTION, serialization_status_callback=_InBackground()
    )
    return ocp.Context(array_options=array_options, memory_options=memory_options)


def reserve_for_saves(states: Sequence[TrainState]) -> None:
    """Allocate the page-locked memory that saves will need, once, before a run begins.

    While the driver locks memory (seconds for some gigabytes), the GPUs wait.

    Raises:
        RunError: the memory is not available, or exceeds XLA's limit.
    """
    devices = states[0].spec.mesh.local_devices
    portion = PORTION // len(devices)  # PORTION is for all devices together
    reserve_host_memory(sum(min(sum(sizes), max(portion, *sizes)) for sizes in _sizes(states)), devices)


def _sizes(states: Sequence[TrainState]) -> list[list[int]]:
    """The bytes of one device's part of every array of a checkpoint, in a list per kind."""
    trees = (tree for state in states for tree in abstract_canonical(state).values())
    return [[device_bytes(x) for x in jax.tree.leaves(tree)] for tree in trees]
