"""What a tracker is, which there are, and how all those of a run are told.

A tracker is a module of this package with a class that opens one run: a new one, or the one that this
run's earlier processes wrote to, whose name there lies in `RUN/run.json`. `metrics.jsonl` has everything
in any case, so a tracker that fails or hangs while a run is under way is dropped with a message, and the run
goes on. Each is told by a thread of its own, so that no step waits for it, and no process its end.
"""

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

import jax

from zerojax.errors import ZeroError
from zerojax.multihost.background import Worker
from zerojax.run.config import RunConfig, config_to_dict
from zerojax.run.run_dir import RunFolder

# name -> (module and class in it, package that it needs, extra of zerojax that installs the package)
_TRACKERS = {
    "tensorboard": ("zerojax.run.trackers.tensorboard:TensorBoard", "tensorboardX", None),
    "wandb": ("zerojax.run.trackers.wandb:Wandb", "wandb", "wandb"),
    "mlflow": ("zerojax.run.trackers.mlflow:MLflow", "mlflow", "mlflow"),
}


class Tracker(Protocol):
    """One run, as a tracker has it."""

    def __init__(
        self, folder: RunFolder, project: str, settings: Mapping[str, Any], *, start: int, known: str | None
    ) -> None:
        """Begin a run, or go on with the one that is `known` by this name.

        Args:
            folder: of the run; its last part is the run's name.
            project: that the run belongs to.
            settings: to be shown with it, perhaps nested; plain values.
            start: steps done so far.
            known: what `identity` was in an earlier process of this run.
        """
        ...

    @property
    def identity(self) -> str:
        """What the tracker calls this run."""
        ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step; may take its time, in a thread of its own. A value may be no finite number."""
        ...

    def close(self, *, failed: bool) -> None:
        """Send what is left and end the run."""
        ...


class _Line:
    """A tracker, and the thread that tells it."""

    def __init__(self, name: str, tracker: Tracker, most: int) -> None:
        self.tracker = tracker
        self.worker = Worker(name, most)
        self.step: int | None = None  # that it is, or was last, told about

    def tell(self, step: int, values: Mapping[str, float]) -> None:
        self.step = step
        self.tracker.write(step, values)

    def end(self, *, failed: bool) -> None:
        self.step = None
        self.tracker.close(failed=failed)


class Trackers:
    """All trackers of a run, told together."""

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        say: Callable[[str], None],
        *,
        most: int = 10_000,
        patience: float = 30.0,
    ) -> None:
        """Take over open trackers.

        Args:
            trackers: by name.
            say: prints a message; called by the thread that calls `write` and `close`.
            most: steps that a tracker may lag behind before it is dropped.
            patience: seconds that all together get to send what is left, at the end.
        """
        self._open = {name: _Line(name, tracker, most) for name, tracker in trackers.items()}
        self._patience = patience
        self._say = say

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End all; the run has failed if there is an error."""
        self.close(failed=error is not None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Tell all about a step; waits for none.

        Args:
            step: steps done.
            values: numbers by name, perhaps not finite.
        """
        for name, line in list(self._open.items()):
            if self._has_failed(name, line):
                self._drop(name)
            elif not line.worker.put(functools.partial(line.tell, step, values)):
                self._say(f"log.trackers: {name} has been stuck since step {line.step} and is told no more")
                self._drop(name)

    def close(self, *, failed: bool) -> None:
        """End all, with whether the run failed; returns when they have, or when their time is up."""
        for line in self._open.values():
            line.worker.put(functools.partial(line.end, failed=failed))
        limit = time.monotonic() + self._patience
        for name, line in list(self._open.items()):
            done = line.worker.wait(max(0.0, limit - time.monotonic()))
            if not self._has_failed(name, line) and not done:
                self._say(
                    f"log.trackers: {name} did not take its last steps within {self._patience:g} s; they are "
                    "in metrics.jsonl"
                )
            self._drop(name)

    def _has_failed(self, name: str, line: _Line) -> bool:
        if (error := line.worker.error) is None:
            return False
        if line.step is None:
            self._say(f"log.trackers: {name} lost its last steps: {error}")
        else:
            self._say(f"log.trackers: {name} failed at step {line.step} and is told no more: {error}")
        return True

    def _drop(self, name: str) -> None:
        self._open.pop(name).worker.close()


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is not installed; imports nothing.

    Raises:
        ZeroError: saying how to install it.
    """
    for name in names:
        _, package, extra = _TRACKERS[name]
        if importlib.util.find_spec(package) is None:
            raise ZeroError(
                f"log.trackers: {name} needs the package {package}, which is not installed: "
                f'pip install "zerojax[{extra}]", or take {name} out of log.trackers'
            )


def open_trackers(
    folder: RunFolder, config: RunConfig, *, start: int, say: Callable[[str], None]
) -> Trackers:
    """Open the trackers that a config names, each at the run that it has of this one already.

    Args:
        folder: the run's; what the trackers call the run is noted in its summary.
        config: the settings.
        start: steps done so far.
        say: prints a message.

    Raises:
        ZeroError: a tracker cannot be reached, or does not let us in.
    """
    return _open(folder, config.log.trackers, config.log.project, config_to_dict(config), start, say)


def track(
    folder: Path | str,
    trackers: Sequence[str] = ("tensorboard",),
    *,
    project: str = "zerojax",
    settings: Mapping[str, Any] = MappingProxyType({}),
    start: int = 0,
    say: Callable[[str], None] = print,
) -> Trackers:
    """Open trackers for a training loop of one's own; a run that goes on goes on in them, too.

    In several processes all call, and the first one alone tells. Close it, or use it in a ``with`` statement.

    Args:
        folder: of the run, made if need be; its last part is the run's name. `run.json` notes there what the
            trackers call it.
        trackers: "tensorboard" (events in ``folder/tensorboard``), "wandb", "mlflow".
        project: of Weights & Biases; experiment of MLflow.
        settings: to be shown with the run, perhaps nested; plain values.
        start: steps done so far.
        say: prints a message.

    Raises:
        ZeroError: the folder cannot be written to; a tracker is unknown, not installed or cannot be reached.
    """
    if unknown := [name for name in trackers if name not in _TRACKERS]:
        raise ZeroError(f"no tracker {unknown[0]!r}: there are {', '.join(map(repr, _TRACKERS))}")
    check_trackers(trackers)
    if jax.process_index() != 0:
        return Trackers({}, say)
    place = RunFolder(Path(folder))
    place.create()
    return _open(place, trackers, project, settings, start, say)


def _open(
    folder: RunFolder,
    names: Sequence[str],
    project: str,
    settings: Mapping[str, Any],
    start: int,
    say: Callable[[str], None],
) -> Trackers:
    known = dict(folder.read_summary().get("trackers", {}))
    trackers: dict[str, Tracker] = {}
    for name in names:
        module, _, kind = _TRACKERS[name][0].partition(":")
        make = getattr(importlib.import_module(module), kind)
        try:
            trackers[name] = make(folder, project, settings, start=start, known=known.get(name))
        except Exception as error:  # each client has its own kinds
            raise ZeroError(f"log.trackers: {name} cannot start: {error}") from error
        known[name] = trackers[name].identity
        folder.update_summary(trackers=known)
    return Trackers(trackers, say)
