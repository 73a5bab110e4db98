"""A pipe whose reader has stopped."""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress


@contextmanager
def full_pipe() -> Generator[tuple[int, int]]:
    """The ends of a pipe, to read and to write, that is full: whoever writes to it is blocked."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        for size in (1 << 16, 1):
            with suppress(BlockingIOError):
                while True:
                    os.write(writer, b"\n" * size)
        os.set_blocking(writer, True)
        yield reader, writer
    finally:
        os.close(reader)
        with suppress(OSError):
            os.close(writer)
