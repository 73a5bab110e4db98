"""Progress of the preparation of data, a line every ten seconds."""

import time
from collections.abc import Callable

from zerojax.formatting import size

_SECONDS = 10.0


class TextProgress:
    """Counts bytes and tokens, and prints a line every ten seconds."""

    def __init__(self, task: str, say: Callable[[str], None]) -> None:
        self._task = task
        self._say = say
        self._bytes = self._tokens = 0
        self._start = self._said = time.monotonic()

    def add(self, text_bytes: int, tokens: int = 0) -> None:
        """Count more bytes of text, and the tokens made of them."""
        self._bytes += text_bytes
        self._tokens += tokens
        now = time.monotonic()
        if now - self._said < _SECONDS:
            return
        self._said = now
        made = f", {self._tokens / 1e6:,.1f}M tokens" if self._tokens else ""
        seconds = now - self._start
        self._say(f"{self._task}: {size(self._bytes)} of text{made} in {seconds:.0f} s")
