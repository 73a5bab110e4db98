"""Standard output and error that do not block their writers.

A terminal, pager or pipe whose reader has stopped blocks every process that writes to it. Here a thread
writes. While it is blocked, lines wait in a queue. Lines that find the queue full are dropped and counted,
and the next line that finds room says how many. Streams that replace the process's own, as in notebooks, are
written to directly.
"""

import atexit
import io
import os
import select
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Literal, TextIO

# The most texts that wait for a reader.
_MAX_LINES = 1000
# Seconds that a writer waits until its text is written, unless the stream is known to be blocked.
_PATIENCE = 0.1
# Seconds that the end of the process waits for a reader.
_AT_END = 5.0
# Seconds that each stream may take before ``os._exit``.
_LAST = 2.0


class Terminal(io.TextIOBase):
    """The current ``sys.stdout`` or ``sys.stderr``; see the module.

    Attributes:
        descriptor: the file descriptor of the stream with which the process began.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self.descriptor = {"stdout": 1, "stderr": 2}[name]
        self._name = name
        self._texts: deque[bytes] = deque()  # the first is being written
        self._taken = self._written = self._dropped = 0
        self._held_up = False
        self._error: OSError | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def _stream(self) -> TextIO | None:
        stream = getattr(sys, self._name)
        # rich's progress line replaces both streams, and itself writes to standard output through this
        # object.
        return getattr(stream, "rich_proxied_file", stream) if self._name == "stdout" else stream

    @property
    def encoding(self) -> str:  # pyrefly: ignore[bad-override]
        """The stream's encoding."""
        return "utf-8" if self._stream is None else self._stream.encoding

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        """Write a text, queue it or drop it.

        Raises:
            OSError: it cannot be written, for example because the reader has exited.
        """
        stream = self._stream
        if stream is getattr(sys, f"__{self._name}__"):
            self.put(text.encode(self.encoding, "backslashreplace"))
        elif stream is not None:
            stream.write(text)
            stream.flush()
        return len(text)

    def put(self, text: bytes, patience: float = _PATIENCE) -> None:
        """Write bytes to the stream with which the process began.

        If they are not written after ``patience`` seconds, later texts queue without waiting.

        Raises:
            OSError: as for ``write``.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if len(self._texts) >= _MAX_LINES:
                self._dropped += text.count(b"\n")
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
                atexit.register(self.drain, _AT_END)
            self._texts.append(self._count() + text)
            self._taken += 1
            own = self._taken
            self._changed.notify_all()
            if not self._held_up:
                self._held_up = not self._wait(patience, own)
            if self._error is not None:
                raise self._error

    def drain(self, seconds: float) -> None:
        """Wait until all texts so far are written, for at most so many seconds."""
        with self._changed:
            if count := self._count():
                self._texts.append(count)
                self._taken += 1
                self._changed.notify_all()
            self._wait(seconds, self._taken)

    def _count(self) -> bytes:
        """The line about dropped lines, if any were dropped."""
        dropped, self._dropped = self._dropped, 0
        return f"zerojax: {dropped:,} lines dropped: nobody read them\n".encode() if dropped else b""

    def _wait(self, seconds: float, number: int) -> bool:
        """Wait until this many texts are written; False if that takes longer."""
        return self._changed.wait_for(lambda: self._written >= number or self._error is not None, seconds)

    def _run(self) -> None:
        """Write the texts; runs in its own thread."""
        while self._error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                text = self._texts[0]
            error = None
            try:
                _write(self.descriptor, text)
            except OSError as failure:
                error = failure
                error.filename = {"stdout": "standard output", "stderr": "standard error"}[self._name]
            with self._changed:
                self._texts.popleft()
                self._written += 1
                self._held_up = self._held_up and bool(self._texts)
                self._error = error
                self._changed.notify_all()


def _write(descriptor: int, text: bytes) -> None:
    while text:
        try:
            text = text[os.write(descriptor, text) :]
        except BlockingIOError:  # another process has made the terminal non-blocking
            select.select([], [descriptor], [])


stdout, stderr = Terminal("stdout"), Terminal("stderr")


def last_words(text: str) -> None:
    """Write a text, and everything that is still buffered or queued, before ``os._exit``."""
    # Flushing Python's own buffer may block, too.
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(_LAST)
    with suppress(OSError):
        stderr.put(text.encode(errors="backslashreplace"))
    for terminal in (stdout, stderr):
        terminal.drain(_LAST)
