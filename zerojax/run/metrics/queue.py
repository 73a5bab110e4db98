"""Asynchronous transfer of metrics from the device.

A training step returns at once, with metrics that are still being computed. The queue starts their copies to
the host and reads a step's values only when ``depth`` newer steps have been dispatched, so that the device
always has a next step; it also keeps the host from running further ahead. A thread waits for each step, and
notes when it ends: the host, which evaluates, saves or makes rollouts, may look much later.

With local updates a step's metrics may come with the next one (``zerojax.train.step.reports_later``). They
are read then, or where the queue is drained, which waits for them.
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
    """A step that is not read yet, with its metrics or what computes them, and when it ended."""

    step: int
    metrics: Metrics | Evaluation
    end: Future[float] = field(default_factory=Future)


class MetricsQueue:
    """Dispatched steps, oldest first, of which at most ``depth`` are in flight."""

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

        ``evaluation`` computes further scalar arrays after the step. It is called once the step has finished,
        so that the two are timed separately. If ``metrics`` are those of the step before, ``own`` computes
        those of this one. It is called only if they are needed before the next step brings them. Metrics of a
        step that was read already, or was never pushed, are ignored.
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
        with suppress(Exception):  # whoever reads the step gets its error
            jax.block_until_ready(results)
        dispatched.end.set_result(self._clock())


def _fetch(metrics: Metrics) -> dict[str, float]:
    return {name: float(np.asarray(value)) for name, value in metrics.items()}
