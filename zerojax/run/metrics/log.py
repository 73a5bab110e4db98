"""Logging of steps to files, trackers and the progress line, without delaying the next step."""

from dataclasses import dataclass
from typing import Self

import jax
import numpy as np
from jaxtyping import Float

from zerojax.errors import DivergedError
from zerojax.run.config import RunConfig, config_to_dict
from zerojax.run.metrics.devices import memory_in_use, peak_flops
from zerojax.run.metrics.files import MetricsFile
from zerojax.run.metrics.progress import Progress
from zerojax.run.metrics.queue import Evaluation, Metrics, MetricsQueue, StepRecord
from zerojax.run.run_dir import RunFolder
from zerojax.run.trackers import open_trackers


@dataclass(frozen=True)
class StepCosts:
    """The work of a step, for computing throughput.

    Attributes:
        tokens: per step, over all devices.
        flops: per step, over all devices, as the model counts them.
        devices: number of devices.
        internode_bytes: sent by one node to others per step, if known.
    """

    tokens: int
    flops: float
    devices: int
    internode_bytes: float | None = None


class RunLog:
    """Logs the steps of a run and detects divergence; files, trackers and output are process zero's.

    Args:
        folder: of the run.
        config: its settings.
        learning_rates: by the number of updates done.
        costs: of a step.
        start: steps done before.
        skipped: those of them without an update.

    Raises:
        ConfigurationError: a tracker cannot start.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        learning_rates: Float[np.ndarray, " steps"],
        costs: StepCosts,
        *,
        start: int = 0,
        skipped: int = 0,
    ) -> None:
        first = jax.process_index() == 0
        self.skipped = skipped
        self.last: dict[str, float] = {}
        self._settings = config.train
        self._rates = learning_rates
        self._costs = costs
        self._peak = peak_flops(jax.local_devices()[0].device_kind)
        self._queue = MetricsQueue()
        self._progress = Progress(steps=config.train.steps, start=start, every=config.log.every, shown=first)
        self._file = MetricsFile(folder.metrics, start=start) if first else None
        self._trackers = None
        if first:
            names, project = config.log.trackers, config.log.project
            self._trackers = open_trackers(folder, names, project, config_to_dict(config), start, self.say)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        self._queue.restart_clock()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the files; steps in flight are lost unless ``drain`` was called."""
        self._progress.__exit__(kind, error, trace)
        self._queue.close()
        try:
            if self._file is not None:
                self._file.close()
        except OSError:
            if error is None:  # an earlier error is the one to report
                raise
        finally:
            if self._trackers is not None:
                self._trackers.close(failed=error is not None)

    @property
    def hangs(self) -> bool:
        """Whether the disk hangs, so that nothing can be written any more."""
        return self._file is not None and self._file.hangs

    def say(self, message: str) -> None:
        """Print a line above the progress line."""
        self._progress.say(message)

    def step(self, step: int, metrics: Metrics, evaluation: Evaluation | None = None) -> None:
        """Add a dispatched step, and log the steps that have finished.

        Raises:
            OSError: an earlier step could not be written.
            DivergedError: too many steps in a row were skipped, or a loss is a spike that must stop the run.
        """
        for record in self._queue.push(step, metrics, evaluation):
            self._take(record)

    def drain(self) -> None:
        """Wait for all dispatched steps, and until they are written.

        Raises:
            OSError: they cannot be written.
            DivergedError: too many steps in a row were skipped, or a loss is a spike that must stop the run.
        """
        for record in self._queue.drain():
            self._take(record)
        if self._file is not None:
            self._file.flush()

    def restart_clock(self) -> None:
        """Exclude the time since the last step from the time of the next."""
        self._queue.restart_clock()

    def _take(self, record: StepRecord) -> None:
        values = self._complete(record)
        self.last = values
        if self._file is not None:
            self._file.write(record.step, values)
        if self._trackers is not None:
            self._trackers.write(record.step, values)
        self._progress.show(record.step, values)
        if why := self._divergence(record.step, values):
            # The last but one of the steps that were not skipped: the last may have broken the weights.
            raise DivergedError(why, good=record.step - int(values["skipped_in_row"]) - 1)

    def _divergence(self, step: int, values: dict[str, float]) -> str | None:
        """Why the run must stop at this step; None if it need not."""
        settings, in_row = self._settings, int(values["skipped_in_row"])
        if settings.on_spike == "stop" and values.get("spike"):
            return (
                f"the loss of step {step} is a spike: {values['loss']:.4g}, above {values['loss_limit']:.4g} "
                "(train.spike_deviations); it did not change the parameters"
            )
        if in_row < settings.max_skips:
            return None
        what = "not finite, or the loss a spike," if settings.spike_deviations else "not finite"
        return (
            f"the loss or gradient was {what} in {in_row} steps in a row, from step {step - in_row + 1} on; "
            "none of them changed the parameters"
        )

    def _complete(self, record: StepRecord) -> dict[str, float]:
        """A step's values, with those that follow from its numbers and its time."""
        values, seconds = dict(record.values), max(record.seconds, 1e-9)
        updates = record.step - 1 - self.skipped
        self.skipped += int(values["skipped"])
        # Rows of packed documents have fewer tokens with a loss than positions.
        tokens = values.get("tokens", self._costs.tokens)
        values |= {
            "learning_rate": float(self._rates[min(updates, len(self._rates) - 1)]),
            "step_seconds": record.seconds,
            "tokens_per_second": tokens / seconds,
            "skipped_total": float(self.skipped),
            "memory_bytes": float(memory_in_use()),
        }
        if self._peak is not None:
            flops = self._costs.flops * tokens / self._costs.tokens
            values["mfu"] = flops / seconds / (self._peak * self._costs.devices)
        if self._costs.internode_bytes is not None:
            values["internode_bytes"] = self._costs.internode_bytes
        return values
