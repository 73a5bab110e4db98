"""Timeouts of heartbeats."""

import time
from collections.abc import Callable, Iterable


class Heartbeat:
    """The time of the last message from each of some peers.

    If this process itself was paused (stopped, swapped out, machine asleep), ``silent`` is called late. Then
    all timers start again, because the process may have missed messages.

    At the start all peers count as just heard. ``limit`` seconds of silence are too long. The clock must not
    be the wall clock, which may jump.
    """

    def __init__(
        self, peers: Iterable[int], limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.interval = limit / 6  # between calls of `silent`, and between heartbeats
        self._clock = clock
        self._checked = clock()
        self._heard = dict.fromkeys(peers, self._checked)

    def hear(self, peer: int) -> None:
        """Record a message from a peer."""
        self._heard[peer] = self._clock()

    def forget(self, peer: int) -> None:
        """Stop watching a peer."""
        self._heard.pop(peer, None)

    def silent(self) -> list[int]:
        """The peers that sent nothing for ``limit`` seconds. It must be called every ``interval``."""
        now, before = self._clock(), self._checked
        self._checked = now
        if now - before > 2 * self.interval:
            self._heard = dict.fromkeys(self._heard, now)
        return [peer for peer, heard in self._heard.items() if now - heard > self.limit]
