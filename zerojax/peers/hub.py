"""Process 0's part: the door at the coordinator's address, the roll, and the verdict on a job."""

import asyncio
from collections.abc import Mapping
from contextlib import closing, suppress

from zerojax.peers.messages import LIMIT, Message, Verdict, receive, send
from zerojax.peers.pulse import Pulse
from zerojax.peers.relay import relay

# Seconds in which a connection must say what it is.
_PATIENCE = 10.0


class Hub:
    """The connections of all processes, process 0's own included."""

    def __init__(
        self, size: int, facts: Mapping[str, str], service: int, join_timeout: float, peer_timeout: float
    ) -> None:
        """Nothing is opened yet.

        Args:
            size: processes of the job.
            facts: what has to be the same in all of them, by name, as in process 0.
            service: port of JAX's coordination service on this host's loopback interface.
            join_timeout: seconds in which all must have come.
            peer_timeout: seconds of silence after which a process counts as lost.
        """
        self._size = size
        self._facts = facts
        self._service = service
        self._join_timeout = join_timeout
        self._peer_timeout = peer_timeout
        self._lines: dict[int, asyncio.StreamWriter] = {}
        self._done: set[int] = set()
        self._pulse: Pulse | None = None  # since all have come
        self._objection: Verdict | None = None  # to what a process was started with
        self._verdict: Verdict | None = None

    async def open(self, host: str | None, port: int) -> None:
        """Listen (None: at every interface), and watch from then on.

        Raises:
            OSError: the address is not ours, or the port is taken.
        """
        server = await asyncio.start_server(self._door, host, port, limit=LIMIT)
        self._watch = asyncio.ensure_future(self._watch_over(server))

    async def _door(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        message: Message | None = None
        # Python 3.12 complains of a handler that is cancelled.
        with suppress(asyncio.CancelledError), closing(writer):
            with suppress(TimeoutError):
                message = await asyncio.wait_for(receive(reader), _PATIENCE)
            match message:
                case {"say": "jax"}:
                    with suppress(OSError):
                        far = await asyncio.open_connection("127.0.0.1", self._service)
                        await relay((reader, writer), far)
                case {"say": "here", "rank": int(rank), "size": int(size), "facts": dict(facts)}:
                    await self._member(reader, writer, rank, size, facts)

    async def _member(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rank: int,
        size: int,
        facts: dict[str, str],
    ) -> None:
        """A process's line, from its coming to its going."""
        if self._pulse is not None:
            await send(writer, "busy")  # a job that is being restarted: its old self is still here
            return
        if refusal := self._refusal(rank, size):
            await self._conclude(Verdict("refused", rank, refusal, code=2))
        if self._verdict is not None:
            await send(writer, **self._verdict.message())
            return
        self._lines[rank] = writer
        if self._objection is None:
            self._objection = self._difference(rank, facts)
        if len(self._lines) == self._size:
            await self._all_are_here()
        while (message := await receive(reader)) is not None:
            await self._hear(rank, message)
        if self._pulse is None:
            self._lines.pop(rank, None)  # it may come again
        elif rank not in self._done:
            await self._conclude(Verdict("lost", rank, f"rank {rank} has died: its connection is closed"))

    def _refusal(self, rank: int, size: int) -> str | None:
        """Why a process has no place in this job."""
        if size != self._size:
            return f"rank {rank} was told of {size} processes, and rank 0 of {self._size}"
        if rank in self._lines:
            return f"two processes have come as rank {rank}: each needs a process id of its own"
        return None

    def _difference(self, rank: int, theirs: dict[str, str]) -> Verdict | None:
        """What a process was started with that rank 0 was not."""
        different = [key for key in {**self._facts, **theirs} if self._facts.get(key) != theirs.get(key)]
        if not different:
            return None
        pairs = [f"{k} is {theirs.get(k, 'not set')} there and {self._facts.get(k, 'not set')} on rank 0"
                 for k in different[:3]]  # fmt: skip
        more = f", and {len(different) - 3} more" if len(different) > 3 else ""
        why = f"rank {rank} was started with other settings: {'; '.join(pairs)}{more}"
        return Verdict("refused", rank, why, code=2)

    async def _all_are_here(self) -> None:
        if self._objection is not None:
            await self._conclude(self._objection)
        else:
            self._pulse = Pulse(self._lines, self._peer_timeout)
            await self._tell_all("go")

    async def _hear(self, rank: int, message: Message) -> None:
        if self._pulse is not None:
            self._pulse.hear(rank)
        if message["say"] == "end":
            await self._conclude(Verdict.of(message))
        elif message["say"] == "done":
            self._done.add(rank)
            if self._pulse is not None:
                self._pulse.forget(rank)
            if len(self._done) == self._size:
                await self._tell_all("all done")

    async def _watch_over(self, server: asyncio.Server) -> None:
        """Keep the door open, call the roll; then give signs of life and miss those of others."""
        try:
            await self._call_the_roll()
            await self._miss_the_silent()
        finally:
            server.close()

    async def _call_the_roll(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._join_timeout):
                while self._pulse is None:
                    await asyncio.sleep(min(0.05, self._join_timeout))
        if self._pulse is None:
            absent = sorted(set(range(self._size)) - set(self._lines))
            names = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
            await self._conclude(
                Verdict(
                    "absent",
                    absent[0],
                    f"{names} of {self._size} did not come within {self._join_timeout:g} s "
                    "(cluster.join_timeout): is each started, and can it reach rank 0?",
                )
            )

    async def _miss_the_silent(self) -> None:
        while True:
            pulse = self._pulse
            await asyncio.sleep(pulse.interval if pulse else _PATIENCE)
            await self._tell_all("alive")
            for rank in pulse.silent() if pulse else ():
                await self._conclude(Verdict("lost", rank, silence(rank, self._peer_timeout)))

    async def _conclude(self, verdict: Verdict) -> None:
        """End the job: the first verdict is the one that counts."""
        if self._verdict is not None:
            return
        self._verdict = verdict
        # The one that it is about comes last: it waits for the others to have been told.
        for rank in sorted(self._lines, key=lambda rank: rank == verdict.rank):
            await send(self._lines[rank], **verdict.message())

    async def _tell_all(self, say: str) -> None:
        for writer in list(self._lines.values()):
            await send(writer, say)


def silence(rank: int, limit: float) -> str:
    """What is said of a process that is not heard of."""
    return (
        f"rank {rank} has not been heard of for {limit:g} s (cluster.peer_timeout): it hangs, is stopped, "
        "or its host cannot be reached"
    )
