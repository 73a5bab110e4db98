"""How long a restart by ``zerojax launch`` takes, from a loss or an arrival to the next new step."""

import os
import time
from collections.abc import Callable
from typing import Self

from zerojax.multihost.hosts import Cause, Event

VARIABLE = "ZEROJAX_LOST"
"""When the cause was noticed and when all had ended, in seconds of the host's monotonic clock, and the cause:
"12.5 13.0 lost rank 1" or "12.5 13.0 arrived host 1".
"""
_FIRST = {Event.LOST: "to end the others", Event.ARRIVED: "until all had saved"}


def variable(noticed: float, cause: Cause) -> dict[str, str]:
    """The environment variable of a restart that begins now."""
    return {VARIABLE: f"{noticed} {time.monotonic()} {cause.event} {cause.who}"}


class Recovery:
    """The phases of a restart.

    Attributes:
        seconds: the seconds of each phase that has ended.
    """

    def __init__(
        self, noticed: float, ended: float, cause: Cause, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cause = cause
        self.seconds = {_FIRST[cause.event]: ended - noticed}
        self._last, self._clock = ended, clock
        self._steps = 0

    @classmethod
    def find(cls) -> Self | None:
        """The restart that has started this process; None if none has. Later calls return None."""
        if (found := os.environ.pop(VARIABLE, None)) is None:
            return None
        noticed, ended, event, who = found.split(maxsplit=3)
        return cls(float(noticed), float(ended), Cause(Event(event), who))

    def end(self, phase: str) -> None:
        """End a phase, which began with the end of the last one."""
        now = self._clock()
        self.seconds[phase] = now - self._last
        self._last = now

    def is_new(self, step: int, reached: int) -> bool:
        """Whether a step that was taken is new; ``reached`` is the last one before the loss."""
        if not self._steps:
            self.end("to take a step")
        self._steps += 1
        if (repeated := self._steps - 1) and step > reached:
            self.end(f"to repeat {repeated} step{'s' if repeated > 1 else ''}")
        return step > reached

    def __str__(self) -> str:
        phases = ", ".join(f"{seconds:.1f} s {phase}" for phase, seconds in self.seconds.items())
        return f"a new step {sum(self.seconds.values()):.1f} s after {self._cause}: {phases}"
