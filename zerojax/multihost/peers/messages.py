"""What passes between two processes: frames that hold a message, or a piece of JAX's own traffic."""

import asyncio
import json
import struct
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

# The largest message: a whole config fits many times.
LIMIT = 1 << 20

# Characters of one value that a peer may put into a line, and of the whole line.
SHORT, LONG = 200, 2000

# Seconds in which what was sent has to go when a connection is closed.
_LINGER = 1.0

# Kind of frame, number of the stream that it belongs to, bytes that follow.
_HEADER = struct.Struct(">BII")
_MESSAGE, _PIECE = 1, 2

Message = dict[str, Any]
Kind = Literal["refused", "absent", "lost", "failed", "stuck"]


@dataclass(frozen=True)
class Piece:
    """Bytes of one of JAX's connections; none at its end."""

    stream: int
    data: bytes


@dataclass(frozen=True)
class Verdict:
    """Why a job ends.

    Attributes:
        kind: "refused" (settings that cannot work together), "absent" (not all came), "lost" (a process
            died or fell silent), "failed" (one raised an error), "stuck" (one does not get on).
        rank: the process that it is about; -1 for none in particular.
        why: one line for a person.
        code: the exit code of the process that failed by itself; 0 where none did.
    """

    kind: Kind
    rank: int
    why: str
    code: int = 0

    def message(self) -> Message:
        """To be sent."""
        return {"say": "end", "verdict": asdict(self)}

    @staticmethod
    def of(message: Message) -> "Verdict | None":
        """What was sent, fit to be shown; None if it is no verdict."""
        match message.get("verdict"):
            case {"kind": kind, "rank": int(rank), "why": str(why), "code": int(code)}:
                return Verdict(kind, rank, printable(why), code) if kind in get_args(Kind) else None
        return None


class Connection:
    """One end of a connection between two processes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take over a stream."""
        self._reader = reader
        self._writer = writer

    def send(self, say: str, **more: Any) -> None:
        """Send a message without waiting: one process that does not read must not hold up the others.

        A connection that is gone is noticed by whoever reads from it, not here.
        """
        self._write(_MESSAGE, 0, json.dumps({"say": say, **more}).encode())

    async def send_piece(self, piece: Piece) -> None:
        """Send a piece of JAX's traffic; wait while the connection is full.

        Raises:
            OSError: the connection is gone.
        """
        self._write(_PIECE, piece.stream, piece.data)
        await self._writer.drain()

    async def receive(self, limit: int = LIMIT) -> Message | Piece | None:
        """Wait for what comes next.

        Args:
            limit: bytes that it may have.

        Returns:
            None when the connection has ended, or carries what it should not.
        """
        try:
            kind, stream, size = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            if kind not in (_MESSAGE, _PIECE) or size > limit:
                return None
            data = await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError):
            return None
        return Piece(stream, data) if kind == _PIECE else parse(data)

    async def close(self) -> None:
        """Hang up, once what was sent has gone; it does not have long, as the other end may have stopped."""
        self._writer.close()
        try:
            async with asyncio.timeout(_LINGER):
                await self._writer.wait_closed()
        except OSError:
            self._writer.transport.abort()

    def _write(self, kind: int, stream: int, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(_HEADER.pack(kind, stream, len(data)) + data)


def parse(data: bytes) -> Message | None:
    """Read a message: a JSON object that says what it is; None if it is none."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("say"), str) else None


def printable(text: str, limit: int = LONG) -> str:
    """What a peer said, in one line that does nothing to a terminal or a log.

    Control characters, line breaks, direction marks and halves of surrogate pairs become escapes.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    return shown if len(text) <= limit else f"{shown} ..."
