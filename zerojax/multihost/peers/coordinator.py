"""The coordinator, in process 0: rendezvous, comparison of settings, heartbeats, and reports of failures."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from zerojax.multihost.peers.listener import Listener
from zerojax.multihost.peers.messages import SHORT, Connection, Failure, Message, printable
from zerojax.multihost.peers.proxy import Place, ServiceProxy

# The most ranks that a message lists.
_NAMED = 8

# Seconds between checks while there are no heartbeats to check.
_PAUSE = 10.0


class Coordinator:
    """The connections of all processes, including process 0.

    All processes must have the same facts as process 0. A process that is silent for ``peer_timeout`` seconds
    counts as lost.
    """

    def __init__(
        self, place: Place, facts: Mapping[str, str], join_timeout: float, peer_timeout: float
    ) -> None:
        self._place = place
        self._size = place.size
        self._facts = facts
        self._join_timeout = join_timeout
        self._peer_timeout = peer_timeout
        self._listener = Listener(place.token, self._serve)
        self._connections: dict[int, Connection] = {}
        self._done: set[int] = set()
        self._heartbeat: Heartbeat | None = None  # once all have joined
        self._objection: Failure | None = None  # to the settings of a process, reported once all have joined
        self._failure: Failure | None = None

    async def open(self) -> None:
        """Listen, and start watching.

        Raises:
            OSError: the address is not local, or the port is taken.
        """
        self._listener.open(self._place.listen, self._place.port)
        self._watch = asyncio.ensure_future(self._watch_over())

    async def wait_for_closed(self) -> None:
        """Wait until only rank 0 is connected."""
        while self._connections.keys() - {0}:
            await asyncio.sleep(0.02)

    async def _serve(self, connection: Connection, hello: Message) -> None:
        """Serve one process, from its first message to the end of its connection."""
        match hello:
            case {"say": "here", "rank": int(rank), "size": int(size), "facts": dict(facts)} if all(
                isinstance(value, str) for value in facts.values()
            ):
                pass
            case _:
                return
        if self._heartbeat is not None:
            connection.send("busy")  # this job is being restarted, and its old process 0 is still running
            return
        if refusal := self._refusal(rank, size):
            self._fail(Failure("refused", rank, refusal, code=2))
        if self._failure is not None:
            connection.send(**self._failure.message())
            return
        self._connections[rank] = connection
        if self._objection is None:
            self._objection = self._difference(rank, facts)
        if len(self._connections) == self._size:
            self._start()
        proxy = ServiceProxy(self._place.service, connection)
        try:
            await self._receive(rank, connection, proxy)
        finally:
            proxy.close()
        if self._heartbeat is None or rank in self._done:
            self._connections.pop(rank, None)  # before the start it may connect again
        else:
            self._fail(Failure("lost", rank, f"rank {rank} has died: its connection is closed"))

    async def _receive(self, rank: int, connection: Connection, proxy: ServiceProxy) -> None:
        """Handle a process's frames until its connection ends or carries an invalid one."""
        while (received := await connection.receive()) is not None:
            if self._heartbeat is not None:
                self._heartbeat.hear(rank)
            if isinstance(received, bytes):
                if self._heartbeat is not None:
                    proxy.deliver(received)
            elif not self._handle(rank, received):
                return

    def _refusal(self, rank: int, size: int) -> str | None:
        """Why a process cannot join this job; None if it can."""
        if size != self._size:
            return printable(f"rank {rank} was started for {size} processes, rank 0 for {self._size}", SHORT)
        if not 0 <= rank < size:
            return printable(f"rank {rank} of {size} joined: ranks are 0 to {size - 1}", SHORT)
        if rank in self._connections:
            return f"two processes joined as rank {rank}: give each process a different id"
        return None

    def _difference(self, rank: int, theirs: dict[str, str]) -> Failure | None:
        """A failure that lists where a process's facts differ from rank 0's facts; None if they are equal."""
        different = [key for key in {**self._facts, **theirs} if self._facts.get(key) != theirs.get(key)]
        if not different:
            return None
        pairs = [
            f"{printable(key, SHORT)} is {printable(theirs.get(key, 'not set'), SHORT)} there "
            f"and {self._facts.get(key, 'not set')} on rank 0"
            for key in different[:3]
        ]
        more = f", and {len(different) - 3} more" if len(different) > 3 else ""
        why = f"rank {rank} was started with other settings: {'; '.join(pairs)}{more}"
        return Failure("refused", rank, why, code=2)

    def _start(self) -> None:
        """Start the job, once all have joined."""
        if self._objection is not None:
            self._fail(self._objection)
        else:
            self._heartbeat = Heartbeat(self._connections, self._peer_timeout)
            self._tell_all("go")

    def _handle(self, rank: int, message: Message) -> bool:
        """Handle a message; False if it is invalid."""
        match message["say"]:
            case "alive":
                pass
            case "end":
                failure = Failure.of(message)
                if failure is None or failure.kind not in ("failed", "stuck"):
                    return False
                self._fail(replace(failure, rank=rank))
            case "done":
                self._done.add(rank)
                if self._heartbeat is not None:
                    self._heartbeat.forget(rank)
                if len(self._done) == self._size:
                    self._tell_all("all done")
            case _:
                return False
        return True

    async def _watch_over(self) -> None:
        """Accept connections until all ranks join, then exchange heartbeats."""
        try:
            await self._rendezvous()
            await self._exchange_heartbeats()
        finally:
            self._listener.close()

    async def _rendezvous(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._join_timeout):
                while self._heartbeat is None:
                    await asyncio.sleep(min(0.05, self._join_timeout))
        if self._heartbeat is None:
            absent = sorted(set(range(self._size)) - set(self._connections))
            self._fail(Failure("absent", absent[0], self._describe_absent(absent)))

    def _describe_absent(self, ranks: list[int]) -> str:
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}"
        if len(ranks) > _NAMED:
            names += f" and {len(ranks) - _NAMED} more"
        why = (
            f"{names} of {self._size} did not join within {self._join_timeout:g} s "
            "(cluster.join_timeout): is each started, and can it reach rank 0?"
        )
        if refused := self._listener.refused:
            why += f" {refused} connection{'s' if refused > 1 else ''} did not know the job's token"
        return why

    async def _exchange_heartbeats(self) -> None:
        while len(self._done) < self._size:
            heartbeat = self._heartbeat
            await asyncio.sleep(heartbeat.interval if heartbeat else _PAUSE)
            self._tell_all("alive")
            for rank in heartbeat.silent() if heartbeat else ():
                self._fail(Failure("lost", rank, describe_silence(rank, self._peer_timeout)))

    def _fail(self, failure: Failure) -> None:
        """End the job, and report the first failure."""
        if self._failure is not None:
            return
        self._failure = failure
        # The process concerned is the last to get the report, because it ends at once, and the others must
        # hear of it first.
        for rank in sorted(self._connections, key=lambda rank: rank == failure.rank):
            self._connections[rank].send(**failure.message())

    def _tell_all(self, say: str) -> None:
        for connection in self._connections.values():
            connection.send(say)


def describe_silence(rank: int, limit: float) -> str:
    """The message about a process that has sent nothing for ``limit`` seconds."""
    return (
        f"rank {rank} has been silent for {limit:g} s (cluster.peer_timeout): it hangs, is stopped, "
        "or its host cannot be reached"
    )


class Heartbeat:
    """The time of the last message from each of some peers.

    If this process itself was paused (stopped, swapped out, machine asleep), ``silent`` is called late. Then
    all timers start again, because the process may have missed messages.

    At the start all peers count as just heard. ``limit`` seconds of silence are too long. The clock must not
    be the wall clock, which may jump.
    """

    def __init__(
        self, peers: Iterable[int], limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.interval = limit / 6  # between calls of `silent`, and between heartbeats
        self._clock = clock
        self._checked = clock()
        self._heard = dict.fromkeys(peers, self._checked)

    def hear(self, peer: int) -> None:
        """Record a message from a peer."""
        self._heard[peer] = self._clock()

    def forget(self, peer: int) -> None:
        """Stop watching a peer."""
        self._heard.pop(peer, None)

    def silent(self) -> list[int]:
        """The peers that sent nothing for ``limit`` seconds. It must be called every ``interval``."""
        now, before = self._clock(), self._checked
        self._checked = now
        if now - before > 2 * self.interval:
            self._heard = dict.fromkeys(self._heard, now)
        return [peer for peer, heard in self._heard.items() if now - heard > self.limit]
