"""A training run, from settings to a trained model; `Trainer.train` is the loop."""

import errno
import functools
import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import jax

import zerojax
from zerojax.analysis.plan import describe_plan
from zerojax.analysis.profile import StepProfile
from zerojax.errors import DivergedError, RunError, Stopped
from zerojax.models import parameter_count
from zerojax.multihost.agreement import Agreement, Wishes, from_first
from zerojax.multihost.peers import Peers
from zerojax.multihost.preemption import StopRequest
from zerojax.multihost.watchdog import Watchdog
from zerojax.run.build import (
    abstract_state,
    check_settings,
    choose_checkpoint,
    environment,
    initial_state,
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
    find,
    reserve_host_memory,
    restore,
    restore_weights,
    step_dirs,
)
from zerojax.run.config import RunConfig, config_from_dict, config_to_dict
from zerojax.run.data import Batch, Dataset, TrainBatches
from zerojax.run.metrics import RunLog, draw_loss_curve, read_metrics
from zerojax.run.optimizers import rate_changes
from zerojax.run.run_dir import Resume, RunFolder, check_same_model, check_same_run
from zerojax.run.run_lock import RunLock

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
    """A run, with everything at hand that its loop needs.

    Attributes:
        config: the settings.
        folder: where it writes.
        data: tokens to learn from and to check with.
        batches: the training batches, at the position where the run stands.
        validation: the batches of every evaluation.
        checkpoints: those of the run.
        clock: how long the run has trained, and whether a save is due by time.
        log: metrics, files, progress line.
        watchdog: ends the run when a step takes far too long.
        profile: traces the steps that it was asked to.
        lock: keeps other runs out of the folder.
        state: the model and its optimizer.
        step: optimizer steps done.
    """

    config: RunConfig
    folder: RunFolder
    data: Dataset
    batches: TrainBatches
    validation: list[Batch]
    checkpoints: Checkpoints
    clock: TrainingClock
    log: RunLog
    watchdog: Watchdog
    profile: StepProfile
    lock: RunLock
    state: zerojax.TrainState
    step: int

    @classmethod
    def open(
        cls,
        config: RunConfig,
        folder: RunFolder,
        resume: Resume = "auto",
        init_from: Path | None = None,
        peers: Peers | None = None,
        profile: range | None = None,
    ) -> Self:
        """Prepare the data, make the model or restore the newest valid checkpoint.

        Args:
            config: the settings.
            folder: where the run is, or will be.
            resume: whether to go on from a checkpoint that is there.
            init_from: a run or a checkpoint whose weights a run that begins shall begin with; a run that
                goes on has its own.
            peers: the other processes of the run, where there are any.
            profile: steps to trace.

        Raises:
            ZeroError: settings or data that cannot work, `resume` or `init_from` cannot be had, or another
                process trains in the folder.
            RunError: the disk is full.
        """
        check_settings(config)
        lock = RunLock(folder)
        try:
            with told_of_disk_errors(folder):
                return cls._open(config, folder, resume, init_from, peers, profile, lock)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def _open(
        cls,
        config: RunConfig,
        folder: RunFolder,
        resume: Resume,
        init_from: Path | None,
        peers: Peers | None,
        profile: range | None,
        lock: RunLock,
    ) -> Self:
        unlocked = from_first(lock.take)
        data = prepare_data(config, folder)
        batches, validation = make_batches(config, data)
        manifest, notes = choose_checkpoint(config, folder, resume)
        if unlocked is not None:
            notes.append(unlocked)
        imported = manifest is not None and not manifest.record.position  # weights alone: no step was taken
        if manifest is not None and not imported:
            before = config_from_dict(manifest.record.config)
            changes = check_same_run(before, config, folder)
            changes += rate_changes(before, config, manifest.step - manifest.record.skipped)
            notes.append("; ".join([f"going on from step {manifest.step}", *changes]))
            batches.set_state(manifest.record.position)
            state = restore(folder.checkpoints / str(manifest.step), abstract_state(config))
        else:
            state = initial_state(config)
            source = None if init_from is None else Path(from_first(lambda: str(find(init_from))))
            if manifest is not None and source is None:
                check_same_model(config_from_dict(manifest.record.config), config, folder)
                source = folder.checkpoints / str(manifest.step)
            if source is not None:
                state = restore_weights(source, state)
                notes.append(f"beginning with the weights of {source}")
        record = Record() if manifest is None else manifest.record
        step = 0 if manifest is None else manifest.step
        if is_first():
            folder.write_config(config)
        reserve_host_memory(state)
        saving = config.checkpoint
        log = make_log(config, folder, state, step, record.skipped)
        trainer = cls(
            config=config,
            folder=folder,
            data=data,
            batches=batches,
            validation=validation,
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
        )
        trainer.announce(notes)
        return trainer

    def __enter__(self) -> Self:
        """Start the progress line."""
        self.log.__enter__()
        self.watchdog.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Finish what is being written, whether or not the run did; note why it did not."""
        self.watchdog.phase("the end of the run")
        try:
            self.profile.close()
            self.log.__exit__(kind, error, trace)
            self.batches.close()
            if self.log.hangs:  # as would all that has to do with the disk
                return
            if error is not None and is_first():
                self.note_end(error)
            self.checkpoints.close()
        finally:
            self.watchdog.stop()
            if not self.log.hangs:
                self.lock.close()

    def train(self) -> None:
        """Train from where the run stands to its last step.

        Raises:
            DivergedError: the loss or gradient was not finite too many times in a row; says how to go back.
            RunError: the disk is full.
            Stopped: a signal asked any process of the run to stop; it has saved.
        """
        agreement, wanted = Agreement(self.state.spec.mesh), Wishes()
        with StopRequest() as request, told_of_disk_errors(self.folder), told_the_way_back(self):
            while self.step < self.config.train.steps:
                self.watchdog.step(self.step + 1)
                agreement.put(Wishes(save=self.clock.wants_save and is_first(), stop=request.received))
                batch = next(self.batches)
                self.state, metrics = self.profile.step(
                    self.step + 1, functools.partial(zerojax.train_step, self.state, batch)
                )
                self.step += 1
                self.log.step(self.step, metrics, self.evaluation_if_due())
                self.checkpoints.check()
                wanted |= agreement.get() | Wishes(save=self.is_due(self.config.checkpoint.every))
                if (wanted.save or wanted.stop) and self.save():
                    agreement.forget()
                    if wanted.stop and self.step < self.config.train.steps:
                        self.stop()
                    wanted = Wishes()
            self.finish()

    def evaluation_if_due(self) -> Callable[[], dict[str, jax.Array]] | None:
        """What measures the validation loss, at the steps that ask for it and at the last."""
        if not self.is_due(self.config.train.eval_every):
            return None
        return self.evaluation

    def evaluation(self) -> dict[str, jax.Array]:
        """Measure the validation loss; not waited for."""
        self.watchdog.phase(f"the evaluation after step {self.step}")
        return {"validation_loss": mean_loss(self.state, self.validation)}

    def save(self) -> bool:
        """Begin to save a checkpoint; False where that has to wait, as the step was skipped."""
        self.log.drain()
        self.watchdog.phase(f"the checkpoint at step {self.step}")
        mesh = self.state.spec.mesh
        record = Record(
            config=config_to_dict(self.config),
            position=self.batches.get_state(),
            skipped=self.log.skipped,
            seconds=self.clock.seconds,
            mesh=(mesh.shape["node"], mesh.shape["local"]),
            metrics={name: x for name, x in self.log.last.items() if name in ("loss", "validation_loss")},
        )
        # After the last step there is no other one to save; but there is an evaluation, of these weights.
        at_end = self.step == self.config.train.steps
        good = at_end and math.isfinite(self.log.last.get("validation_loss", math.nan))
        if not self.checkpoints.save(self.step, self.state, record, despite_skips=good):
            return False
        self.clock.saved()
        self.log.restart_clock()
        return True

    def note_end(self, error: BaseException) -> None:
        """Write down why the run did not finish, if the disk still takes it."""
        status = "stopped" if isinstance(error, Stopped) else "failed"
        reason = f"{type(error).__name__}: {error}"
        with suppress(OSError):  # on a full disk, which is then what is being told
            self.folder.update_summary(status=status, step=self.step, reason=reason)

    def stop(self) -> None:
        """End before the last step, because somebody asked for it.

        Raises:
            Stopped: always; what to tell is in it.
        """
        self.checkpoints.wait()
        raise Stopped(
            f"stopped on request at step {self.step} of {self.config.train.steps}, and saved; "
            "the same command goes on from there"
        )

    def is_due(self, every: int) -> bool:
        """Whether something done each `every` steps (0: never), and at the last, is due now."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def announce(self, notes: list[str]) -> None:
        """Say what is going to run, and from where, and note it in run.json."""
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
        """Wait for the last step and checkpoint, draw the curve, say how it went."""
        self.log.drain()
        self.watchdog.phase("the end of the run")
        self.checkpoints.wait()
        loss = self.log.last.get("validation_loss")
        if loss is None:  # the run was complete already
            loss = float(mean_loss(self.state, self.validation))
        if not math.isfinite(loss):
            skipped = int(self.log.last.get("skipped_in_row", 0))
            raise DivergedError("the validation loss at the end is not finite", self.step - skipped - 1)
        per_byte = loss / self.data.bytes_per_token
        if is_first():
            draw_loss_curve(read_metrics(self.folder.metrics), self.folder.curve, str(self.folder.path))
            self.folder.update_summary(
                status="finished",
                step=self.step,
                skipped=self.log.skipped,
                validation_loss=loss,
                validation_loss_per_byte=per_byte,
                sources=self.data.account(self.batches.rounds(self.step)),
            )
        self.log.say(
            f"validation loss {loss:.4f} nats per token, {per_byte:.4f} per byte; the run is in "
            f"{self.folder.path}, its curve in {self.folder.curve.name}"
        )


@contextmanager
def told_of_disk_errors(folder: RunFolder) -> Iterator[None]:
    """What the system refuses to write, as one clear line.

    Raises:
        RunError: the disk is full, or has gone away.
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
def told_the_way_back(trainer: Trainer) -> Iterator[None]:
    """Where training broke the weights, the newest checkpoint from before, and how to go back to it.

    Raises:
        DivergedError: with that.
    """
    try:
        yield
    except DivergedError as error:
        with suppress(RunError):
            trainer.checkpoints.wait()
        raise DivergedError(
            f"{error}. {_way_back(trainer.folder, error.good)}. Lower optimizer.learning_rate or "
            "optimizer.clip_norm, set train.spike_deviations, look at the data, or raise train.max_skips: "
            "the same command alone would end here again",
            error.good,
        ) from None


def _way_back(folder: RunFolder, good: int) -> str:
    if good < 0:
        return "No step made an update"
    broken = f"The update of step {good + 1} may have broken the weights"
    steps = step_dirs.steps(folder.checkpoints)
    if not (before := [step for step in steps if step <= good]):
        return f"{broken}, and there is no checkpoint from before: begin again in another folder"
    if before == steps:
        return f"{broken}; the newest checkpoint, of step {steps[-1]}, is from before"
    command = f"zerojax checkpoints {shlex.quote(str(folder.path))} --rewind {before[-1]}"
    return f"{broken}: `{command}` goes back to the newest checkpoint from before"
