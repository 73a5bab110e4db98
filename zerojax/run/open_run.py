"""An open run: its folder, its state and its services, which training and post-training share."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from zerojax.analysis.plan import describe_plan
from zerojax.errors import Stopped
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.multihost.peers import Peers
from zerojax.multihost.watchdog import Watchdog
from zerojax.network import nccl
from zerojax.run.build import Trained, environment, is_first, make_log, make_watchdog
from zerojax.run.checkpoints import (
    Checkpoints,
    Record,
    Retention,
    TrainingClock,
    reserve_host_memory,
)
from zerojax.run.config import RunConfig, spelled_out
from zerojax.run.loop import Schedule, TrainLoop, disk_errors_explained
from zerojax.run.metrics import MetricsFile, RunLog
from zerojax.run.run_dir import RunFolder
from zerojax.run.run_lock import RunLock
from zerojax.run.weights import Start
from zerojax.train.state import TrainState


@dataclass(frozen=True, kw_only=True)
class Services:
    """What a run uses besides its settings and its state.

    Attributes:
        folder: of the run.
        checkpoints: of the run.
        clock: time trained, and whether a save is due by time.
        log: metrics, files, progress line.
        watchdog: ends a hung run.
        lock: keeps other runs out of the folder.
        samples: the file of completions, on process zero of a run that makes them.
    """

    folder: RunFolder
    checkpoints: Checkpoints
    clock: TrainingClock
    log: RunLog
    watchdog: Watchdog
    lock: RunLock
    samples: MetricsFile | None


@dataclass(kw_only=True)
class OpenRun(TrainLoop):
    """A run with what every loop needs; a context manager.

    Attributes:
        config: the settings.
        services: what the loop uses; its attributes are the loop's, too.
        base: where the frozen weights, or a reference, are from (``Record.base``).
    """

    config: RunConfig
    services: Services
    state: TrainState
    step: int
    base: str

    def __post_init__(self) -> None:
        # A run always has a folder and checkpoints.
        self.folder: RunFolder = self.services.folder  # pyright: ignore[reportIncompatibleVariableOverride]
        self.checkpoints: Checkpoints = self.services.checkpoints  # pyright: ignore[reportIncompatibleVariableOverride]
        self.clock = self.services.clock
        self.log = self.services.log
        self.watchdog = self.services.watchdog
        self.lock = self.services.lock
        self.samples = self.services.samples

    advice = (
        "Lower optimizer.learning_rate or optimizer.clip_norm, set train.spike_deviations, look at the data, "
        "or raise train.max_skips"
    )

    @property
    def schedule(self) -> Schedule:
        """As the settings say."""
        return Schedule(self.config.train.steps, self.config.train.eval_every, self.config.checkpoint.every)

    def close_files(self) -> None:
        """Finish the writing of files."""
        if self.samples is not None:
            self.samples.close()
        super().close_files()

    def record(self) -> Record:
        """What is saved with the arrays."""
        return replace(super().record(), config=spelled_out(self.config), base=self.base)

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

    def announce(self, what: str, notes: Sequence[str]) -> None:
        """Print what is trained on which mesh and how the run begins, and record it in run.json."""
        config, mesh = self.config, self.state.spec.mesh
        self.log.say(
            f"{self.folder.path}: {what}, {config.zero.base} on {mesh.shape['node']} x "
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

    def services(
        self,
        start: Start,
        batch: Any,
        peers: Peers | None,
        beside: Sequence[Trained] = (),
        *,
        samples: bool = False,
    ) -> Services:
        """What the run uses; writes the settings to its folder.

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
        return Services(
            folder=folder,
            checkpoints=checkpoints,
            clock=TrainingClock(record.seconds, minutes=saving.minutes),
            log=log,
            watchdog=make_watchdog(config.cluster, folder, peers),
            lock=self.lock,
            samples=MetricsFile(folder.samples, start=start.step) if samples and is_first() else None,
        )


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
