"""Bytes from one connection to another, both ways."""

import asyncio
from contextlib import suppress

_PIECE = 1 << 16

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def relay(near: Stream, far: Stream, *, hold: bool = False) -> None:
    """Join two connections until either ends.

    Args:
        near: the one that was accepted.
        far: the one that was made for it.
        hold: keep `near` open for good when `far` ends. Its owner, JAX's client, would abort the process
            over a connection that closes, and `zerojax.peers` ends it in better order.
    """
    back = asyncio.ensure_future(_copy(far[0], near[1]))
    forth = asyncio.ensure_future(_copy(near[0], far[1]))
    try:
        await asyncio.wait({back, forth}, return_when=asyncio.FIRST_COMPLETED)
        if hold and not forth.done():
            await forth
    finally:
        for task in (back, forth):
            task.cancel()
        for _, writer in (near, far):
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
