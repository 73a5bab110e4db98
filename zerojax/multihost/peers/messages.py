"""Framing of the connection between two processes: JSON messages, and pieces of JAX's own traffic."""

import asyncio
import json
import socket
import struct
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from zerojax.validation import untrusted

# The largest message in bytes: many times the size of a config.
LIMIT = 1 << 20

# Characters shown of one value sent by a peer, and of a whole line.
SHORT, LONG = 200, 2000

# Seconds for sending buffered data when a connection is closed.
_LINGER = 1.0

# Silence before a probe, seconds between probes, how many; and milliseconds for sent data to arrive.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}

# Kind of frame, length of the payload in bytes.
_HEADER = struct.Struct(">BI")
_MESSAGE, _PIECE = 1, 2

Message = dict[str, Any]
Kind = Literal["refused", "absent", "lost", "failed", "stuck"]


@dataclass(frozen=True)
class Failure:
    """Why a job ends.

    Attributes:
        kind: "refused" (incompatible settings), "absent" (not all processes joined), "lost" (a process died
            or fell silent), "failed" (one raised an error), "stuck" (one hangs).
        rank: the process concerned; -1 for none in particular.
        why: one line for the user.
        code: the exit code of the process that failed; 0 if none did.
    """

    kind: Kind
    rank: int
    why: str
    code: int = 0

    def message(self) -> Message:
        """The message that reports it."""
        return {"say": "end", "failure": asdict(self)}

    @staticmethod
    def of(message: Message) -> "Failure | None":
        """Read a received message, made safe to print; None if it reports no valid failure."""
        match message.get("failure"):
            case {"kind": kind, "rank": int(rank), "why": str(why), "code": int(code)}:
                return Failure(kind, rank, printable(why), code) if kind in get_args(Kind) else None
        return None


class Connection:
    """One end of a connection between two processes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def address(self) -> str:
        """The other end's address, in brackets if it has colons."""
        host = str(self._writer.get_extra_info("peername")[0])
        return f"[{host}]" if ":" in host else host

    def keep_alive(self) -> None:
        """See ``keep_alive``."""
        keep_alive(self._writer.get_extra_info("socket"))

    def send(self, say: str, **more: Any) -> None:
        """Send a message without waiting: a process that does not read must not delay the others.

        A broken connection is noticed by its reader, not here.
        """
        self._write(_MESSAGE, json.dumps({"say": say, **more}).encode())

    async def send_piece(self, piece: bytes) -> None:
        """Send a piece of JAX's traffic, none at its end; wait while the connection is full.

        Raises:
            OSError: the connection is broken.
        """
        self._write(_PIECE, piece)
        await self._writer.drain()

    async def receive(self, limit: int = LIMIT) -> Message | bytes | None:
        """Receive the next frame.

        Args:
            limit: its greatest size in bytes.

        Returns:
            A message, or a piece of JAX's traffic; None if the connection has ended or the frame is invalid.
        """
        try:
            kind, size = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            if kind not in (_MESSAGE, _PIECE) or size > limit:
                return None
            data = await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError):
            return None
        return data if kind == _PIECE else parse(data)

    async def close(self) -> None:
        """Send what is buffered, then close; abort after a timeout, since the other end may have stopped."""
        self._writer.close()
        try:
            async with asyncio.timeout(_LINGER):
                await self._writer.wait_closed()
        except OSError:
            self._writer.transport.abort()

    def _write(self, kind: int, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(_HEADER.pack(kind, len(data)) + data)


def keep_alive(connection: socket.socket) -> None:
    """Let the system end a connection if the other host has not answered for half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def parse(data: bytes) -> Message | None:
    """Parse a message, a JSON object with a string under "say"; None if it is invalid."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("say"), str) else None


def printable(text: str, limit: int = LONG) -> str:
    """Text from a peer as one line that is safe in a terminal or a log, of at most ``limit`` characters."""
    shown = untrusted.printable(text[:limit])
    return shown if len(text) <= limit else f"{shown} ..."
