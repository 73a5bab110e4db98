"""Every process's part: its line to the hub, and a way for JAX through the hub's door."""

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress

from zerojax.peers.hub import silence
from zerojax.peers.messages import LIMIT, Verdict, receive, send
from zerojax.peers.pulse import Pulse
from zerojax.peers.relay import relay


class Member:
    """One process's line; all of it runs in one event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        join_timeout: float,
        peer_timeout: float,
        end: Callable[[Verdict], None],
    ) -> None:
        """Nothing is connected yet.

        Args:
            host: of the hub.
            port: of the hub.
            rank: of this process.
            size: processes of the job.
            join_timeout: seconds in which all must have come.
            peer_timeout: seconds of silence after which the hub counts as lost.
            end: called once, in the event loop, when the job ends other than well.
        """
        self._address = host, port
        self._rank = rank
        self._size = size
        self._join_timeout = join_timeout
        self._peer_timeout = peer_timeout
        self._end = end
        self._pulse = Pulse([0], peer_timeout)
        self._way: asyncio.Server | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self.all_done = asyncio.Event()

    async def join(self, facts: Mapping[str, str]) -> Verdict | None:
        """Come, and wait until all have.

        Returns:
            None, or why the job cannot begin.
        """
        try:
            # The hub knows who is missing: let it speak first.
            async with asyncio.timeout(self._join_timeout + 5):
                return await self._join(facts)
        except TimeoutError:
            host, port = self._address
            return Verdict(
                "absent",
                0,
                f"rank 0 did not answer at {host}:{port} within {self._join_timeout:g} s "
                "(cluster.join_timeout): is it started, and can this host reach it?",
            )

    async def _join(self, facts: Mapping[str, str]) -> Verdict | None:
        while True:
            with suppress(OSError):
                self._reader, self._writer = await asyncio.open_connection(*self._address, limit=LIMIT)
                await send(self._writer, "here", rank=self._rank, size=self._size, facts=dict(facts))
                match await receive(self._reader):
                    case {"say": "go"}:
                        self._tasks = [asyncio.ensure_future(x) for x in (self._listen(), self._beat())]
                        return None
                    case {"say": "end"} as message:
                        return Verdict.of(message)
            await self.close()
            # Nobody listens yet, or it is the hub of a job that is about to end.
            await asyncio.sleep(random.uniform(0.1, 0.5))

    async def open_way_to_jax(self) -> int:
        """Listen on the loopback interface for JAX's client; its connections go on to the hub's door.

        Returns:
            The port.
        """

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # Python 3.12 complains of a handler that is cancelled.
            with suppress(OSError, asyncio.CancelledError):
                far = await asyncio.open_connection(*self._address)
                await send(far[1], "jax")
                await relay((reader, writer), far, hold=True)

        self._way = await asyncio.start_server(accept, "127.0.0.1", 0)
        return self._way.sockets[0].getsockname()[1]

    async def close_way_to_jax(self) -> None:
        """Accept no more connections of JAX's client, which comes again when one ends."""
        if self._way is not None:
            self._way.close()

    async def close(self) -> None:
        """Hang up."""
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()

    @property
    def _line(self) -> asyncio.StreamWriter:
        assert self._writer is not None, "nobody was joined"
        return self._writer

    async def tell(self, verdict: Verdict) -> None:
        """Let all others know why the job ends."""
        await send(self._line, **verdict.message())

    async def say_done(self) -> None:
        """Let the hub know that this process has done its part."""
        await send(self._line, "done")

    async def _listen(self) -> None:
        while (message := await receive(self._reader)) is not None:
            self._pulse.hear(0)
            match message:
                case {"say": "end"}:
                    self._end(Verdict.of(message))
                    return
                case {"say": "all done"}:
                    self.all_done.set()
        if not self.all_done.is_set():
            self._end(Verdict("lost", 0, "rank 0 has died: its connection is closed"))

    async def _beat(self) -> None:
        self._pulse = Pulse([0], self._peer_timeout)
        while not self.all_done.is_set():
            await asyncio.sleep(self._pulse.interval)
            await send(self._line, "alive")
            if self._pulse.silent():
                self._end(Verdict("lost", 0, silence(0, self._peer_timeout)))
                return
