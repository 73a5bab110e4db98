"""SIGTERM and SIGINT: the first request asks a run to stop, the second one ends it at once.

The launcher sends ``JOIN`` if a node waits to join. The run then stops as after one SIGTERM.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Self

from zerojax import terminal
from zerojax.log import logger

JOIN = signal.SIGURG
"""Asks a run to save and end. By default it does nothing, so a process that cannot save yet goes on."""

# Seconds that a run trains before it ends for a host. So hosts that fail again and again as they join cannot
# stop the job, and hosts that arrive together join together.
_TRAINS_FIRST = 10.0

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds to record the end of a process on disk.
_PATIENCE = 2.0
# Signals within this many seconds are one request. A terminal signals a whole process group. `timeout` and
# other parents also forward the signal to their child, which then gets it twice.
ONE_REQUEST = 0.5


class Requests:
    """Tells whether a signal is a new request to stop."""

    def __init__(self) -> None:
        self._last = -ONE_REQUEST

    def is_new(self) -> bool:
        """Whether the signal that has just arrived is a new request."""
        now = time.monotonic()
        new = now - self._last >= ONE_REQUEST
        if new:
            self._last = now
        return new


class StopRequest:
    """Whether a signal has asked this process to stop; a context manager, inactive outside the main thread.

    Python runs signal handlers between two instructions of the main thread, and not while it waits for a
    step. So the C-level handler writes the signal numbers to a socket, and a separate thread reads them.

    The second request ends the process, after calling ``note`` with the reason.
    """

    def __init__(self, note: Callable[[str], None] = lambda reason: None) -> None:
        self._received = threading.Event()
        self._trains_until = 0.0
        self._note = note

    @property
    def received(self) -> bool:
        """Whether a signal has arrived."""
        return self._received.is_set()

    def __enter__(self) -> Self:
        self._trains_until = time.monotonic() + _TRAINS_FIRST
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._before: dict[int, Any] = {n: signal.signal(n, lambda *_: None) for n in (*_SIGNALS, JOIN)}
            self._fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._listen, daemon=True, name="signals")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            signal.set_wakeup_fd(self._fd)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._writer.close()
            self._thread.join()
            self._reader.close()

    def _listen(self) -> None:
        requests, asked = Requests(), False
        while number := self._reader.recv(1):
            name = signal.Signals(number[0]).name
            if number[0] == JOIN and not self.received and time.monotonic() > self._trains_until:
                self._received.set()
                logger.warning("a host arrived: saving after this step, to start again with it")
            if number[0] not in _SIGNALS or not requests.is_new():
                continue
            if asked:
                self._end(number[0], f"{name} again: ending at once")
            asked = True
            self._received.set()
            logger.warning("%s: saving after this step; once more ends at once", name)

    def _end(self, number: int, reason: str) -> NoReturn:
        noting = threading.Thread(target=self._note, args=(reason,), daemon=True)
        noting.start()
        noting.join(_PATIENCE)
        terminal.last_words(f"zerojax: {reason}\n")
        os._exit(128 + number)
