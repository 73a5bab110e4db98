"""What a tracker is, which there are, and how all those of a run are told.

A tracker is a module of this package with a class that opens one run: a new one, or the one that this
run's earlier processes wrote to, whose name there lies in `RUN/run.json`. `metrics.jsonl` has everything
in any case, so a tracker that fails while a run is under way is dropped with a message, and the run goes on.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from zerojax.config import RunConfig
from zerojax.errors import ZeroError
from zerojax.run_folder import RunFolder

# name -> (module and class in it, package that it needs, extra of zerojax that installs the package)
_TRACKERS = {
    "tensorboard": ("zerojax.trackers.tensorboard:TensorBoard", "tensorboardX", None),
    "wandb": ("zerojax.trackers.wandb:Wandb", "wandb", "wandb"),
    "mlflow": ("zerojax.trackers.mlflow:MLflow", "mlflow", "mlflow"),
}


class Tracker(Protocol):
    """One run, as a tracker has it."""

    def __init__(self, folder: RunFolder, config: RunConfig, *, start: int, known: str | None) -> None:
        """Begin a run, or go on with the one that is `known` by this name.

        Args:
            folder: of the run; its last part is the run's name.
            config: the settings, `log.project` among them.
            start: steps done so far.
            known: what `identity` was in an earlier process of this run.
        """
        ...

    @property
    def identity(self) -> str:
        """What the tracker calls this run."""
        ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step; must not wait for anybody. A value may be no finite number."""
        ...

    def close(self, *, failed: bool) -> None:
        """Send what is left and end the run."""
        ...


class Trackers:
    """All trackers of a run, told together."""

    def __init__(self, trackers: Mapping[str, Tracker], say: Callable[[str], None]) -> None:
        """Take over open trackers.

        Args:
            trackers: by name.
            say: prints a message.
        """
        self._open = dict(trackers)
        self._say = say

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Tell all about a step."""
        for name, tracker in list(self._open.items()):
            try:
                tracker.write(step, values)
            except Exception as error:  # whatever a client raises when its server is away
                del self._open[name]
                self._say(f"log.trackers: {name} failed at step {step} and is told no more: {error}")

    def close(self, *, failed: bool) -> None:
        """End all; with whether the run failed."""
        for name, tracker in self._open.items():
            try:
                tracker.close(failed=failed)
            except Exception as error:  # as above: the last steps are in metrics.jsonl
                self._say(f"log.trackers: {name} lost its last steps: {error}")
        self._open.clear()


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
    known = dict(folder.read_summary().get("trackers", {}))
    trackers: dict[str, Tracker] = {}
    for name in config.log.trackers:
        module, _, kind = _TRACKERS[name][0].partition(":")
        make = getattr(importlib.import_module(module), kind)
        try:
            trackers[name] = make(folder, config, start=start, known=known.get(name))
        except Exception as error:  # each client has its own kinds
            raise ZeroError(f"log.trackers: {name} cannot start: {error}") from error
        known[name] = trackers[name].identity
        folder.update_summary(trackers=known)
    return Trackers(trackers, say)
