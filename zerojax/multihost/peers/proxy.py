"""JAX's coordination traffic, carried inside the connections between the processes.

JAX's client in a process and its service in rank 0 each see a Unix socket in a folder that only the user can
open. Between the two its bytes travel as frames over the connection that the process has with rank 0 anyway:
so they need no port and no handshake of their own, and nobody but the job's processes reaches JAX's service,
which would let anybody abort the job. The client's socket stays open when rank 0 is gone: JAX would abort the
process over a connection that closes, and `zerojax.multihost.peers` ends it in better order.
"""

import asyncio
import socket
from contextlib import suppress

from zerojax.multihost.peers.messages import Connection, Piece

_PIECE = 1 << 16

# JAX's client has one connection, and another one after it should that break.
_MOST_STREAMS = 8

# Seconds before JAX's service is tried again: it may not be up yet, or have its queue full.
_PAUSE = 0.05


class ClientProxy:
    """Where JAX's client in this process finds the service."""

    def __init__(self, line: Connection) -> None:
        """Nothing is opened yet.

        Args:
            line: to the hub.
        """
        self._line = line
        self._writers: list[asyncio.StreamWriter] = []  # by the stream's number
        self._server: asyncio.Server | None = None

    async def open(self, path: str) -> None:
        """Listen at a Unix socket.

        Raises:
            OSError: it cannot be made.
        """
        self._server = await asyncio.start_unix_server(self._accept, path)

    def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    def deliver(self, piece: Piece) -> None:
        """Hand on what the service has sent; HTTP/2 bounds how much can come at once."""
        if piece.stream < len(self._writers) and not self._writers[piece.stream].is_closing():
            self._writers[piece.stream].write(piece.data)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = len(self._writers)
        self._writers.append(writer)
        # Python 3.12 complains of a handler that is cancelled.
        with suppress(OSError, asyncio.CancelledError):
            await _carry(reader, stream, self._line)
            await self._line.send_piece(Piece(stream, b""))


class ServiceProxy:
    """One process's connections to JAX's service; in rank 0."""

    def __init__(self, path: str, line: Connection) -> None:
        """Nothing is opened before the process sends something.

        Args:
            path: the Unix socket of JAX's service.
            line: to the process.
        """
        self._path = path
        self._line = line
        self._streams: dict[int, asyncio.Queue[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def deliver(self, piece: Piece) -> None:
        """Hand on what a client has sent; HTTP/2 bounds how much can come at once."""
        queue = self._streams.get(piece.stream)
        if queue is None:
            if not piece.data or len(self._streams) == _MOST_STREAMS:
                return
            queue = self._streams[piece.stream] = asyncio.Queue()
            task = asyncio.ensure_future(self._serve(piece.stream, queue))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        queue.put_nowait(piece.data)

    def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()

    async def _serve(self, stream: int, pieces: asyncio.Queue[bytes]) -> None:
        reader, writer = await self._connect()
        back = asyncio.ensure_future(_carry(reader, stream, self._line))
        try:
            while data := await pieces.get():
                with suppress(OSError):  # the service has ended, and rank 0 is about to
                    writer.write(data)
                    await writer.drain()
        finally:
            back.cancel()
            writer.close()
            del self._streams[stream]

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            service = socket.socket(socket.AF_UNIX)
            service.setblocking(False)
            try:
                service.connect(self._path)  # at once, or not at all
                return await asyncio.open_unix_connection(sock=service)
            except OSError:
                service.close()
                await asyncio.sleep(_PAUSE)


async def _carry(reader: asyncio.StreamReader, stream: int, line: Connection) -> None:
    with suppress(OSError):
        while data := await reader.read(_PIECE):
            await line.send_piece(Piece(stream, data))
