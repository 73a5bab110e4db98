"""Proxies that carry JAX's coordination traffic inside the connections between the processes.

JAX's client in each process and its service in rank 0 each see a Unix socket in a folder that only the user
can open. Between the two, the bytes travel as frames over the process's connection to rank 0. This needs no
further port or handshake, and only the job's processes reach JAX's service, which would let anybody abort the
job. The client's socket stays open when rank 0 dies: JAX would abort the process over a closed connection,
whereas ``zerojax.multihost.peers`` ends it with a message.
"""

import asyncio
import socket
from contextlib import suppress

from zerojax.multihost.peers.messages import Connection, Piece

_PIECE = 1 << 16

# JAX's client opens one connection, and another if that breaks.
_MAX_STREAMS = 8

# Seconds between attempts to reach JAX's service: it may not be up yet, or its queue may be full.
_PAUSE = 0.05


class ClientProxy:
    """Stands in for the service towards JAX's client in this process, over a connection to rank 0."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._writers: list[asyncio.StreamWriter] = []  # by stream number
        self._server: asyncio.Server | None = None

    async def open(self, path: str) -> None:
        """Listen at a Unix socket.

        Raises:
            OSError: the socket cannot be created.
        """
        self._server = await asyncio.start_unix_server(self._accept, path)

    def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    def deliver(self, piece: Piece) -> None:
        """Pass on bytes from the service; HTTP/2's flow control bounds how many can be buffered."""
        if piece.stream < len(self._writers) and not self._writers[piece.stream].is_closing():
            self._writers[piece.stream].write(piece.data)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = len(self._writers)
        self._writers.append(writer)
        # Python 3.12 logs an error if a handler is cancelled.
        with suppress(OSError, asyncio.CancelledError):
            await _forward(reader, stream, self._connection)
            await self._connection.send_piece(Piece(stream, b""))


class ServiceProxy:
    """Stands in for one process's JAX client towards the service, in rank 0.

    Connects when the process first sends something.

    Args:
        path: of the Unix socket of JAX's service.
        connection: to the process.
    """

    def __init__(self, path: str, connection: Connection) -> None:
        self._path = path
        self._connection = connection
        self._streams: dict[int, asyncio.Queue[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def deliver(self, piece: Piece) -> None:
        """Pass on bytes from a client; HTTP/2's flow control bounds how many can be buffered."""
        queue = self._streams.get(piece.stream)
        if queue is None:
            if not piece.data or len(self._streams) == _MAX_STREAMS:
                return
            queue = self._streams[piece.stream] = asyncio.Queue()
            task = asyncio.ensure_future(self._serve(piece.stream, queue))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        queue.put_nowait(piece.data)

    def close(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()

    async def _serve(self, stream: int, pieces: asyncio.Queue[bytes]) -> None:
        reader, writer = await self._connect()
        back = asyncio.ensure_future(_forward(reader, stream, self._connection))
        try:
            while data := await pieces.get():
                with suppress(OSError):  # the service has ended, and rank 0 soon will
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
                service.connect(self._path)  # succeeds or fails at once
                return await asyncio.open_unix_connection(sock=service)
            except OSError:
                service.close()
                await asyncio.sleep(_PAUSE)


async def _forward(reader: asyncio.StreamReader, stream: int, connection: Connection) -> None:
    with suppress(OSError):
        while data := await reader.read(_PIECE):
            await connection.send_piece(Piece(stream, data))
