"""Asynchronous transfer of metrics from the device.

A training step returns at once, with metrics that are still being computed. The queue starts copying them to
the host. It reads a step's values only when ``depth`` newer steps have been dispatched, so the device always
has a next step, and the host does not run further ahead. A thread waits for each step and records when it
ends, because the host may look much later: it also evaluates, saves and makes rollouts.

With local updates a step's metrics may arrive with the next step (``zerojax.train.step.reports_later``). They
are read then. Draining the queue also waits for them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from zerojax.multihost.background import Worker


@dataclass(frozen=True)
class StepRecord:
    """The values of a finished step, by name, and its time.

    ``step`` counts this one. ``seconds`` is the time since the end of the previous step, or of the evaluation
    or save after it.
    """

    step: int
    values: dict[str, float]
    seconds: float


Metrics = Mapping[str, jax.Array]
Evaluation = Callable[[], Metrics]


@dataclass
class _Dispatched:
    """A step that is not read yet, with its metrics or a function that computes them, and when it ended."""

    step: int
    metrics: Metrics | Evaluation
    end: Future[float] = field(default_factory=Future)


class MetricsQueue:
    """Dispatched steps, oldest first; at most ``depth`` are in flight."""

    def __init__(self, depth: int = 2, clock: Callable[[], float] = time.perf_counter) -> None:
        self._depth = depth
        self._clock = clock
        self._waiting: deque[_Dispatched] = deque()
        self._last = clock()
        self._ends = Worker("ends of steps", most=depth + 2)

    def push(
        self,
        step: int,
        metrics: Metrics,
        evaluation: Evaluation | None = None,
        own: Evaluation | None = None,
    ) -> list[StepRecord]:
        """Add a step; return the steps more than ``depth`` behind it.

        Args:
            step: the step's number.
            metrics: the step's metrics; with ``own``, the previous step's.
            evaluation: computes further scalars after the step. It is called when the step has finished, so
                that the two are timed separately.
            own: computes this step's metrics if ``metrics`` are the previous step's. It is called only if
                they are needed before the next step brings them.
        """
        for value in metrics.values():
            value.copy_to_host_async()
        if own is not None and self._waiting:
            self._waiting[-1].metrics = metrics
        dispatched = _Dispatched(step, metrics if own is None else own)
        self._waiting.append(dispatched)
        self._ends.put(lambda: self._note_end(dispatched, metrics))
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

    def close(self) -> None:
        """End the thread; steps in flight are lost."""
        self._ends.close()

    def _pop_until(self, length: int) -> Iterator[StepRecord]:
        while len(self._waiting) > length:
            dispatched = self._waiting.popleft()
            metrics = dispatched.metrics
            values, end = _fetch(metrics() if callable(metrics) else metrics), dispatched.end.result()
            yield StepRecord(dispatched.step, values, end - self._last)
            self._last = end

    def _note_end(self, dispatched: _Dispatched, results: Metrics) -> None:
        with suppress(Exception):  # reading the step raises its error
            jax.block_until_ready(results)
        dispatched.end.set_result(self._clock())


def _fetch(metrics: Metrics) -> dict[str, float]:
    return {name: float(np.asarray(value)) for name, value in metrics.items()}
