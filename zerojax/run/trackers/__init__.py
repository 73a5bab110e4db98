"""Experiment trackers of a run: TensorBoard, Weights & Biases, MLflow.

A tracker opens one run: a new one, or the one to which earlier processes of this run wrote. ``RUN/run.json``
keeps the tracker's identifier of the run. ``metrics.jsonl`` has all values in any case, so a tracker that
fails or hangs is dropped with a message, and the run continues. Each tracker has its own thread, so that
neither a step nor the end of the process waits for it.
"""

import functools
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import jax

from zerojax.errors import ConfigurationError
from zerojax.multihost.background import Worker
from zerojax.run.run_dir import RunFolder
from zerojax.run.trackers.clients import MLflow, TensorBoard, TrackedRun, Tracker, Wandb

# name -> (class, required package, what to install to get it)
_TRACKERS: dict[str, tuple[type[Tracker], str, str]] = {
    "tensorboard": (TensorBoard, "tensorboardX", "tensorboardX"),
    "wandb": (Wandb, "wandb", "wandb>=0.19"),
    "mlflow": (MLflow, "mlflow", "mlflow-skinny>=3"),
}


class _TrackerThread:
    """A tracker and its thread."""

    def __init__(self, name: str, tracker: Tracker, most: int) -> None:
        self.tracker = tracker
        self.worker = Worker(name, most)
        self.step: int | None = None  # being written, or the last written

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.step = step
        self.tracker.write(step, values)

    def end(self, *, failed: bool) -> None:
        self.step = None
        self.tracker.close(failed=failed)


class Trackers:
    """All trackers of a run; a context manager.

    Args:
        trackers: open trackers by name.
        say: prints a message; called by the thread that calls ``write`` and ``close``.
        most: a tracker is dropped when it is this many steps behind.
        patience: seconds for all trackers together to send pending values at the end.
    """

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        say: Callable[[str], None],
        *,
        most: int = 10_000,
        patience: float = 30.0,
    ) -> None:
        self._open = {name: _TrackerThread(name, tracker, most) for name, tracker in trackers.items()}
        self._patience = patience
        self._say = say

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(failed=error is not None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the values of a step, which need not be finite, for all trackers."""
        for name, line in list(self._open.items()):
            if self._has_failed(name, line):
                self._drop(name)
            elif not line.worker.put(functools.partial(line.write, step, values)):
                self._say(f"log.trackers: {name} has been stuck since step {line.step} and was dropped")
                self._drop(name)

    def close(self, *, failed: bool) -> None:
        """End all trackers, with the run's outcome; return when they have ended or time is up."""
        for line in self._open.values():
            line.worker.put(functools.partial(line.end, failed=failed))
        limit = time.monotonic() + self._patience
        for name, line in list(self._open.items()):
            done = line.worker.wait(max(0.0, limit - time.monotonic()))
            if not self._has_failed(name, line) and not done:
                self._say(
                    f"log.trackers: {name} did not accept its last steps within {self._patience:g} s; "
                    "metrics.jsonl has them"
                )
            self._drop(name)

    def _has_failed(self, name: str, line: _TrackerThread) -> bool:
        if (error := line.worker.error) is None:
            return False
        if line.step is None:
            self._say(f"log.trackers: {name} lost its last steps: {error}")
        else:
            self._say(f"log.trackers: {name} failed at step {line.step} and was dropped: {error}")
        return True

    def _drop(self, name: str) -> None:
        self._open.pop(name).worker.close()


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is unknown, or whose package is not installed; imports nothing.

    Raises:
        ConfigurationError: lists the known trackers, or says how to install it.
    """
    if isinstance(names, str):
        raise ConfigurationError(f"trackers={names!r}: give a list, such as [{names!r}]")
    for name in names:
        if name not in _TRACKERS:
            raise ConfigurationError(f"no tracker {name!r}: there are {', '.join(map(repr, _TRACKERS))}")
        _, package, wanted = _TRACKERS[name]
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"log.trackers: {name} needs the package {package}, which is not installed: "
                f"pip install {wanted!r}, or remove {name} from log.trackers"
            )


def track(
    folder: Path | str,
    trackers: Sequence[str] = ("tensorboard",),
    *,
    project: str = "zerojax",
    settings: Mapping[str, Any] = MappingProxyType({}),
    start: int = 0,
    say: Callable[[str], None] = print,
) -> Trackers:
    """Open trackers for your own training loop; a resumed run continues in them.

    All processes call this, and only process zero writes. Close the result, or use it in a ``with``
    statement.

    Args:
        folder: the run's folder, created if missing; its last part is the run's name. Its ``run.json`` keeps
            the trackers' identifiers.
        trackers: "tensorboard" (events in ``folder/tensorboard``), "wandb", "mlflow".
        project: project of Weights & Biases; experiment of MLflow.
        settings: shown with the run; plain values, possibly nested.
        start: steps done so far.
        say: prints a message.

    Raises:
        ConfigurationError: the folder cannot be written to; a tracker is unknown, not installed or
            unreachable.
    """
    check_trackers(trackers)
    if jax.process_index() != 0:
        return Trackers({}, say)
    place = RunFolder(Path(folder))
    place.create()
    return open_trackers(place, trackers, project, settings, start, say)


def open_trackers(
    folder: RunFolder,
    names: Sequence[str],
    project: str,
    settings: Mapping[str, Any],
    start: int,
    say: Callable[[str], None],
) -> Trackers:
    """Open the trackers of a run, in process zero; arguments and errors as for ``track``.

    A tracker that has the run already, by its identifier in the folder's run.json, resumes it.
    """
    known = _known(folder)
    trackers: dict[str, Tracker] = {}
    for name in names:
        kind, *_ = _TRACKERS[name]
        try:
            trackers[name] = kind(TrackedRun(folder, project, settings, start, known.get(name)))
        except Exception as error:  # each client has its own exceptions
            raise ConfigurationError(f"log.trackers: {name} cannot start: {error}") from error
        known[name] = trackers[name].identity
        folder.update_summary(trackers=known, folder=str(folder.path.absolute()))
    return Trackers(trackers, say)


def _known(folder: RunFolder) -> dict[str, str]:
    """The run's identifiers in its trackers.

    A copy of a run has none, because they stay with the original.
    """
    summary = folder.read_summary()
    place = Path(summary.get("folder", folder.path))
    if place.exists() and not place.samefile(folder.path):
        return {}
    return dict(summary.get("trackers", {}))
