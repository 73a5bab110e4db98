"""One JSON object a line, over a stream."""

import asyncio
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

# The longest line: a whole config fits many times.
LIMIT = 1 << 20

Message = dict[str, Any]
Kind = Literal["refused", "absent", "lost", "failed", "stuck"]


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
    def of(message: Message) -> "Verdict":
        """What was sent."""
        return Verdict(**message["verdict"])


async def send(writer: asyncio.StreamWriter, say: str, **more: Any) -> None:
    """Send a message; a connection that is gone is noticed by whoever reads from it, not here."""
    try:
        writer.write(json.dumps({"say": say, **more}).encode() + b"\n")
        await writer.drain()
    except OSError:
        pass


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None when the connection has ended, or carries what is none."""
    try:
        line = await reader.readline()
        message = json.loads(line) if line else None
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None
