"""Training time, and when a checkpoint is due by it."""

import time
from collections.abc import Callable


class TrainingClock:
    """Measures how long a run has trained.

    Its clock is monotonic, so setting the machine's time has no effect.
    """

    def __init__(
        self, seconds: float = 0.0, *, minutes: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start counting.

        Args:
            seconds: training time before this start of the run.
            minutes: minutes between saves; 0 for no saves by time.
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
