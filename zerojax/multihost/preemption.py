"""SIGTERM and SIGINT: the first one asks a run to stop, the second one ends it at once."""

import os
import signal
import socket
import sys
import threading
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether somebody has asked this process to stop.

    Python runs a signal's handler when the main thread is between two instructions, which it is not while it
    waits for a step. So a thread of its own reads the numbers that the system's handler writes to a socket.
    """

    def __init__(self) -> None:
        """Nothing happens before `with`; and in another thread than the main one nothing happens at all."""
        self._received = threading.Event()

    @property
    def received(self) -> bool:
        """Whether a signal has come."""
        return self._received.is_set()

    def __enter__(self) -> Self:
        """Take over both signals."""
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._before: dict[int, Any] = {n: signal.signal(n, lambda *_: None) for n in _SIGNALS}
            self._fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._listen, daemon=True, name="signals")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give both back."""
        if self._active:
            signal.set_wakeup_fd(self._fd)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._writer.close()
            self._thread.join()
            self._reader.close()

    def _listen(self) -> None:
        while number := self._reader.recv(1):
            name = signal.Signals(number[0]).name
            if number[0] not in _SIGNALS:
                continue
            if self.received:
                print(f"zerojax: {name} again: ending at once", file=sys.stderr, flush=True)
                os._exit(128 + number[0])
            self._received.set()
            print(
                f"zerojax: {name}: saving after this step; once more ends at once",
                file=sys.stderr,
                flush=True,
            )
