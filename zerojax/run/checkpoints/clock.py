"""When a checkpoint is due by time."""

import time
from collections.abc import Callable


class TrainingClock:
    """How long a run has trained; knows no calendar, so setting the machine's time changes nothing."""

    def __init__(
        self, seconds: float = 0.0, *, minutes: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start to count.

        Args:
            seconds: trained before this start of the run.
            minutes: between saves; 0 is never.
            clock: gives seconds, and never goes back.
        """
        self._clock = clock
        self._begun = clock() - seconds
        self._minutes = minutes
        self._saved = clock()

    @property
    def seconds(self) -> float:
        """Of training so far."""
        return self._clock() - self._begun

    @property
    def wants_save(self) -> bool:
        """Whether the last save, or the start, is long enough ago."""
        return self._minutes > 0 and self._clock() - self._saved >= self._minutes * 60

    def saved(self) -> None:
        """Count the minutes from now."""
        self._saved = self._clock()
