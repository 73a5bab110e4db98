"""Saves checkpoints during training: Orbax writes; a thread adds the manifest, renames and cleans up.

Arrays in host memory are copied there before they are written, if there is room. Otherwise training waits
until they are written (``zerojax.run.checkpoints.portions``).
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import jax
from orbax.checkpoint import v1 as ocp

from zerojax.errors import RunError, error_line
from zerojax.run.checkpoints import step_dirs
from zerojax.run.checkpoints.canonical import to_canonical
from zerojax.run.checkpoints.manifest import Record, write_manifest
from zerojax.run.checkpoints.portions import write_in_portions
from zerojax.run.checkpoints.retention import Retention
from zerojax.run.checkpoints.select import read_manifests
from zerojax.run.checkpoints.transfer import fit_beside_host_state, fit_beside_training, transfer_options
from zerojax.train.state import TrainState, check_there, settled
from zerojax.train.step import skipped_in_row
from zerojax.validation.paths import check_checkpoint_path


class Checkpoints:
    """The checkpoints that a run writes.

    All processes save together, to one file system. The first one writes manifests and cleans up.
    """

    def __init__(
        self,
        folder: Path | str,
        retention: Retention | None = None,
        *,
        start: int | None = None,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], object] = print,
    ) -> None:
        """Remove what a dead process left half written.

        Args:
            folder: the checkpoints' folder; created by the first save.
            retention: which checkpoints to keep; all by default.
            start: the step that the run resumes from, which is saved already; None for a new run.
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
        if jax.process_index() == 0:
            for line in step_dirs.clear_leftovers(folder):
                say(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            with transfer_options(state):
                writing = ocp.save_checkpointables_async(str(draft.absolute()), arrays)
            if self._in_portions:
                writing.result()
                write_in_portions(draft, states)
        except Exception as error:
            raise self._failure(step, error) from error
        self._saving = step, self._worker.submit(self._finish, writing, step, record)
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
        """Wait, and end the thread; errors as for ``save``."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def _finish(self, writing: ocp.AsyncResponse[None], step: int, record: Record) -> None:
        """Wait for the files of all processes, write the manifest, rename, and remove surplus checkpoints."""
        writing.result()
        if jax.process_index() != 0:
            return
        draft = step_dirs.unfinished(self._folder, step)
        write_manifest(draft, step, self._clock(), record)
        draft.rename(self._folder / str(step))
        # Checkpoints of later steps belong to another run, from which this one did not resume.
        there = [manifest for manifest in read_manifests(self._folder) if manifest.step <= step]
        for surplus in (self._folder / str(step) for step in self._retention.surplus(there)):
            if not step_dirs.needed_by(surplus) and (line := step_dirs.remove(surplus)) is not None:
                self._say(line)

    def _failure(self, step: int, error: Exception) -> RunError:
        if jax.process_index() == 0:
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
