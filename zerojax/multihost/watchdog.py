"""Ends a hung run, and writes down what each of its threads was doing."""

import faulthandler
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from zerojax.multihost.background import attempt

# Steps whose median says how long a step takes, and how many it takes to say so.
_RECENT, _ENOUGH = 20, 4
# Seconds between looks, and those after which a look was so late that this process itself had stood still.
_LOOK, _LATE = 0.25, 5.0
# Seconds in which the stacks have to be written: what the run is stuck in may be the disk.
_DUMP = 5.0


class Limits(NamedTuple):
    """How long things may take.

    Attributes:
        phase_timeout: seconds for anything but a step; 0 is for ever.
        step_timeout: seconds that any step may take.
        step_factor: times the median of recent steps that a step may take, if that is longer; 0 is for ever.
    """

    phase_timeout: float
    step_timeout: float
    step_factor: float


class Watchdog:
    """A thread that notices when the training loop hangs.

    The cause may be this process or another one that it waits for. They look the same from here, so every
    process dumps its stacks.
    """

    def __init__(
        self,
        limits: Limits,
        stuck: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is watched before `start`.

        Args:
            limits: how long things may take.
            stuck: called once, in the watching thread, with a line that says what takes how long.
            clock: gives the time in seconds; never the wall clock, which may jump.
        """
        self._limits = limits
        self._stuck = stuck
        self._clock = clock
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._what: str | None = None
        self._is_step = False
        self._since = self._limit = 0.0
        self._looked = clock()

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Watch no more."""
        self._end.set()

    def step(self, number: int) -> None:
        """A step begins, and what came before is done.

        The first steps of a process compile, or wait for others that do: they are a phase.
        """
        self._begin(f"step {number}", is_step=True)

    def phase(self, what: str) -> None:
        """Something other than a step begins, and what came before is done."""
        self._begin(what, is_step=False)

    def _begin(self, what: str, *, is_step: bool) -> None:
        limits, now = self._limits, self._clock()
        with self._lock:
            if self._is_step:
                self._recent.append(now - self._since)
            self._what, self._is_step, self._since = what, is_step, now
            self._limit = limits.phase_timeout
            if is_step and len(self._recent) >= _ENOUGH:
                factor = limits.step_factor
                self._limit = factor and max(limits.step_timeout, factor * median(self._recent))

    def look(self) -> str | None:
        """What takes too long, in a line; None as long as all is well."""
        now = self._clock()
        with self._lock:
            if now - self._looked > _LATE:  # stopped, or asleep: that was nobody's work
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
    """Write what each thread of this process is doing; return the rest of a line that says where."""

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            faulthandler.dump_traceback(file)

    try:
        if not attempt(write, _DUMP):
            return "; the stacks could not be written: the disk does not answer"
    except OSError as error:
        return f"; the stacks could not be written: {error.strerror}"
    return f"; what each thread was doing is in {path}"


def end_alone(path: Path, line: str) -> None:
    """End this process, which has no peers, because it is stuck; exit code 1."""
    os.write(2, f"zerojax: {line}{dump_stacks(path)}\n".encode())
    os._exit(1)
