"""A training run: ``Trainer.open`` prepares it, ``Trainer.train`` is the loop."""

import errno
import functools
import math
import shlex
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp

import zerojax
from zerojax.analysis.plan import describe_plan
from zerojax.analysis.profile import StepProfile
from zerojax.errors import DivergedError, RunError, Stopped
from zerojax.models import parameter_count
from zerojax.multihost.agreement import Agreement, Requests, run_on_process_zero
from zerojax.multihost.peers import Peers
from zerojax.multihost.preemption import StopRequest
from zerojax.multihost.watchdog import Watchdog
from zerojax.run.build import (
    RunSetup,
    abstract_batch,
    choose_checkpoint,
    environment,
    is_first,
    make_batches,
    make_log,
    make_watchdog,
    mean_loss,
    prepare_data,
)
from zerojax.run.checkpoints import (
    Checkpoints,
    Record,
    Retention,
    TrainingClock,
    reserve_host_memory,
    step_dirs,
)
from zerojax.run.config import RunConfig, config_to_dict
from zerojax.run.data import Batch, Dataset, TrainBatches
from zerojax.run.exact_match import ExactMatch, describe_matches
from zerojax.run.metrics import RunLog, draw_loss_curve, read_metrics
from zerojax.run.run_dir import Resume, RunFolder
from zerojax.run.run_lock import RunLock
from zerojax.run.weights import CHECKPOINTS, WeightReader, new_state, resumed_state
from zerojax.sharding import nccl
from zerojax.train.fp8_report import fp8_metrics

_DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
)


@dataclass
class Trainer:
    """A run, with everything that its loop needs; a context manager.

    Attributes:
        config: the settings.
        folder: of the run.
        data: training and validation tokens.
        batches: the training batches, at the run's position.
        validation: the batches of every evaluation.
        exact_match: the prompts of every evaluation, or None.
        checkpoints: of the run.
        clock: time trained, and whether a save is due by time.
        log: metrics, files, progress line.
        watchdog: ends a hung run.
        profile: traces the requested steps.
        lock: keeps other runs out of the folder.
        state: the model and its optimizer.
        step: optimizer steps done.
        base: where the frozen weights are from (``Record.base``).
    """

    config: RunConfig
    folder: RunFolder
    data: Dataset
    batches: TrainBatches
    validation: list[Batch]
    exact_match: ExactMatch | None
    checkpoints: Checkpoints
    clock: TrainingClock
    log: RunLog
    watchdog: Watchdog
    profile: StepProfile
    lock: RunLock
    state: zerojax.TrainState
    step: int
    base: str

    @classmethod
    def open(
        cls,
        config: RunConfig,
        folder: RunFolder,
        resume: Resume = "auto",
        init_from: Path | None = None,
        peers: Peers | None = None,
        profile: range | None = None,
        reader: WeightReader = CHECKPOINTS,
    ) -> Self:
        """Prepare the data, and create the model or restore the newest valid checkpoint.

        Args:
            config: the settings.
            folder: of the run, new or existing.
            resume: whether to resume from a checkpoint in the folder.
            init_from: what gives a new run its first weights, such as a run or a checkpoint; a resumed run
                ignores it.
            peers: the other processes of the run, if there are any.
            profile: steps to trace.
            reader: reads ``init_from``, and the frozen weights of a resumed run.

        Raises:
            ConfigurationError: invalid settings or data, ``resume`` or ``init_from`` cannot be satisfied, or
                another process trains in the folder.
            RunError: the disk is full.
        """
        setup = RunSetup.of(config)
        setup.check()
        lock = RunLock(folder)
        with ExitStack() as on_error, disk_errors_explained(folder):
            on_error.callback(lock.close)
            unlocked = run_on_process_zero(lock.take)
            data = prepare_data(config, folder)
            batches, validation = make_batches(config, data)
            exact_match = ExactMatch.of(config, data, folder.data)
            manifest, notes = choose_checkpoint(config, folder, resume)
            notes += data.notes(config.train.sequence_length)
            notes += map(str, nccl.applied())
            if unlocked is not None:
                notes.append(unlocked)
            if manifest is not None and manifest.record.position:
                state, note = resumed_state(setup, folder, manifest, reader)
                base = manifest.record.base
                batches.set_state(manifest.record.position)
                notes.append(note)
            else:  # a checkpoint without a position holds imported weights: no step was taken
                state, base, lines = new_state(setup, folder, manifest, init_from, reader)
                notes += lines
            record = Record() if manifest is None else manifest.record
            step = 0 if manifest is None else manifest.step
            if is_first():
                folder.write_config(config)
            reserve_host_memory(state)
            saving = config.checkpoint
            log = make_log(config, folder, state, step, record.skipped, abstract_batch(config))
            trainer = cls(
                config=config,
                folder=folder,
                data=data,
                batches=batches,
                validation=validation,
                exact_match=exact_match,
                checkpoints=Checkpoints(
                    folder.checkpoints,
                    Retention(saving.keep, saving.keep_every, saving.keep_best, saving.keep_minutes),
                    start=None if manifest is None else step,
                    say=log.say,
                ),
                clock=TrainingClock(record.seconds, minutes=saving.minutes),
                log=log,
                watchdog=make_watchdog(config, folder, peers),
                profile=StepProfile(folder.profile, profile, log.say, done=step, planned=config.train.steps),
                lock=lock,
                state=state,
                step=step,
                base=base,
            )
            trainer.announce(notes)
            on_error.pop_all()
            return trainer

    def __enter__(self) -> Self:
        self.log.__enter__()
        self.watchdog.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Finish pending writes, and record the error if the run ended with one."""
        self.watchdog.phase("the end of the run")
        try:
            self.profile.close()
            self.log.__exit__(kind, error, trace)
            self.batches.close()
            if self.log.hangs:  # as would any other use of the disk
                return
            if error is not None and is_first():
                self.note_end(error)
            self.checkpoints.close()
        finally:
            self.watchdog.stop()
            if not self.log.hangs:
                self.lock.close()

    def train(self) -> None:
        """Train from the current step to the last.

        Raises:
            DivergedError: the loss or gradient was not finite too many times in a row; says how to go back.
            RunError: the disk is full.
            Stopped: a process of the run was asked to stop by a signal; the run has saved.
        """
        agreement, requests = Agreement(self.state.spec.mesh), Requests()
        with (
            StopRequest() as signalled,
            disk_errors_explained(self.folder),
            divergence_explained(self.folder, self.checkpoints),
        ):
            while self.step < self.config.train.steps:
                self.watchdog.step(self.step + 1)
                agreement.put(Requests(save=self.clock.wants_save and is_first(), stop=signalled.received))
                batch = next(self.batches)
                self.state, metrics = self.profile.step(
                    self.step + 1, functools.partial(zerojax.train_step, self.state, batch)
                )
                self.step += 1
                self.log.step(self.step, metrics, self.evaluation_if_due())
                self.checkpoints.check()
                requests |= agreement.get() | Requests(save=self.is_due(self.config.checkpoint.every))
                if (requests.save or requests.stop) and self.save():
                    agreement.forget()
                    if requests.stop and self.step < self.config.train.steps:
                        self.stop()
                    requests = Requests()
            self.finish()

    def evaluation_if_due(self) -> Callable[[], dict[str, jax.Array]] | None:
        """``evaluation`` at steps where it is due and at the last; None at others."""
        return self.evaluation if self.is_due(self.config.train.eval_every) else None

    def evaluation(self) -> dict[str, jax.Array]:
        """Measure what is asked for beside the validation loss, and dispatch the measurement of that."""
        self.watchdog.phase(f"the evaluation after step {self.step}")
        values = fp8_metrics(self.state) if self.config.log.fp8 else {}
        if self.exact_match is not None:
            values |= {"exact_match": jnp.asarray(self.exact_match.measure(self.state))}
        return values | {"validation_loss": mean_loss(self.state, self.validation)}

    def save(self) -> bool:
        """Begin to save a checkpoint; False if it must wait because the step was skipped."""
        self.log.drain()
        self.watchdog.phase(f"the checkpoint at step {self.step}")
        mesh = self.state.spec.mesh
        record = Record(
            config=config_to_dict(self.config),
            position=self.batches.get_state(),
            skipped=self.log.skipped,
            seconds=self.clock.seconds,
            mesh=(mesh.shape["node"], mesh.shape["local"]),
            base=self.base,
            metrics={name: x for name, x in self.log.last.items() if name in ("loss", "validation_loss")},
        )
        # A skipped last step cannot wait for a later one, but the evaluation shows that its weights are good.
        at_end = self.step == self.config.train.steps
        good = at_end and math.isfinite(self.log.last.get("validation_loss", math.nan))
        if not self.checkpoints.save(self.step, self.state, record, despite_skips=good):
            return False
        self.clock.saved()
        self.log.restart_clock()
        return True

    def note_end(self, error: BaseException) -> None:
        """Record in run.json why the run did not finish, unless the disk is full."""
        status = "stopped" if isinstance(error, Stopped) else "failed"
        reason = f"{type(error).__name__}: {error}"
        with suppress(OSError):  # a full disk, which is then the reported error
            self.folder.update_summary(status=status, step=self.step, reason=reason)

    def stop(self) -> None:
        """End before the last step, on request.

        Raises:
            Stopped: always; with the message for the user.
        """
        self.checkpoints.wait()
        raise Stopped(
            f"stopped on request at step {self.step} of {self.config.train.steps}, and saved; "
            "the same command resumes from there"
        )

    def is_due(self, every: int) -> bool:
        """Whether an action that runs every ``every`` steps (0: never) and at the last is due now."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def announce(self, notes: list[str]) -> None:
        """Print the model, data and mesh and how the run begins, and record them in run.json."""
        config = self.config
        mesh = self.state.spec.mesh
        self.log.say(
            f"{self.folder.path}: {parameter_count(config.model):,} parameters, {self.data.describe()}, "
            f"{config.zero.preset} on {mesh.shape['node']} x "
            f"{mesh.shape['local']} {jax.devices()[0].device_kind} devices"
        )
        self.log.say(describe_plan(self.state))
        for note in notes:
            self.log.say(note)
        if is_first():
            self.folder.begin_session(self.step, devices=mesh.size, notes=notes)
            self.folder.update_summary(steps=config.train.steps, **environment())

    def finish(self) -> None:
        """Wait for the last step and checkpoint, draw the loss curve, print and record the result."""
        self.log.drain()
        self.watchdog.phase("the end of the run")
        self.checkpoints.wait()
        loss = self.log.last.get("validation_loss")
        if loss is None:  # the run had already finished
            loss = float(mean_loss(self.state, self.validation))
        if not math.isfinite(loss):
            skipped = int(self.log.last.get("skipped_in_row", 0))
            raise DivergedError("the validation loss at the end is not finite", self.step - skipped - 1)
        per_byte = loss / self.data.bytes_per_token
        measured = {"validation_loss": loss, "validation_loss_per_byte": per_byte}
        if self.exact_match is not None:
            right = self.log.last.get("exact_match")
            measured["exact_match"] = self.exact_match.measure(self.state) if right is None else right
        if is_first():
            draw_loss_curve(read_metrics(self.folder.metrics), self.folder.curve, str(self.folder.path))
            self.folder.update_summary(
                status="finished",
                step=self.step,
                skipped=self.log.skipped,
                **measured,
                sources=self.data.account(self.batches.rounds(self.step)),
            )
        self.log.say(
            f"{self.data.describe_loss(loss, digits=4)}{describe_matches(measured, self.exact_match)}; "
            f"the run is in {self.folder.path}, its curve in {self.folder.curve.name}"
        )


@contextmanager
def disk_errors_explained(folder: RunFolder) -> Generator[None]:
    """Turn an error of the disk into a one-line message.

    Raises:
        RunError: the disk is full or no longer there.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise RunError(
            f"cannot write to {error.filename or folder.path}: {error.strerror or error}; "
            "checkpoints are intact"
        ) from error


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
