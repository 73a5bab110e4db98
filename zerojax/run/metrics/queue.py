"""Metrics that leave the device without anybody waiting for them.

A training step returns at once, with metrics that are promises. The queue starts their copies to the
host and looks at a step's values only when `depth` newer steps are on their way, so the device always
has its next step at hand; it also keeps the host from running further ahead than that.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np


@dataclass(frozen=True)
class StepRecord:
    """A finished step.

    Attributes:
        step: optimizer steps done, this one included.
        values: name -> number.
        seconds: from the end of the step before, or of what followed it, to the end of this one.
    """

    step: int
    values: dict[str, float]
    seconds: float


Metrics = Mapping[str, jax.Array]
Evaluation = Callable[[], Metrics]


class MetricsQueue:
    """Steps under way, oldest first."""

    def __init__(self, depth: int = 2, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start the clock of the first step.

        Args:
            depth: how many steps may be under way.
            clock: gives the time in seconds.
        """
        self._depth = depth
        self._clock = clock
        self._waiting: deque[tuple[int, Metrics]] = deque()
        self._last = clock()

    def push(self, step: int, metrics: Metrics, evaluation: Evaluation | None = None) -> list[StepRecord]:
        """Add a step; get back those that are more than `depth` behind it.

        Args:
            step: its number.
            metrics: scalar arrays of the training step.
            evaluation: gives more scalar arrays, of an evaluation after the step. It waits for the step,
                so that the time of neither is taken for the other's.
        """
        _start_copies(metrics)
        self._waiting.append((step, metrics))
        if evaluation is None:
            return list(self._pop_until(self._depth))
        *records, last = self.drain()
        last = replace(last, values=last.values | _fetch(evaluation()))
        self.restart_clock()
        return [*records, last]

    def drain(self) -> list[StepRecord]:
        """Wait for all steps under way."""
        return list(self._pop_until(0))

    def restart_clock(self) -> None:
        """Leave out of the next step's time what has passed since the last."""
        self._last = self._clock()

    def _pop_until(self, length: int) -> Iterator[StepRecord]:
        while len(self._waiting) > length:
            step, metrics = self._waiting.popleft()
            values = _fetch(metrics)
            now = self._clock()
            yield StepRecord(step, values, now - self._last)
            self._last = now


def _start_copies(metrics: Metrics) -> None:
    for value in metrics.values():
        value.copy_to_host_async()


def _fetch(metrics: Metrics) -> dict[str, float]:
    return {name: float(np.asarray(value)) for name, value in metrics.items()}
