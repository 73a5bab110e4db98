"""An open run: its folder, state and services, shared by training and post-training."""

import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zerojax import compilation_cache
from zerojax.analysis.plan import describe_plan
from zerojax.errors import ConfigurationError, Stopped, error_line
from zerojax.multihost.agreement import run_on_each_process, run_on_process_zero
from zerojax.multihost.files import on_own_disks
from zerojax.multihost.peers import Peers
from zerojax.network import nccl
from zerojax.run.build import Trained, environment, is_first, make_log, make_watchdog
from zerojax.run.checkpoints import (
    Checkpoints,
    Manifest,
    Record,
    Retention,
    RunCopy,
    Snapshots,
    TrainingClock,
    reserve_for_saves,
    step_dirs,
)
from zerojax.run.checkpoints.select import choose
from zerojax.run.config import RunConfig, spelled_out
from zerojax.run.loop import TrainLoop, disk_errors_explained
from zerojax.run.metrics.files import MetricsFile
from zerojax.run.recovery import Recovery
from zerojax.run.run_dir import Resume, RunFolder, RunLock, check_start
from zerojax.run.weights import Start


class Opening(NamedTuple):
    """A run that is being opened, with the lock of its folder held.

    ``manifest`` is None for a new run, ``notes`` are lines for the user, and ``on_error`` closes what was
    opened if the run cannot be opened.
    """

    config: RunConfig
    folder: RunFolder
    lock: RunLock
    manifest: Manifest | None
    notes: list[str]
    on_error: ExitStack
    recovery: Recovery | None
    snapshots: Snapshots | None
    copy: RunCopy | None


@dataclass(kw_only=True)
class OpenRun(TrainLoop):
    """A run with the services that every loop needs, made within ``opening``; a context manager.

    Creating it writes the settings to the run's folder.

    ``batch`` has the shapes and dtypes of a global batch. ``also_trained`` are further states that each step
    trains. If it ``makes_samples``, process zero writes them to a file.
    """

    new: InitVar[Opening]
    start: InitVar[Start]
    batch: InitVar[Any]
    peers: InitVar[Peers | None]
    also_trained: InitVar[Sequence[Trained]] = ()
    makes_samples: InitVar[bool] = False

    def __post_init__(
        self,
        new: Opening,
        start: Start,
        batch: Any,
        peers: Peers | None,
        also_trained: Sequence[Trained],
        makes_samples: bool,
    ) -> None:
        if new.recovery is not None:
            new.recovery.end("to restore the state")
        config = self.config = new.config
        self.lock = new.lock
        self.state, self.step, self.base = start.state, start.step, start.base
        self._steps, self._evaluate_every = config.train.steps, config.train.eval_every
        self._save_every = config.checkpoint.every
        # A run always has a folder and checkpoints.
        self.folder: RunFolder = new.folder  # pyrefly: ignore[bad-override-mutable-attribute]
        if is_first():
            self.folder.write_config(config)
        trained = [Trained(config.model, start.state, batch), *also_trained]
        self._recovery = new.recovery
        skipped = start.record.skipped
        with ThreadPoolExecutor(1) as beside:  # the driver locks pages while Python traces a step
            # After a restart nothing is traced, and the first save may wait for the driver instead.
            states = [one.state for one in trained if new.recovery is None]
            reserving = beside.submit(reserve_for_saves, states)
            self.log = make_log(config, self.folder, trained, start.step, skipped, self._note_step)
        reserving.result()
        saving = config.checkpoint
        self.checkpoints: Checkpoints = Checkpoints(  # pyrefly: ignore[bad-override-mutable-attribute]
            self.folder.checkpoints,
            Retention(saving.keep, saving.keep_every, saving.keep_best, saving.keep_minutes),
            start=start.saved,
            copy=new.copy,
            say=self.log.say,
        )
        self.clock = TrainingClock(start.record.seconds, minutes=saving.minutes)
        self.snapshots = new.snapshots
        if self.snapshots is not None:
            self.snapshots.say = self.log.say
            self.snapshots.reserve(self.step, self.state, self.record())
        self.watchdog = make_watchdog(config.cluster, self.folder, peers)
        self.samples = (
            MetricsFile(self.folder.samples, start=start.step) if makes_samples and is_first() else None
        )

    advice = (
        "Lower optimizer.learning_rate or optimizer.clip_norm, set train.spike_deviations, look at the data, "
        "or raise train.max_skips"
    )

    def close_files(self) -> None:
        """Finish the writing of files."""
        if self.samples is not None:
            self.samples.close()
        super().close_files()

    def record(self) -> Record:
        """The record to save with the arrays."""
        return replace(super().record(), config=spelled_out(self.config), base=self.base)

    def note_first(self, values: Mapping[str, float], words: str) -> None:
        """Log the metrics of the first weights, and record them in run.json."""
        self.log.say(f"before the first step: {words}")
        if is_first():
            self.folder.update_summary(**{f"first_{name}": value for name, value in values.items()})
        self.log.restart_clock()

    def note_end(self, error: BaseException) -> None:
        """Record in run.json why the run did not finish, unless the disk is full."""
        status = "stopped" if isinstance(error, Stopped) else "failed"
        with suppress(OSError):  # a full disk, which is then the reported error
            self.folder.update_summary(status=status, step=self.step, reason=error_line(error))

    def announce(self, what: str, notes: Sequence[str]) -> None:
        """Print the model, its mesh and how the run begins, and record it in run.json."""
        config, mesh = self.config, self.state.spec.mesh
        self.log.say(
            f"{self.folder.path}: {what}, {config.zero.base} on {mesh.shape['node']} x "
            f"{mesh.shape['local']} {jax.devices()[0].device_kind} devices"
        )
        self.log.say(describe_plan(self.state))
        self.log.say(f"compiled programs: {compilation_cache.describe()}")
        notes = [*notes, *map(str, nccl.applied())]
        for note in notes:
            self.log.say(note)
        if is_first():
            self.folder.begin_session(self.step, devices=mesh.size, notes=notes)
            self.folder.update_summary(steps=config.train.steps, **environment())
        if self._recovery is not None:
            self._recovery.end("to open the run")

    def _note_step(self, step: int, _: Mapping[str, float]) -> None:
        """Say how long a restart took, once the run takes a step that is new."""
        if self._recovery is None or not self._recovery.is_new(step, self.log.reached):
            return
        self.log.say(str(self._recovery))
        if is_first():
            self.folder.note_recovery(self._recovery)
        self._recovery = None


@contextmanager
def opening(
    config: RunConfig, folder: RunFolder, resume: Resume, snapshots: Snapshots | None = None
) -> Generator[Opening]:
    """Create and lock a run's folder, for a block that opens the run; unlock it if that fails.

    ``snapshots`` are the ones that the run takes, if the launcher keeps them.

    If the start is refused, process zero removes the files that it has written. After other errors they stay,
    because the next start can use prepared tokens.
    """
    lock = RunLock(folder)
    if (recovery := Recovery.find()) is not None:
        recovery.end("to start and join")
    with ExitStack() as on_error, disk_errors_explained(folder):
        on_error.callback(lock.close)
        absent = [path for path in (folder.lock, folder.path, *folder.path.parents) if not path.exists()]
        unlocked = run_on_process_zero(lock.take)
        if own_disks := on_own_disks(folder.path):
            run_on_each_process(lambda: is_first() or lock.take())
        if is_first() or own_disks:
            on_error.push(_remover(folder, absent))
        run_on_process_zero(folder.check_config)
        copy = RunCopy.of(config.checkpoint.copy_to, folder)
        if copy is not None:
            (run_on_each_process if own_disks else run_on_process_zero)(copy.fetch_files)
        notes, manifest = [] if unlocked is None else [unlocked], None
        saved = None
        if recovery is not None:
            saved = run_on_process_zero(lambda: max(step_dirs.steps(folder.checkpoints), default=None))
        if snapshots is not None and recovery is not None:
            manifest = snapshots.choose(spelled_out(config), saved)
            if manifest is None:
                notes.append(
                    "no snapshot in memory is newer than the last checkpoint, whole in all processes, and of "
                    'these settings (with another number of nodes, that needs zero.state_spread = "node")'
                )
        if manifest is None:
            manifest, damaged = choose(
                folder.checkpoints,
                checksums=config.checkpoint.verify,
                check=lambda latest: check_start(latest, resume, folder),
                copy=copy if saved is None else None,  # a restart has on its disk all that the copy has
            )
            notes += damaged
        yield Opening(config, folder, lock, manifest, notes, on_error, recovery, snapshots, copy)
        on_error.pop_all()


def _remover(folder: RunFolder, absent: Sequence[Path]) -> Callable[..., None]:
    """An exit function that removes the files that a refused start adds to a run's folder.

    ``absent`` are the lock and the folders that did not exist before the start took the lock.
    """
    before = _contents(folder)

    def remove(error: type[BaseException] | None, *_: object) -> None:
        if error is None or not issubclass(error, ConfigurationError):
            return
        for path in _contents(folder) - before:
            _delete(path)
        for path in absent:
            with suppress(OSError):  # a folder to which another process has added a file stays
                path.unlink() if path == folder.lock else path.rmdir()

    return remove


def _contents(folder: RunFolder) -> set[Path]:
    """The files and folders of a run. A start may add some to data/, which may be a link to another disk."""
    return {*folder.path.glob("*"), *folder.data.glob("*")}


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
