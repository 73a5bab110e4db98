"""Proxies that carry JAX's coordination traffic inside the connections between the processes.

JAX's client in each process, and its service in rank 0, each see a Unix socket in a folder that only the user
can open. Between the two, the bytes travel as frames over the process's connection to rank 0. This needs no
further port or handshake. JAX's service would let anybody abort the job, but only the job's processes reach
it. The client's socket stays open when rank 0 dies. JAX would abort the process over a closed connection,
while ``zerojax.multihost.peers`` ends it with a message.
"""

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zerojax.multihost.peers.messages import Connection

_PIECE_BYTES = 1 << 16

# Seconds between attempts to reach JAX's service, which may not be up yet, or have a full queue.
_PAUSE = 0.05


class ClientProxy:
    """Stands in for the service towards JAX's client in this process, over a connection to rank 0."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None  # to JAX's client, which connects once

    async def open(self, path: str) -> None:
        """Listen at a Unix socket.

        Raises:
            OSError: the socket cannot be created.
        """
        self._server = await asyncio.start_unix_server(self._accept, path)

    def close(self) -> None:
        """Close the connection to JAX's client."""
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.close()

    def deliver(self, piece: bytes) -> None:
        """Pass on bytes from the service. HTTP/2's flow control bounds the number of buffered bytes."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(piece)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            writer.close()
            return
        self._writer = writer
        # Python 3.12 logs an error if a handler is cancelled.
        with suppress(OSError, asyncio.CancelledError):
            await _forward(reader, self._connection)
            await self._connection.send_piece(b"")


class ServiceProxy:
    """Stands in for one process's JAX client towards the service, at a Unix socket, in rank 0.

    It connects when the process first sends bytes.
    """

    def __init__(self, path: str, connection: Connection) -> None:
        self._path = path
        self._connection = connection
        self._pieces = asyncio.Queue[bytes]()
        self._task: asyncio.Task[None] | None = None

    def deliver(self, piece: bytes) -> None:
        """Pass on bytes from a client, none at their end. HTTP/2's flow control bounds the waiting bytes."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._serve())
        if not self._task.done():
            self._pieces.put_nowait(piece)

    def close(self) -> None:
        """Close the connection to the service."""
        if self._task is not None:
            self._task.cancel()

    async def _serve(self) -> None:
        reader, writer = await self._connect()
        back = asyncio.ensure_future(_forward(reader, self._connection))
        try:
            while piece := await self._pieces.get():
                with suppress(OSError):  # the service has ended, and rank 0 ends soon
                    writer.write(piece)
                    await writer.drain()
        finally:
            back.cancel()
            writer.close()

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


async def _forward(reader: asyncio.StreamReader, connection: Connection) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            await connection.send_piece(piece)


@dataclass(frozen=True)
class Place:
    """This process's place in a job.

    Attributes:
        host: address of rank 0 for all processes.
        port: the port of rank 0.
        listen: the interface on which rank 0 listens; None for all.
        rank: of this process.
        size: number of processes of the job.
        token: the job's secret; empty if there is none.
        folder: for this process's Unix sockets. Only the user can open it.
    """

    host: str
    port: int
    listen: str | None
    rank: int
    size: int
    token: str
    folder: Path

    @property
    def service(self) -> str:
        """Path of the Unix socket of JAX's coordination service, in rank 0."""
        return str(self.folder / "service")

    @property
    def client(self) -> str:
        """Path of the Unix socket at which JAX's client in this process reaches the service."""
        return self.service if self.rank == 0 else str(self.folder / "client")
