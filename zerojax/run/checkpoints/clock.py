"""Training time, and when a checkpoint is due by it."""

import time
from collections.abc import Callable


class TrainingClock:
    """How long a run has trained, by a monotonic clock: setting the machine's time changes nothing."""

    def __init__(
        self, seconds: float = 0.0, *, minutes: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start counting.

        Args:
            seconds: of training before this start of the run.
            minutes: between saves; 0 for never.
            clock: a monotonic clock, in seconds.
        """
        self._clock = clock
        self._begun = clock() - seconds
        self._minutes = minutes
        self._saved = clock()

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self._clock() - self._begun

    @property
    def wants_save(self) -> bool:
        """Whether a save is due since the last one, or since the start."""
        return self._minutes > 0 and self._clock() - self._saved >= self._minutes * 60

    def saved(self) -> None:
        """Restart the interval: a checkpoint was saved now."""
        self._saved = self._clock()
