"""Asynchronous transfer of metrics from the device.

A training step returns at once, with metrics that are still being computed. The queue starts their copies to
the host and reads a step's values only when ``depth`` newer steps have been dispatched, so that the device
always has a next step; it also keeps the host from running further ahead. A step ends when it is first seen
finished. On emulated devices, where a step returns when it is done, that is long before it is read.
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
        seconds: from the end of the previous step, or of the evaluation or save after it, to the end of this
            one.
    """

    step: int
    values: dict[str, float]
    seconds: float


Metrics = Mapping[str, jax.Array]
Evaluation = Callable[[], Metrics]


@dataclass
class _Dispatched:
    """A step that is not read yet, and when it was seen finished."""

    step: int
    metrics: Metrics
    end: float | None = None


class MetricsQueue:
    """Dispatched steps, oldest first.

    Args:
        depth: the most steps in flight.
        clock: gives the time in seconds.
    """

    def __init__(self, depth: int = 2, clock: Callable[[], float] = time.perf_counter) -> None:
        self._depth = depth
        self._clock = clock
        self._waiting: deque[_Dispatched] = deque()
        self._last = clock()

    def push(self, step: int, metrics: Metrics, evaluation: Evaluation | None = None) -> list[StepRecord]:
        """Add a step; return the steps more than ``depth`` behind it.

        Args:
            step: its number.
            metrics: scalar arrays of the training step.
            evaluation: computes further scalar arrays after the step. It is called once the step has
                finished, so that the two are timed separately.
        """
        for value in metrics.values():
            value.copy_to_host_async()
        self._waiting.append(_Dispatched(step, metrics))
        self._note_ends()
        if evaluation is None:
            return list(self._pop_until(self._depth))
        *records, last = self.drain()
        last = replace(last, values=last.values | _fetch(evaluation()))
        self.restart_clock()
        return [*records, last]

    def drain(self) -> list[StepRecord]:
        """Wait for all steps in flight."""
        return list(self._pop_until(0))

    def restart_clock(self) -> None:
        """Exclude the time since the last step from the time of the next."""
        self._last = self._clock()

    def _pop_until(self, length: int) -> Iterator[StepRecord]:
        while len(self._waiting) > length:
            dispatched = self._waiting.popleft()
            values = _fetch(dispatched.metrics)
            end = self._clock() if dispatched.end is None else dispatched.end
            yield StepRecord(dispatched.step, values, end - self._last)
            self._last = end

    def _note_ends(self) -> None:
        now = self._clock()
        for dispatched in self._waiting:
            if dispatched.end is None and all(map(_is_ready, dispatched.metrics.values())):
                dispatched.end = now


def _fetch(metrics: Metrics) -> dict[str, float]:
    return {name: float(np.asarray(value)) for name, value in metrics.items()}


def _is_ready(value: jax.Array) -> bool:
    return value.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  (JAX's stub lacks it)
