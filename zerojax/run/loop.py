"""The loop of every run: steps, evaluations and saves, on which all processes agree."""

import functools
import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NoReturn, Self

import jax

from zerojax.errors import DivergedError, RunError, Stopped, disk_errors
from zerojax.log import logger
from zerojax.multihost.agreement import Agreement, Requests
from zerojax.multihost.preemption import StopRequest
from zerojax.multihost.watchdog import Watchdog
from zerojax.run.checkpoints import Checkpoints, Record, Snapshots, TrainingClock, step_dirs
from zerojax.run.config.tables import zero_to_table
from zerojax.run.metrics.log import RunLog
from zerojax.run.run_dir import RunFolder, RunLock
from zerojax.train.state import TrainState
from zerojax.train.step import Metrics, last_metrics, reports_later, train_step

_AGREE_EVERY = 8
"""Steps between two agreements of nodes with local updates, whose steps do not wait for each other."""
# The metrics that a checkpoint records.
_RECORDED = ("loss", "validation_loss", "reward")


class TrainLoop(ABC):
    """A training loop with its state and its services; a context manager, which starts and ends the services.

    Attributes:
        folder: the run's folder, if the loop writes files.
        checkpoints: the run's checkpoints, if it saves any.
        snapshots: copies of the state for a restart, if the launcher keeps them.
        clock: the time trained so far, and whether a save is due by time.
        log: metrics, files, progress line.
        watchdog: ends a hung run.
        lock: keeps other runs out of the folder.
        state: the model and its optimizer.
        step: optimizer steps done.
        should_stop: set it to end the training after the current step.
    """

    # Optimizer steps of the whole run; steps between evaluations and between saves. For these 0 means at the
    # end only, and None never.
    _steps: int
    _evaluate_every: int | None
    _save_every: int | None

    folder: RunFolder | None
    checkpoints: Checkpoints | None
    snapshots: Snapshots | None = None
    clock: TrainingClock
    log: RunLog
    watchdog: Watchdog
    lock: RunLock | None
    state: TrainState
    step: int
    should_stop: bool = False

    # Advice about a run that has diverged, at the end of the message.
    advice = "Lower the learning rate, clip gradients, or look at the data"

    @abstractmethod
    def loop(self, signalled: StopRequest) -> None:
        """Take the remaining steps, log them, and save; ``signalled`` says whether to stop early."""

    @abstractmethod
    def evaluation(self) -> Metrics:
        """Dispatch an evaluation of the current weights; returns its metrics, such as "validation_loss"."""

    @abstractmethod
    def position(self) -> dict[str, Any]:
        """The position in the data, from which a resumed run continues; plain values."""

    @abstractmethod
    def finish(self) -> None:
        """Report the result, after the last step and checkpoint."""

    @abstractmethod
    def close_inputs(self) -> None:
        """Close the loop's source of data."""

    @abstractmethod
    def note_end(self, error: BaseException) -> None:
        """Record on process zero why the run did not finish."""

    def __enter__(self) -> Self:
        self.log.__enter__()
        self.watchdog.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Finish pending writes, and record the error if the run ended with one."""
        self.watchdog.phase("the end of the run")
        try:
            self.close_inputs()
            self.log.__exit__(kind, error, trace)
            if self.log.hangs:  # any other use of the disk would hang, too
                return
            if error is not None and jax.process_index() == 0:
                self.note_end(error)
            try:
                self.close_files()
            except RunError as failure:
                if error is None:
                    raise
                logger.warning(str(failure))
        finally:
            self.watchdog.stop()
            if self.lock is not None and not self.log.hangs:
                self.lock.close()

    def close_files(self) -> None:
        """Finish the writing of files."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        if self.snapshots is not None:
            self.snapshots.close()

    def train(self) -> None:
        """Train from the current step to the last.

        Raises:
            DivergedError: the loss or gradient was not finite too many times in a row; the message says how
                to go back.
            RunError: the disk is full, or the loop cannot go on.
            Stopped: a signal asked a process of the run to stop; the run has saved.
        """
        with StopRequest(self._note_stop) as signalled, self._errors_explained():
            self.loop(signalled)
            self.log.drain()
            self.watchdog.phase("the end of the run")
            if self.checkpoints is not None:
                self.checkpoints.share()
            self.finish()

    def _note_stop(self, reason: str) -> None:
        """Record that a second signal ends the run without a save."""
        if jax.process_index() == 0:
            self.note_end(Stopped(reason))

    def take_steps(self, batches: Iterator[Any], signalled: StopRequest) -> None:
        """Take a step on each batch, evaluate and save, until the last step or a request to stop."""
        every = _AGREE_EVERY if reports_later(self.state) else 1
        agreement, requests = Agreement(self.state.spec.mesh, every), Requests()
        while self.step < self._steps:
            self.watchdog.step(self.step + 1)
            wants_save = self.clock.wants_save and jax.process_index() == 0
            own = Requests(wants_save, signalled.received, self.should_stop, *self._snapshot_requests())
            agreement.put(own)
            self.log_step(self.take_step(next(batches)))
            agreed = agreement.get()
            requests |= agreed | Requests(save=self.is_due(self._save_every))
            if agreed.snapshot and not (agreed.busy or requests.saves) and self.step < self._steps:
                self.take_snapshot()
                agreement.forget()
            if requests.saves and self.save():
                agreement.forget()
                if requests.stop and self.step < self._steps:
                    self.stop()
                if requests.end:
                    break
                requests = Requests()

    def _snapshot_requests(self) -> tuple[bool, bool]:
        """Whether to take a snapshot, and whether this process is busy with one, or with a checkpoint."""
        if self.snapshots is None:
            return False, False
        saving = self.checkpoints is not None and self.checkpoints.is_saving
        return self.snapshots.is_due, self.snapshots.is_busy or saving

    def take_snapshot(self) -> None:
        """Start a snapshot of the state, unless the last step was skipped."""
        assert self.snapshots is not None
        self.log.drain()
        if not self.log.last.get("skipped_in_row"):
            self.watchdog.phase(f"the snapshot after step {self.step}")
            self.snapshots.take(self.step, self.state, self.record())

    def log_step(self, metrics: Metrics) -> None:
        """Count a dispatched step, evaluate if an evaluation is due, and log both."""
        self.step += 1
        due = self.is_due(self._evaluate_every)
        own = functools.partial(last_metrics, self.state) if reports_later(self.state) else None
        self.log.step(self.step, metrics, self.evaluation if due else None, own)
        if self.checkpoints is not None:
            self.checkpoints.check()

    def take_step(self, batch: Any) -> Metrics:
        """Dispatch a step on this process's part of a batch; returns its metrics."""
        self.state, metrics = train_step(self.state, batch)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current weights; returns the values by name."""
        return {name: float(value) for name, value in self.evaluation().items()}

    def is_due(self, every: int | None) -> bool:
        """Whether an action is due now that runs every ``every`` steps (0: never) and at the last step."""
        if every is None:
            return False
        return self.step == self._steps or (every > 0 and self.step % every == 0)

    def save(self) -> bool:
        """Start to save a checkpoint; False if the save must wait because the last step was skipped."""
        self.log.drain()
        if self.checkpoints is None:
            return True
        self.watchdog.phase(f"the checkpoint at step {self.step}")
        if self.snapshots is not None:
            self.snapshots.wait()  # both need room for copies on the devices
        at_end = self.step == self._steps
        saved = self.checkpoints.save(
            self.step,
            self.state,
            self.record(),
            beside=self.beside(),
            despite_skips=at_end and self.are_weights_good(),
        )
        if saved:
            self.clock.saved()
            self.log.restart_clock()
        return saved

    def are_weights_good(self) -> bool:
        """Whether to save the weights at the end although the last step was skipped.

        No later step will show whether they are good, but the evaluation does.
        """
        return math.isfinite(self.log.last.get("validation_loss", math.nan))

    def beside(self) -> dict[str, TrainState]:
        """Further states to save with the run's, by name; ``record`` has their ``Beside``."""
        return {}

    def record(self) -> Record:
        """The record to save with the arrays.

        Its settings are [zero] alone, since a custom loop has no others.
        """
        mesh = self.state.spec.mesh
        return Record(
            config={"zero": zero_to_table(self.state.spec.zero)},
            position=self.position(),
            skipped=self.log.skipped,
            seconds=self.clock.seconds,
            mesh=(mesh.shape["node"], mesh.shape["local"]),
            metrics={name: x for name, x in self.log.last.items() if name in _RECORDED},
        )

    def stop(self) -> NoReturn:
        """End before the last step, on request.

        Raises:
            Stopped: always; with the message for the user.
        """
        after = "no folder was given, so nothing is saved"
        if self.checkpoints is not None:
            self.checkpoints.wait()
            after = "saved; the same command resumes from there"
        raise Stopped(f"stopped on request at step {self.step} of {self._steps}, and {after}")

    @contextmanager
    def _errors_explained(self) -> Generator[None]:
        """Report a full disk in one line, and add to a diverged run's error how to go back.

        Raises:
            DivergedError: with that message.
            RunError: the disk is full.
        """
        folder, saved = self.folder, self.checkpoints
        if folder is None or saved is None:
            yield
            return
        with disk_errors_explained(folder):
            try:
                yield
            except DivergedError as error:
                with suppress(RunError):
                    saved.wait()
                raise DivergedError(
                    f"{error}. {_way_back(folder, error.good)}. {self.advice}: the same command without a "
                    "change would fail here again",
                    error.good,
                ) from None


def disk_errors_explained(folder: RunFolder) -> AbstractContextManager[None]:
    """Report in one line, as a ``RunError``, that the disk of a run is full or gone."""
    return disk_errors(folder.path, "; checkpoints are intact")


def _way_back(folder: RunFolder, good: int) -> str:
    if good < 0:
        return "No step made an update"
    broken = f"The update of step {good + 1} may have broken the weights"
    steps = step_dirs.steps(folder.checkpoints)
    if not (before := [step for step in steps if step <= good]):
        return f"{broken}, and there is no earlier checkpoint: start again in another folder"
    if before == steps:
        return f"{broken}; the newest checkpoint, of step {steps[-1]}, is earlier"
    command = f"zerojax checkpoints {shlex.quote(str(folder.path))} --rewind {before[-1]}"
    return f"{broken}: `{command}` goes back to the newest earlier checkpoint"
