"""An open run: its folder, its state and its services, which training and post-training share."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Self

import jax

import zerojax
from zerojax.analysis.plan import describe_plan
from zerojax.errors import DivergedError, RunError, Stopped, disk_errors
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.multihost.peers import Peers
from zerojax.multihost.preemption import StopRequest
from zerojax.multihost.watchdog import Watchdog
from zerojax.run.build import Trained, environment, is_first, make_log, make_watchdog
from zerojax.run.checkpoints import (
    Checkpoints,
    Record,
    Retention,
    TrainingClock,
    reserve_host_memory,
    step_dirs,
)
from zerojax.run.config import RunConfig, config_to_dict
from zerojax.run.metrics import MetricsFile, RunLog
from zerojax.run.run_dir import RunFolder
from zerojax.run.run_lock import RunLock
from zerojax.run.weights import Start
from zerojax.sharding import nccl
from zerojax.train.step import Metrics


@dataclass
class OpenRun(ABC):
    """A run with what every loop needs; a context manager.

    Attributes:
        config: the settings.
        folder: of the run.
        checkpoints: of the run.
        clock: time trained, and whether a save is due by time.
        log: metrics, files, progress line.
        samples: the file of completions, on process zero of a run that makes them.
        watchdog: ends a hung run.
        lock: keeps other runs out of the folder.
        state: the model and its optimizer.
        step: optimizer steps done.
        base: where the frozen weights, or a reference, are from (``Record.base``).
    """

    config: RunConfig
    folder: RunFolder
    checkpoints: Checkpoints
    clock: TrainingClock
    log: RunLog
    samples: MetricsFile | None
    watchdog: Watchdog
    lock: RunLock
    state: zerojax.TrainState
    step: int
    base: str

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
            if self.log.hangs:  # as would any other use of the disk
                return
            if error is not None and is_first():
                self.note_end(error)
            if self.samples is not None:
                self.samples.close()
            self.checkpoints.close()
        finally:
            self.watchdog.stop()
            if not self.log.hangs:
                self.lock.close()

    def train(self) -> None:
        """Train from the current step to the last.

        Raises:
            DivergedError: the loss or gradient was not finite too many times in a row; says how to go back.
            RunError: the disk is full, or the loop cannot go on.
            Stopped: a process of the run was asked to stop by a signal; the run has saved.
        """
        with (
            StopRequest() as signalled,
            disk_errors_explained(self.folder),
            divergence_explained(self.folder, self.checkpoints),
        ):
            self.loop(signalled)
            self.log.drain()
            self.watchdog.phase("the end of the run")
            self.checkpoints.wait()
            self.finish()

    @abstractmethod
    def loop(self, signalled: StopRequest) -> None:
        """Take the steps that are left, log them, and save.

        Args:
            signalled: whether a signal has asked this process to stop.
        """

    @abstractmethod
    def finish(self) -> None:
        """Print and record the result, after the last step and checkpoint."""

    @abstractmethod
    def close_inputs(self) -> None:
        """Close what the loop reads from."""

    def take_step(self, batch: Any) -> Metrics:
        """Dispatch a step on a batch; returns its metrics."""
        self.state, metrics = zerojax.train_step(self.state, batch)
        return metrics

    def is_due(self, every: int) -> bool:
        """Whether an action that runs every ``every`` steps (0: never) and at the last is due now."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def save_checkpoint(
        self, position: dict[str, Any], metrics: Sequence[str], *, despite_skips: bool
    ) -> bool:
        """Begin to save a checkpoint; False if it must wait because the last step was skipped.

        Args:
            position: in the data, from which a resumed run continues.
            metrics: the names of those to record.
            despite_skips: save it all the same.
        """
        record, beside = self.record(position, metrics), self.beside()
        if not self.checkpoints.save(
            self.step, self.state, record, beside=beside, despite_skips=despite_skips
        ):
            return False
        self.clock.saved()
        self.log.restart_clock()
        return True

    def beside(self) -> dict[str, zerojax.TrainState]:
        """Further states that are saved with the run's, by name; ``record`` has their ``Beside``."""
        return {}

    def record(self, position: dict[str, Any], metrics: Sequence[str]) -> Record:
        """What is saved with the arrays; arguments as for ``save_checkpoint``."""
        mesh = self.state.spec.mesh
        return Record(
            config=config_to_dict(self.config),
            position=position,
            skipped=self.log.skipped,
            seconds=self.clock.seconds,
            mesh=(mesh.shape["node"], mesh.shape["local"]),
            base=self.base,
            metrics={name: x for name, x in self.log.last.items() if name in metrics},
        )

    def note_first(self, values: Mapping[str, float], words: str) -> None:
        """Say what the first weights reach, and record it in run.json."""
        self.log.say(f"before the first step: {words}")
        if is_first():
            self.folder.update_summary(**{f"first_{name}": value for name, value in values.items()})
        self.log.restart_clock()

    def note_end(self, error: BaseException) -> None:
        """Record in run.json why the run did not finish, unless the disk is full."""
        status = "stopped" if isinstance(error, Stopped) else "failed"
        reason = f"{type(error).__name__}: {error}"
        with suppress(OSError):  # a full disk, which is then the reported error
            self.folder.update_summary(status=status, step=self.step, reason=reason)

    def stop(self) -> NoReturn:
        """End before the last step, on request.

        Raises:
            Stopped: always; with the message for the user.
        """
        self.checkpoints.wait()
        raise Stopped(
            f"stopped on request at step {self.step} of {self.config.train.steps}, and saved; "
            "the same command resumes from there"
        )

    def announce(self, what: str, notes: Sequence[str]) -> None:
        """Print what is trained on which mesh and how the run begins, and record it in run.json."""
        config, mesh = self.config, self.state.spec.mesh
        self.log.say(
            f"{self.folder.path}: {what}, {config.zero.preset} on {mesh.shape['node']} x "
            f"{mesh.shape['local']} {jax.devices()[0].device_kind} devices"
        )
        self.log.say(describe_plan(self.state))
        notes = [*notes, *map(str, nccl.applied())]
        for note in notes:
            self.log.say(note)
        if is_first():
            self.folder.begin_session(self.step, devices=mesh.size, notes=notes)
            self.folder.update_summary(steps=config.train.steps, **environment())


class Opening(NamedTuple):
    """A run that is being opened.

    Attributes:
        config: its settings.
        folder: its folder.
        lock: of the folder, taken.
        notes: lines for the user.
        on_error: closes what is registered here if the run cannot be opened.
    """

    config: RunConfig
    folder: RunFolder
    lock: RunLock
    notes: list[str]
    on_error: ExitStack

    def fields(
        self,
        start: Start,
        batch: Any,
        peers: Peers | None,
        beside: Sequence[Trained] = (),
        *,
        samples: bool = False,
    ) -> dict[str, Any]:
        """The fields of an ``OpenRun``: its services; writes the settings to the run's folder.

        Args:
            start: what the run starts with.
            batch: shapes and dtypes of a global batch.
            peers: the other processes of the run, if there are any.
            beside: further states that each step trains.
            samples: whether the run makes completions, which it writes to a file.
        """
        config, folder, record, saving = self.config, self.folder, start.record, self.config.checkpoint
        if is_first():
            folder.write_config(config)
        trained = [Trained(config.model, start.state, batch), *beside]
        reserve_host_memory([one.state for one in trained])
        log = make_log(config, folder, trained, start.step, record.skipped)
        checkpoints = Checkpoints(
            folder.checkpoints,
            Retention(saving.keep, saving.keep_every, saving.keep_best, saving.keep_minutes),
            start=None if start.manifest is None else start.step,
            say=log.say,
        )
        return {
            "config": config,
            "folder": folder,
            "checkpoints": checkpoints,
            "clock": TrainingClock(record.seconds, minutes=saving.minutes),
            "log": log,
            "samples": MetricsFile(folder.samples, start=start.step) if samples and is_first() else None,
            "watchdog": make_watchdog(config, folder, peers),
            "lock": self.lock,
            "state": start.state,
            "step": start.step,
            "base": start.base,
        }


@contextmanager
def opening(config: RunConfig, folder: RunFolder) -> Generator[Opening]:
    """Create and lock a run's folder, for a block that opens the run; unlock it if that fails.

    Raises:
        ConfigurationError: another process trains in the folder, or it cannot be written to.
        RunError: the disk is full.
    """
    lock = RunLock(folder)
    with ExitStack() as on_error, disk_errors_explained(folder):
        on_error.callback(lock.close)
        unlocked = run_on_process_zero(lock.take)
        yield Opening(config, folder, lock, [] if unlocked is None else [unlocked], on_error)
        on_error.pop_all()


def disk_errors_explained(folder: RunFolder) -> AbstractContextManager[None]:
    """Report in one line, as a ``RunError``, that the disk of a run is full or no longer there."""
    return disk_errors(folder.path, "; checkpoints are intact")


@contextmanager
def divergence_explained(folder: RunFolder, saved: Checkpoints) -> Generator[None]:
    """Add to the error of a diverged run which checkpoint to go back to, and how.

    Raises:
        DivergedError: with that message.
    """
    try:
        yield
    except DivergedError as error:
        with suppress(RunError):
            saved.wait()
        raise DivergedError(
            f"{error}. {_way_back(folder, error.good)}. Lower optimizer.learning_rate or "
            "optimizer.clip_norm, set train.spike_deviations, look at the data, or raise train.max_skips: "
            "the same command without a change would fail here again",
            error.good,
        ) from None


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
