"""The clients of the trackers. Each imports its package when it is opened, because most runs use only one."""

import itertools
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from flax import traverse_util

from zerojax.run.run_dir import RunFolder

_FLUSH_SECONDS = 10.0
_PARAMS_PER_REQUEST = 100  # MLflow's limit


class TrackedRun(NamedTuple):
    """The run that a tracker shows.

    Attributes:
        folder: the run's folder; its last part is the run's name.
        project: the project that the run belongs to.
        settings: shown with the run; plain values, possibly nested.
        start: steps done so far.
        known: ``Tracker.identity`` in an earlier process of this run; None if there was none.
    """

    folder: RunFolder
    project: str
    settings: Mapping[str, Any]
    start: int
    known: str | None


class Tracker(Protocol):
    """One run in a tracker, with the identifier that it has there."""

    identity: str

    def __init__(self, run: TrackedRun) -> None:
        """Begin a run, or resume the one that is known."""
        ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step; runs in the tracker's thread, and may be slow. Values need not be finite."""
        ...

    def close(self, *, failed: bool) -> None:
        """Send pending values and end the run."""
        ...


@contextmanager
def _without(package: str) -> Generator[None]:
    """Let imports of a package fail within a block, unless it has been imported before.

    tensorboardX imports torch if it is installed, which takes seconds. Event files need none of it.
    """
    absent = package not in sys.modules
    if absent:
        sys.modules[package] = None  # pyrefly: ignore[unsupported-operation]
    try:
        yield
    finally:
        if absent:
            del sys.modules[package]


class TensorBoard:
    """Event files in ``RUN/tensorboard``; a resumed run adds one, which hides the steps that it repeats.

    It uses only the record writer of tensorboardX. The thread and queue of ``SummaryWriter`` depend on the
    wall clock, and hang forever if the clock is set back by weeks.
    """

    identity = "tensorboard"  # their folder, relative to the run's folder

    def __init__(self, run: TrackedRun) -> None:
        """Open a new event file."""
        with _without("torch"):
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        path = run.folder.path / self.identity
        path.mkdir(exist_ok=True)
        # File names have a resolution of one second: the suffix keeps a quick restart from overwriting a
        # file.
        self._writer = EventsWriter(str(path / "events"), filename_suffix=f".from-{run.start}")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(step=run.start + 1, session_log=start)
        self._flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each value."""
        make = self._summaries.Summary
        scalars = [make.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=make(value=scalars))
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self._flush()

    def close(self, *, failed: bool) -> None:
        """Flush and close."""
        del failed
        self._writer.close()

    def _add(self, **event: Any) -> None:
        self._writer.write_event(self._events.Event(wall_time=time.time(), **event))

    def _flush(self) -> None:
        self._writer.flush()
        self._flushed = time.monotonic()


class Wandb:
    """One run in Weights & Biases, with the same id in all processes of this run.

    ``WANDB_MODE=offline`` writes to ``RUN/wandb`` for ``wandb sync``.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Begin or resume the run."""
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.folder.path.absolute().name,
            id=run.known,
            resume=None if run.known is None else "allow",
            dir=str(run.folder.path),
            config=dict(run.settings),
            reinit="create_new",
            settings=wandb.Settings(console="off", quiet=True),
        )
        self.identity: str = self._run.id
        # W&B drops steps below its last one, so the steps repeated after a crash would be missing.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Pass a row to the client's own process."""
        self._run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        """Wait until all values are sent."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """One run in MLflow, continued by all processes of this run, in the experiment named after the project.

    ``MLFLOW_TRACKING_URI`` names the server or database.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Begin or resume the run."""
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        self._metric = entities.Metric
        self._client = MlflowClient()
        if run.known is not None:
            self._client.update_run(run.known, status="RUNNING")
            self.identity = run.known
            return
        found = self._client.get_experiment_by_name(run.project)
        number = self._client.create_experiment(run.project) if found is None else found.experiment_id
        made = self._client.create_run(number, run_name=run.folder.path.absolute().name)
        self.identity = made.info.run_id
        flat = traverse_util.flatten_dict(dict(run.settings), sep=".")
        params = [entities.Param(name, str(value)) for name, value in flat.items()]
        for some in itertools.batched(params, _PARAMS_PER_REQUEST):
            self._client.log_batch(self.identity, params=list(some))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.identity, metrics)

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self.identity, "FAILED" if failed else "FINISHED")
