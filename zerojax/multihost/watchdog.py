"""Ends a hung run, after dumping the stacks of its threads."""

import faulthandler
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

from zerojax import terminal
from zerojax.multihost.background import attempt

# The number of recent steps for the median duration, and the fewest that give one.
_RECENT, _ENOUGH = 20, 4
# Seconds between checks, and the delay of a check that shows that this process itself was paused.
_LOOK, _LATE = 0.25, 5.0
# Seconds to write the stacks, because the run may be stuck on its disk.
_DUMP = 5.0


class Watchdog:
    """A thread that notices when the training loop hangs.

    The cause may be this process, or another process that it waits for. A process cannot tell which, so every
    process dumps its stacks.

    Args:
        stuck: called once, in the watchdog's thread, with a line that names the late step or phase.
        phase_timeout: seconds for a phase other than a step; 0 for no limit.
        step_timeout: seconds that any step may take.
        step_factor: a step may take this multiple of the median of recent steps, if that is longer; 0 for no
            limit.
        clock: returns the time in seconds. It must not be the wall clock, which may jump.
    """

    def __init__(
        self,
        stuck: Callable[[str], object],
        *,
        phase_timeout: float = 0.0,
        step_timeout: float = 0.0,
        step_factor: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stuck = stuck
        self._phase_timeout = phase_timeout
        self._step_timeout = step_timeout
        self._step_factor = step_factor
        self._clock = clock
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._what: str | None = None
        self._is_step = False
        self._since = self._limit = 0.0
        self._looked = clock()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._end.set()

    def step(self, number: int) -> None:
        """Note that a step begins, and that the previous step or phase is done.

        The first steps of a process have a phase's limit, because they compile, or wait for processes that
        do.
        """
        self._begin(f"step {number}", is_step=True)

    def phase(self, what: str, more: float = 0.0) -> None:
        """Note that a phase other than a step begins, and that the previous step or phase is done.

        It may take ``more`` seconds beyond a phase's limit.
        """
        self._begin(what, more)

    def _begin(self, what: str, more: float = 0.0, *, is_step: bool = False) -> None:
        now = self._clock()
        with self._lock:
            if self._is_step:
                self._recent.append(now - self._since)
            self._what, self._is_step, self._since = what, is_step, now
            self._limit = self._phase_timeout and self._phase_timeout + more
            if is_step and len(self._recent) >= _ENOUGH:
                factor = self._step_factor
                self._limit = factor and max(self._step_timeout, factor * median(self._recent))

    def look(self) -> str | None:
        """A line about a late step or phase; None if none is late."""
        now = self._clock()
        with self._lock:
            if now - self._looked > _LATE:  # this process was paused, which does not count
                self._since += now - self._looked
            self._looked = now
            taken = now - self._since
            if self._what is None or not self._limit or taken <= self._limit:
                return None
            known = self._is_step and self._recent
            usual = f"; recent ones took {median(self._recent):.3g} s" if known else ""
            return f"{self._what} has taken {taken:.3g} s{usual}: ending"

    def _watch(self) -> None:
        while not self._end.wait(_LOOK):
            if (line := self.look()) is not None:
                self._stuck(line)
                return


def dump_stacks(path: Path) -> str:
    """Write the stacks of this process's threads to a file. Returns a clause that names it, for a message."""

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            faulthandler.dump_traceback(file)

    try:
        if not attempt(write, _DUMP):
            return "; the stacks could not be written: the disk does not respond"
    except OSError as error:
        return f"; the stacks could not be written: {error.strerror}"
    return f"; the stacks of its threads are in {path}"


def end_alone(path: Path, line: str) -> None:
    """End this stuck process, which has no peers, with exit code 1."""
    terminal.last_words(f"zerojax: {line}{dump_stacks(path)}\n")
    os._exit(1)
