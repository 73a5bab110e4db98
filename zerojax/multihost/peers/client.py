"""A process's connection to the coordinator, which also carries JAX's traffic."""

import asyncio
from collections.abc import Callable, Mapping

from zerojax.multihost.peers.coordinator import Heartbeat, describe_silence
from zerojax.multihost.peers.handshake import VARIABLE, reach
from zerojax.multihost.peers.messages import Connection, Failure, Message
from zerojax.multihost.peers.proxy import ClientProxy, Place


class Client:
    """One process's connection. All its code runs in one event loop.

    A coordinator that is silent for ``peer_timeout`` seconds counts as lost. If the job fails, ``on_failure``
    is called once, in the event loop.
    """

    def __init__(
        self, place: Place, join_timeout: float, peer_timeout: float, on_failure: Callable[[Failure], None]
    ) -> None:
        self._place = place
        self._join_timeout = join_timeout
        self._peer_timeout = peer_timeout
        self._on_failure = on_failure
        self._heartbeat = Heartbeat([0], peer_timeout)
        self._connected: Connection | None = None
        self._proxy: ClientProxy | None = None
        self.all_done = asyncio.Event()

    async def join(self, facts: Mapping[str, str]) -> Failure | None:
        """Connect, and wait until all processes have.

        Returns:
            None, or why the job cannot start.
        """
        try:
            # The coordinator's timeout expires first, because it knows which ranks are missing.
            async with asyncio.timeout(self._join_timeout + 5):
                return await self._join(facts)
        except TimeoutError:
            why = (
                f"rank 0 did not respond at {self._place.host}:{self._place.port} within "
                f"{self._join_timeout:g} s (cluster.join_timeout): is it started, and can this host reach it?"
            )
            return Failure("absent", 0, why)

    async def _join(self, facts: Mapping[str, str]) -> Failure | None:
        place = self._place
        while True:
            self._connected = await reach(place.host, place.port, place.token)
            if self._connected is None:
                return Failure("refused", place.rank, self._wrong_token(), code=2)
            self._connection.send("here", rank=place.rank, size=place.size, facts=dict(facts))
            match await self._connection.receive():
                case {"say": "go"}:
                    self._begin()
                    return None
                case {"say": "end"} as message:
                    return self._failure(message)
            await self.close()
            await asyncio.sleep(0.3)  # the coordinator of another job is about to end

    def _begin(self) -> None:
        self._proxy = ClientProxy(self._connection)
        self._tasks = [asyncio.ensure_future(work) for work in (self._receive(), self._send_heartbeats())]

    def _wrong_token(self) -> str:
        place = self._place
        reason = "does not know this process's token" if place.token else "asks for a token, and none is set"
        return (
            f"the server at {place.host}:{place.port} {reason}: the processes of a job need the same "
            f"{VARIABLE} (docs/clusters.md, Who can join)"
        )

    async def serve_jax(self) -> None:
        """Listen at the Unix socket ``place.client`` for JAX's client.

        Raises:
            OSError: the socket cannot be created.
        """
        assert self._proxy is not None, "not joined"
        await self._proxy.open(self._place.client)

    async def close(self) -> None:
        """Close the connection."""
        if self._proxy is not None:
            self._proxy.close()
        if self._connected is not None:
            await self._connected.close()

    @property
    def _connection(self) -> Connection:
        assert self._connected is not None, "not connected"
        return self._connected

    def _failure(self, message: Message) -> Failure:
        return Failure.of(message) or Failure("lost", 0, "rank 0 has sent an invalid message")

    async def report(self, failure: Failure) -> None:
        """Tell all other processes why the job ends."""
        self._connection.send(**failure.message())

    async def report_done(self) -> None:
        """Tell the coordinator that this process is done."""
        self._connection.send("done")

    async def _receive(self) -> None:
        assert self._proxy is not None
        while (received := await self._connection.receive()) is not None:
            self._heartbeat.hear(0)
            match received:
                case bytes():
                    self._proxy.deliver(received)
                case {"say": "end"} as message:
                    self._on_failure(self._failure(message))
                    return
                case {"say": "all done"}:
                    self.all_done.set()
        if not self.all_done.is_set():
            self._on_failure(Failure("lost", 0, "rank 0 has died: its connection is closed"))

    async def _send_heartbeats(self) -> None:
        self._heartbeat = Heartbeat([0], self._peer_timeout)
        while not self.all_done.is_set():
            await asyncio.sleep(self._heartbeat.interval)
            self._connection.send("alive")
            if self._heartbeat.silent():
                self._on_failure(Failure("lost", 0, describe_silence(0, self._peer_timeout)))
                return
