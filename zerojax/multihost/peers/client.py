"""Every process's part: its line to the hub, which carries JAX's traffic, too."""

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress

from zerojax.multihost.peers.coordinator import silence
from zerojax.multihost.peers.handshake import VARIABLE, introduce
from zerojax.multihost.peers.heartbeat import Pulse
from zerojax.multihost.peers.messages import Connection, Message, Piece, Verdict
from zerojax.multihost.peers.proxy import ClientProxy

# Seconds in which what answers has to show that it is the hub of this job: strangers may come before us.
_PATIENCE = 30.0

# Seconds in which the hub of an older job, which had another token, may still be at the address.
_OLD_HUB = 5.0


class Member:
    """One process's line; all of it runs in one event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        token: str,
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
            token: what all of them know, and nobody else; empty where anybody may come.
            join_timeout: seconds in which all must have come.
            peer_timeout: seconds of silence after which the hub counts as lost.
            end: called once, in the event loop, when the job ends other than well.
        """
        self._address = host, port
        self._rank = rank
        self._size = size
        self._token = token
        self._join_timeout = join_timeout
        self._peer_timeout = peer_timeout
        self._end = end
        self._pulse = Pulse([0], peer_timeout)
        self._connection: Connection | None = None
        self._proxy: ClientProxy | None = None
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
        loop = asyncio.get_running_loop()
        refused: float | None = None  # since when
        while True:
            with suppress(OSError):
                if await self._connect():
                    self._line.send("here", rank=self._rank, size=self._size, facts=dict(facts))
                    match await self._line.receive():
                        case {"say": "go"}:
                            self._begin()
                            return None
                        case {"say": "end"} as message:
                            return self._verdict(message)
                else:
                    refused = refused or loop.time()
                    if loop.time() - refused > _OLD_HUB:
                        return Verdict("refused", self._rank, self._stranger(), code=2)
            await self.close()
            # Nobody listens yet, or it is the hub of a job that is about to end.
            await asyncio.sleep(random.uniform(0.1, 0.5))

    def _begin(self) -> None:
        self._proxy = ClientProxy(self._line)
        self._tasks = [asyncio.ensure_future(work) for work in (self._listen(), self._beat())]

    async def _connect(self) -> bool:
        """Reach the hub; False if it does not know the job's token, or takes ours for another one.

        Raises:
            OSError: there is none.
        """
        async with asyncio.timeout(_PATIENCE):
            self._connection = Connection(*await asyncio.open_connection(*self._address))
            return await introduce(self._connection, self._token)

    def _stranger(self) -> str:
        host, port = self._address
        theirs = "does not know this process's token" if self._token else "asks for a token that is not set"
        return (
            f"what answers at {host}:{port} {theirs}: the processes of a job need the same {VARIABLE} "
            "(docs/clusters.md, Who can join)"
        )

    async def open_way_to_jax(self, path: str) -> None:
        """Listen at a Unix socket for JAX's client.

        Raises:
            OSError: it cannot be made.
        """
        assert self._proxy is not None, "nobody was joined"
        await self._proxy.open(path)

    async def close(self) -> None:
        """Hang up."""
        if self._proxy is not None:
            self._proxy.close()
        if self._connection is not None:
            await self._connection.close()

    @property
    def _line(self) -> Connection:
        assert self._connection is not None, "nobody was joined"
        return self._connection

    def _verdict(self, message: Message) -> Verdict:
        return Verdict.of(message) or Verdict("lost", 0, "rank 0 has sent what is no message")

    async def tell(self, verdict: Verdict) -> None:
        """Let all others know why the job ends."""
        self._line.send(**verdict.message())

    async def say_done(self) -> None:
        """Let the hub know that this process has done its part."""
        self._line.send("done")

    async def _listen(self) -> None:
        assert self._proxy is not None
        while (received := await self._line.receive()) is not None:
            self._pulse.hear(0)
            match received:
                case Piece():
                    self._proxy.deliver(received)
                case {"say": "end"} as message:
                    self._end(self._verdict(message))
                    return
                case {"say": "all done"}:
                    self.all_done.set()
        if not self.all_done.is_set():
            self._end(Verdict("lost", 0, "rank 0 has died: its connection is closed"))

    async def _beat(self) -> None:
        self._pulse = Pulse([0], self._peer_timeout)
        while not self.all_done.is_set():
            await asyncio.sleep(self._pulse.interval)
            self._line.send("alive")
            if self._pulse.silent():
                self._end(Verdict("lost", 0, silence(0, self._peer_timeout)))
                return
