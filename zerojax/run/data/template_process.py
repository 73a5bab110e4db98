"""Renders chat templates in a separate process with limits of time and memory."""

import atexit
import json
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

from zerojax.run.data import template_worker
from zerojax.run.data.formats import DataError
from zerojax.validation.untrusted import printable

Ranges = tuple[tuple[int, int], ...]


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    requests: socket.socket
    responses: BinaryIO


class TemplateProcess:
    """A process that renders texts. It starts on first use, and again after it has ended.

    It ends with this process, or when the time for a text is over.

    Args:
        seconds: computing time that a text may take.
        memory: bytes that the process may use; only Linux enforces this.
    """

    def __init__(self, seconds: float = 10.0, memory: int = 1 << 30) -> None:
        self._seconds = seconds
        self._memory = memory
        self._lock = Lock()
        self._worker: _Worker | None = None
        atexit.register(self.close)

    def render(self, source: str, every: Sequence[Mapping[str, Any]]) -> list[tuple[str, Ranges]]:
        """Texts by a template, and the ranges of the characters in its generation blocks.

        ``every`` has the variables of each text.
        """
        with self._lock:
            response = self._exchange(pickle.dumps((source, every), pickle.HIGHEST_PROTOCOL))
        if "error" in response:
            raise DataError(printable(response["error"]))
        texts = response["texts"]
        whole = texts[0][0]
        return [
            (whole[:text] if isinstance(text, int) else text, tuple((start, end) for start, end in ranges))
            for text, ranges in texts
        ]

    def close(self) -> int:
        """End the process; returns its exit code, which is negative for a signal."""
        worker, self._worker = self._worker, None
        if worker is None:
            return 0
        worker.requests.close()
        worker.responses.close()
        worker.process.kill()
        return worker.process.wait()

    def _exchange(self, request: bytes) -> dict[str, Any]:
        try:
            worker = self._worker = self._worker or self._start()
            worker.requests.sendall(request)
            line = worker.responses.readline()
        except OSError:  # it has ended
            line = b""
        except BaseException:
            self.close()  # the next request would read this one's response
            raise
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self.close()
        if code == -signal.SIGPROF:
            raise DataError(
                f"one text takes it more than {self._seconds:g} s: set data.chat_template to another template"
            )
        raise DataError(f"the process that renders it has ended (exit code {code})")

    def _start(self) -> _Worker:
        program = [sys.executable, "-P", template_worker.__file__, str(self._seconds), str(self._memory)]
        ours, theirs = socket.socketpair()
        with theirs:
            end = theirs.fileno()
            process = subprocess.Popen(
                program, stdin=end, stdout=end, stderr=subprocess.DEVNULL, start_new_session=True
            )
        return _Worker(process, ours, ours.makefile("rb"))
