"""Saves checkpoints during training: Orbax writes; a thread adds the manifest, renames and cleans up.

By default Orbax copies arrays to host memory before its call returns, because the caller may overwrite them.
Therefore zerojax passes Orbax its own copies, on the devices if they have room. The transfer can then run in
the background. Arrays in host memory are copied there, if there is room. Otherwise training waits until they
are written (``zerojax.run.checkpoints.portions``).

The transfer goes to page-locked memory, which is several times faster. It goes in portions, because such
memory is slow to allocate, and XLA limits how much a process has.
"""

import functools
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import jax
from orbax.checkpoint import v1 as ocp

# Orbax documents these, as part of an option, but does not export them.
from orbax.checkpoint._src.serialization.types import DefaultSerializationStatusCallback, TransferPriority

from zerojax.comm.gather import gather_from_all
from zerojax.errors import RunError, error_line
from zerojax.multihost.files import on_own_disks
from zerojax.run.checkpoints import step_dirs
from zerojax.run.checkpoints.canonical import abstract_canonical, to_canonical
from zerojax.run.checkpoints.manifest import Record, Retention, read_manifests, write_manifest
from zerojax.run.checkpoints.parts import bring_to_all_hosts, remove_merged
from zerojax.run.checkpoints.portions import write_in_portions
from zerojax.run.checkpoints.run_copy import Copier, RunCopy
from zerojax.sharding.host_memory import free_host_memory, host_limit, pool_bytes
from zerojax.sharding.mesh import on_gpus
from zerojax.train.memory import device_bytes, host_bytes, reserve_host_memory
from zerojax.train.state import TrainState, check_there, settled
from zerojax.train.step import skipped_in_row
from zerojax.validation.paths import check_checkpoint_path


class TrainingClock:
    """Measures how long a run has trained.

    Its clock is monotonic, so setting the machine's time has no effect.
    """

    def __init__(
        self, seconds: float = 0.0, *, minutes: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start counting.

        Args:
            seconds: training time before this start of the run.
            minutes: minutes between saves; 0 for no saves by time.
            clock: a monotonic clock, in seconds.
        """
        self._clock = clock
        self._started = clock() - seconds
        self._minutes = minutes
        self._saved = clock()

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self._clock() - self._started

    @property
    def wants_save(self) -> bool:
        """Whether a save is due since the last one, or since the start."""
        return self._minutes > 0 and self._clock() - self._saved >= self._minutes * 60

    def saved(self) -> None:
        """Restart the interval: a checkpoint was saved now."""
        self._saved = self._clock()


class Checkpoints:
    """The checkpoints that a run writes.

    All processes save together. The first one writes manifests and cleans up. If the hosts share no file
    system, each process does so on its own disk, where it saves what its devices hold
    (``zerojax.run.checkpoints.parts``).
    """

    def __init__(
        self,
        folder: Path | str,
        retention: Retention | None = None,
        *,
        start: int | None = None,
        copy: RunCopy | None = None,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], object] = print,
    ) -> None:
        """Remove folders that a dead process left half written.

        Args:
            folder: the checkpoints' folder; created by the first save.
            retention: which checkpoints to keep; all by default.
            start: the step that the run resumes from, which is saved already; None for a new run.
            copy: the run's copy in an object store, which is kept up to date.
            clock: returns Unix time, for the manifest.
            say: prints a line, perhaps from another thread, if a checkpoint could not be deleted or if
                training has to wait for saves. Saving continues.

        Raises:
            ConfigurationError: the folder's path cannot hold checkpoints.
        """
        folder = Path(folder)
        check_checkpoint_path(folder)
        self._folder = folder
        self._retention = retention or Retention()
        self._clock = clock
        self._say = say
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: tuple[int, Future[None]] | None = None
        self._last = start
        self._beside_training: bool | None = None
        self._in_portions = False
        self._own_disks = on_own_disks(folder)
        if self._cleans_up:
            for line in step_dirs.clear_leftovers(folder):
                say(line)
        self._copier = Copier(copy, self._retention, say) if copy is not None and self._cleans_up else None
        if self._copier is not None and start is not None:
            self._copier.start(start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _cleans_up(self) -> bool:
        return self._own_disks or jax.process_index() == 0

    def save(
        self,
        step: int,
        state: TrainState,
        record: Record,
        *,
        beside: Mapping[str, TrainState] | None = None,
        despite_skips: bool = False,
    ) -> bool:
        """Start a save; returns when the arrays are copied, on the devices or to the hosts.

        The copies stay on the devices until they are written if, at the first save, the devices had room for
        them on top of training. If the hosts had no room for copies of the arrays in their memory
        (``ZeroConfig.host``), these are written before this returns. A step that is saved already is not
        saved again.

        While steps are skipped, nothing is saved. The last update may have broken the weights, and a save
        could push out the good checkpoints before it. Try again after the next step.

        Args:
            step: names the checkpoint.
            state: may be donated as soon as this returns, and so may the states in ``beside``.
            record: saved with it.
            beside: further states on the same mesh by name, such as a critic, saved in the same checkpoint.
                ``restore`` takes the name. All saves must have the same names.
            despite_skips: save even while steps are skipped, because an evaluation has shown that the weights
                are good.

        Returns:
            Whether the step is saved, now or before; False if steps are being skipped.

        Raises:
            RunError: this or the previous save failed, perhaps on a full disk; older ones are intact.
            ConfigurationError: a state was donated, or a value that was set in it by hand does not fit.
        """
        states = {"": state} | {f"{name}_": x for name, x in (beside or {}).items()}
        for one in states.values():
            check_there(one)
        if step == self._last:
            return True
        if not despite_skips and any(skipped_in_row(one) for one in states.values()):
            return False
        states = {name: settled(one) for name, one in states.items()}
        self.wait()
        draft = step_dirs.unfinished(self._folder, step)
        self._choose([*states.values()])
        how = {"on_host": not self._beside_training, "placeholders": self._in_portions}
        arrays = {
            f"{prefix}{kind}": tree
            for prefix, one in states.items()
            for kind, tree in to_canonical(one, **how).items()
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with transfer_options(state, own_disks=self._own_disks):
                writing = ocp.save_checkpointables_async(str(draft.absolute()), arrays)
            if self._in_portions:
                writing.result()
                write_in_portions(draft, states, own_disks=self._own_disks)
        except Exception as error:
            raise self._failure(step, error) from error
        # The same time in all parts of a checkpoint tells them from parts of another save.
        saved_at = gather_from_all(self._clock())[0] if self._own_disks else self._clock()
        part, parts = (jax.process_index(), jax.process_count()) if self._own_disks else (0, 1)
        if all(is_whole_here(one) for one in states.values()):
            part, parts = 0, 1
        finish = functools.partial(self._finish, writing, step, saved_at, record, part=part, parts=parts)
        self._saving = step, self._worker.submit(finish)
        self._last = step
        return True

    def _choose(self, states: Sequence[TrainState]) -> None:
        """Decide where copies are made, at the first save: later memory peaks include these copies."""
        if self._beside_training is not None:
            return
        self._beside_training = fit_beside_training(states)
        if any(state.spec.streams for state in states) and not fit_beside_host_state(states):
            self._in_portions = True
            self._say(
                "this host has no room for a copy of the state in its memory, so training waits while "
                "checkpoints are written"
            )

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._saving is not None and not self._saving[1].done()

    def check(self) -> None:
        """Raise if the save under way has failed, without waiting; errors as for ``save``."""
        if self._saving is not None and self._saving[1].done():
            self.wait()

    def wait(self) -> None:
        """Wait until the save under way is complete; errors as for ``save``."""
        if self._saving is None:
            return
        (step, done), self._saving = self._saving, None
        try:
            done.result()
        except Exception as error:
            raise self._failure(step, error) from error

    def close(self) -> None:
        """Wait, also for the copy in an object store, and end the threads; errors as for ``save``."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            if self._copier is not None:
                self._copier.close()

    def share(self) -> None:
        """Bring all parts of the last checkpoint to all hosts, if they share no file system.

        All processes call it together, at the end of a run. Errors as for ``save``.
        """
        self.wait()
        if self._own_disks and self._last is not None:
            bring_to_all_hosts(self._folder, self._last)

    def _finish(
        self,
        writing: ocp.AsyncResponse[None],
        step: int,
        saved_at: float,
        record: Record,
        *,
        part: int,
        parts: int,
    ) -> None:
        """Wait for the files of all processes, write the manifest, rename, and remove surplus checkpoints."""
        writing.result()
        if not self._cleans_up:
            return
        draft = step_dirs.unfinished(self._folder, step)
        if parts > 1:
            remove_merged(draft)
        write_manifest(draft, step, saved_at, record, part=part, parts=parts)
        draft.rename(self._folder / str(step))
        # Checkpoints of later steps belong to another run, from which this one did not resume.
        there = [manifest for manifest in read_manifests(self._folder) if manifest.step <= step]
        copied = None if self._copier is None else self._copier.copy.uploading
        for surplus in (self._folder / str(one) for one in self._retention.surplus(there) if one != copied):
            if not step_dirs.needed_by(surplus) and (line := step_dirs.remove(surplus)) is not None:
                self._say(line)
        if self._copier is not None:
            self._copier.start(step)

    def _failure(self, step: int, error: Exception) -> RunError:
        if self._cleans_up:
            step_dirs.clear_failed(self._folder, step)
        return RunError(
            f"cannot save checkpoint {self._folder / str(step)}: {_reason(error)}; older ones are intact"
        )


def _reason(error: Exception) -> str:
    """The operating system's message if there is one; TensorStore wraps it in pages of context."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if found := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(found[1]))
    return error_line(error)


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


def is_whole_here(state: TrainState) -> bool:
    """Whether this process's devices together hold every element of the arrays of a checkpoint."""

    def is_here(x: jax.ShapeDtypeStruct) -> bool:
        assert x.sharding is not None
        here = x.sharding.addressable_devices_indices_map(x.shape).values()
        return {*here} == {*x.sharding.devices_indices_map(x.shape).values()}

    return all(map(is_here, jax.tree.leaves(abstract_canonical(state))))


def transfer_options(state: TrainState, *, own_disks: bool = False) -> ocp.Context:
    """Orbax's options for the transfer to the host: a portion follows when the one before is written.

    With ``own_disks`` every process writes all that its devices hold, and its own metadata.
    """
    pinned = on_gpus(state.spec.mesh.devices.flat)
    array_options = ocp.options.ArrayOptions(
        saving=ocp.options.ArrayOptions.Saving(
            enable_pinned_host_transfer=pinned, use_replica_parallel=not own_disks
        )
    )
    memory_options = ocp.options.MemoryOptions(
        transfer_concurrent_bytes=PORTION, serialization_status_callback=_InBackground()
    )
    processes = ocp.options.MultiprocessingOptions(primary_host=None if own_disks else 0)
    # Orbax tells all processes that the directories exist as soon as one has created its own.
    directories = ocp.options.AsyncOptions(create_directories_asynchronously=not own_disks)
    return ocp.Context(
        array_options=array_options,
        memory_options=memory_options,
        multiprocessing_options=processes,
        async_options=directories,
    )


def reserve_for_saves(states: Sequence[TrainState]) -> None:
    """Allocate the page-locked memory that saves will need, once, before a run begins.

    While the driver locks memory (seconds for some gigabytes), the GPUs wait.

    Raises:
        RunError: the memory is not available, or exceeds XLA's limit.
    """
    if not states:
        return
    devices = states[0].spec.mesh.local_devices
    portion = PORTION // len(devices)  # PORTION is for all devices together
    reserve_host_memory(sum(min(sum(sizes), max(portion, *sizes)) for sizes in _sizes(states)), devices)


def _sizes(states: Sequence[TrainState]) -> list[list[int]]:
    """The bytes of one device's part of every array of a checkpoint, in a list per kind."""
    trees = (tree for state in states for tree in abstract_canonical(state).values())
    return [[device_bytes(x) for x in jax.tree.leaves(tree)] for tree in trees]
