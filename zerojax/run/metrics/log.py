"""Everything that a step leaves behind: its record, made and spread without holding the next one up."""

from dataclasses import dataclass
from typing import Self

import jax
import numpy as np
from jaxtyping import Float

from zerojax.errors import DivergedError
from zerojax.run.config import RunConfig
from zerojax.run.metrics.devices import memory_in_use, peak_flops
from zerojax.run.metrics.files import MetricsFile
from zerojax.run.metrics.progress import Progress
from zerojax.run.metrics.queue import Evaluation, Metrics, MetricsQueue, StepRecord
from zerojax.run.run_dir import RunFolder
from zerojax.run.trackers import open_trackers


@dataclass(frozen=True)
class StepCosts:
    """What every step of a run takes, to say how fast it is.

    Attributes:
        tokens: of a step, over all devices.
        flops: of a step, over all devices, by the model's own count.
        devices: how many share them.
        internode_bytes: that one node sends to others in a step, where it is known.
    """

    tokens: int
    flops: float
    devices: int
    internode_bytes: float | None = None


class RunLog:
    """The records of one run: files on the first process, a progress line, a guard against NaN."""

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
        """Open the files and trackers, on the first process alone.

        Args:
            folder: the run's.
            config: its settings.
            learning_rates: by the number of updates done.
            costs: of a step.
            start: steps done before.
            skipped: those of them without an update.

        Raises:
            ZeroError: a tracker cannot start.
        """
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
        self._trackers = open_trackers(folder, config, start=start, say=self.say) if first else None

    def __enter__(self) -> Self:
        """Start the line and the clock."""
        self._progress.__enter__()
        self._queue.restart_clock()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the files; what is still under way is lost, unless `drain` was called."""
        self._progress.__exit__(kind, error, trace)
        try:
            if self._file is not None:
                self._file.close()
        except OSError:
            if error is None:  # else that is what is being told, or comes second
                raise
        finally:
            if self._trackers is not None:
                self._trackers.close(failed=error is not None)

    @property
    def hangs(self) -> bool:
        """Whether the disk has not answered for so long that the run was given up."""
        return self._file is not None and self._file.hangs

    def say(self, message: str) -> None:
        """Print a line above the progress."""
        self._progress.say(message)

    def step(self, step: int, metrics: Metrics, evaluation: Evaluation | None = None) -> None:
        """Take note of a step that was begun, and deal with those that are done.

        Raises:
            OSError: one that was done earlier could not be written down.
            DivergedError: too many steps in a row were skipped, or a loss is a spike that shall stop the run.
        """
        for record in self._queue.push(step, metrics, evaluation):
            self._take(record)

    def drain(self) -> None:
        """Deal with all steps that were begun, and wait until they are written down.

        Raises:
            OSError: they cannot be.
            DivergedError: too many steps in a row were skipped, or a loss is a spike that shall stop the run.
        """
        for record in self._queue.drain():
            self._take(record)
        if self._file is not None:
            self._file.flush()

    def restart_clock(self) -> None:
        """Leave out of the next step's time what has passed since the last."""
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
            # Of the steps that were not skipped the last but one: the last may have broken the weights.
            raise DivergedError(why, good=record.step - int(values["skipped_in_row"]) - 1)

    def _divergence(self, step: int, values: dict[str, float]) -> str | None:
        """Why a run should go no further than this step; None where it should."""
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
        """A step's record with what follows from its numbers and its time."""
        values, seconds = dict(record.values), max(record.seconds, 1e-9)
        updates = record.step - 1 - self.skipped
        self.skipped += int(values["skipped"])
        # Rows of packed documents hold fewer tokens that count than they have places.
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
