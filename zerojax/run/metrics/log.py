"""Logs steps to files, trackers and the progress line, without delaying the next step."""

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Self

import jax
import numpy as np
from jaxtyping import Float

from zerojax.analysis.gpus import GPUS
from zerojax.errors import DivergedError, RunError
from zerojax.run.metrics.files import MetricsFile
from zerojax.run.metrics.progress import Progress
from zerojax.run.metrics.queue import Evaluation, Metrics, MetricsQueue, StepRecord
from zerojax.run.run_dir import RunFolder
from zerojax.run.trackers import open_trackers

Listener = Callable[[int, Mapping[str, float]], object]

# Dense bf16 FLOP/s from data sheets, for chips that the planner's table lacks.
_OTHERS = {
    "A100": 312e12,
    "A800": 312e12,
    "GB200": 2.5e15,
    "H800": 989e12,
    "TPU v4": 275e12,
    "TPU v5": 197e12,
    "TPU v5p": 459e12,
    "TPU v6": 918e12,
}
_PEAK_BF16 = _OTHERS | {gpu.kind: gpu.flops for gpu in GPUS.values()}


class RunLog:
    """Logs the steps of a run and detects divergence. Only process zero writes files and prints.

    Args:
        folder: the run's folder; None writes no files.
        steps: steps of the whole run.
        max_skips: the run has diverged after this many skipped steps in a row.
        spikes: the effect of a spike of the loss: none, a skipped step, or the end of the run.
        every: steps between progress lines if the output is not a terminal.
        trackers: names of trackers, which need a folder; ``project`` and ``settings`` are for them.
        tokens: tokens of a step, over all devices, as long as its "tokens" do not count them.
        flops: model FLOPs of a step with ``tokens``, over all devices.
        devices: number of devices.
        internode_bytes: bytes that a node sends to others per step.
        learning_rates: by the number of updates done, if known.
        start: steps done before; ``skipped`` of them made no update.
        listener: called with each step's number and values, on every process.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        *,
        steps: int,
        max_skips: int,
        spikes: Literal["none", "skip", "stop"] = "none",
        every: int = 10,
        trackers: Sequence[str] = (),
        project: str = "zerojax",
        settings: Mapping[str, Any] = MappingProxyType({}),
        tokens: int | None = None,
        flops: float | None = None,
        devices: int = 1,
        internode_bytes: float | None = None,
        learning_rates: Float[np.ndarray, " steps"] | None = None,
        start: int = 0,
        skipped: int = 0,
        listener: Listener | None = None,
    ) -> None:
        first = jax.process_index() == 0
        self.skipped = skipped
        self.last: dict[str, float] = {}
        self._max_skips = max_skips
        self._spikes = spikes
        self._rates = learning_rates
        self._tokens, self._flops, self._internode_bytes = tokens, flops, internode_bytes
        peak = peak_flops(jax.local_devices()[0].device_kind)
        self._peak = None if peak is None else peak * devices
        self._listener = listener
        self._queue = MetricsQueue()
        self._progress = Progress(steps=steps, start=start, every=every, shown=first)
        self._file = self._trackers = None
        if first and folder is not None:
            self._file = MetricsFile(folder.metrics, start=start)
            self._trackers = open_trackers(folder, trackers, project, settings, start, self.say)

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
        except (OSError, RunError):
            if error is None:  # an earlier error is the one to report
                raise
        finally:
            if self._trackers is not None:
                self._trackers.close(failed=error is not None)

    @property
    def reached(self) -> int:
        """The last step of an earlier process, which this one may have to repeat; 0 without files."""
        return 0 if self._file is None else self._file.reached

    @property
    def hangs(self) -> bool:
        """Whether the disk hangs, so that nothing can be written."""
        return self._file is not None and self._file.hangs

    def say(self, message: str) -> None:
        """Print a line above the progress line."""
        self._progress.say(message)

    def step(
        self,
        step: int,
        metrics: Metrics,
        evaluation: Evaluation | None = None,
        own: Evaluation | None = None,
    ) -> None:
        """Add a dispatched step, and log the steps that have finished; arguments as ``MetricsQueue.push``.

        Raises:
            OSError, RunError: an earlier step could not be written.
            DivergedError: too many steps in a row were skipped, or a loss is a spike that must stop the run.
        """
        for record in self._queue.push(step, metrics, evaluation, own):
            self._take(record)

    def drain(self) -> None:
        """Wait until all dispatched steps have finished and are written.

        Raises:
            OSError, RunError: they cannot be written.
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
        if self._listener is not None:
            self._listener(record.step, values)
        if why := self._divergence(record.step, values):
            # The last but one of the steps with an update: the last update may have broken the weights.
            raise DivergedError(why, good=record.step - int(values["skipped_in_row"]) - 1)

    def _divergence(self, step: int, values: dict[str, float]) -> str | None:
        """The reason to stop the run at this step; None if there is none."""
        in_row = int(values["skipped_in_row"])
        if self._spikes == "stop" and values.get("spike"):
            return (
                f"the loss of step {step} is a spike: {values['loss']:.4g}, above {values['loss_limit']:.4g} "
                "(train.spike_deviations); it did not change the parameters"
            )
        if in_row < self._max_skips:
            return None
        what = "not finite" if self._spikes == "none" else "not finite, or the loss a spike,"
        return (
            f"the loss or gradient was {what} in {in_row} steps in a row, from step {step - in_row + 1} on; "
            "none of them changed the parameters"
        )

    def _complete(self, record: StepRecord) -> dict[str, float]:
        """A step's values, with the values that follow from its number and its time."""
        values, seconds = dict(record.values), max(record.seconds, 1e-9)
        updates = record.step - 1 - self.skipped
        self.skipped += int(values["skipped"])
        # In rows of packed documents not every position counts in the loss.
        tokens = values.get("tokens", self._tokens)
        if self._rates is not None:
            values["learning_rate"] = float(self._rates[min(updates, len(self._rates) - 1)])
        values["step_seconds"] = record.seconds
        if tokens is not None:
            values["tokens_per_second"] = tokens / seconds
            if self._peak is not None and self._flops is not None and self._tokens is not None:
                values["mfu"] = self._flops * tokens / self._tokens / seconds / self._peak
        values |= {"skipped_total": float(self.skipped), "memory_bytes": float(most_memory())}
        if self._internode_bytes is not None:
            values["internode_bytes"] = self._internode_bytes
        return values


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of a ``jax.Device.device_kind``; None if the chip is unknown."""
    names = [name for name in _PEAK_BF16 if name in device_kind]
    return _PEAK_BF16[max(names, key=len)] if names else None


def most_memory() -> int:
    """The peak of bytes in use on this process's fullest device; the process's own peak on CPUs.

    The peak is logged because at the time of logging, between steps, only the state is in memory.
    """
    most = [
        stats["peak_bytes_in_use"]
        for device in jax.local_devices()
        if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats
    ]
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes, Linux in KiB
    return max(most, default=unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
