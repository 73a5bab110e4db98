"""Who has been silent for too long."""

import time
from collections.abc import Callable, Iterable


class Pulse:
    """When each of some peers was last heard of.

    A pause of this process itself (stopped, swapped out, its machine asleep) is nobody else's silence:
    when `silent` is called later than it should be, everybody starts afresh.
    """

    def __init__(
        self, peers: Iterable[int], limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """All have just been heard of.

        Args:
            peers: their ranks.
            limit: seconds of silence that are too long.
            clock: gives the time in seconds; never the wall clock, which may jump.
        """
        self.limit = limit
        self.interval = limit / 6  # between calls of `silent`, and between signs of life
        self._clock = clock
        self._checked = clock()
        self._heard = dict.fromkeys(peers, self._checked)

    def hear(self, peer: int) -> None:
        """Note a sign of life."""
        self._heard[peer] = self._clock()

    def forget(self, peer: int) -> None:
        """Expect no more of a peer."""
        self._heard.pop(peer, None)

    def silent(self) -> list[int]:
        """The peers of whom nothing was heard for `limit` seconds; to be called every `interval`."""
        now, before = self._clock(), self._checked
        self._checked = now
        if now - before > 2 * self.interval:
            self._heard = dict.fromkeys(self._heard, now)
        return [peer for peer, heard in self._heard.items() if now - heard > self.limit]
