"""Process 0's part: the door at the coordinator's address, the roll, and the verdict on a job."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from zerojax.multihost.peers.heartbeat import Pulse
from zerojax.multihost.peers.listener import Listener
from zerojax.multihost.peers.messages import SHORT, Connection, Message, Piece, Verdict, printable
from zerojax.multihost.peers.proxy import ServiceProxy

# Ranks that a line names one by one.
_NAMED = 8

# Seconds between looks where there is nothing to watch.
_PAUSE = 10.0


class Hub:
    """The connections of all processes, process 0's own included."""

    def __init__(
        self,
        size: int,
        facts: Mapping[str, str],
        token: str,
        service: str,
        join_timeout: float,
        peer_timeout: float,
    ) -> None:
        """Nothing is opened yet.

        Args:
            size: processes of the job.
            facts: what has to be the same in all of them, by name, as in process 0.
            token: what all of them know, and nobody else; empty where anybody may come.
            service: Unix socket of JAX's coordination service.
            join_timeout: seconds in which all must have come.
            peer_timeout: seconds of silence after which a process counts as lost.
        """
        self._size = size
        self._facts = facts
        self._service = service
        self._join_timeout = join_timeout
        self._peer_timeout = peer_timeout
        self._listener = Listener(token, self._serve)
        self._lines: dict[int, Connection] = {}
        self._done: set[int] = set()
        self._pulse: Pulse | None = None  # since all have come
        self._objection: Verdict | None = None  # to what a process was started with
        self._verdict: Verdict | None = None

    async def open(self, host: str | None, port: int) -> None:
        """Listen (None: at every interface), and watch from then on.

        Raises:
            OSError: the address is not ours, or the port is taken.
        """
        self._listener.open(host, port)
        self._watch = asyncio.ensure_future(self._watch_over())

    async def _serve(self, line: Connection, hello: Message) -> None:
        """A process's line, from its coming to its going."""
        match hello:
            case {"say": "here", "rank": int(rank), "size": int(size), "facts": dict(facts)} if all(
                isinstance(value, str) for value in facts.values()
            ):
                pass
            case _:
                return
        if self._pulse is not None:
            line.send("busy")  # a job that is being restarted: its old self is still here
            return
        if refusal := self._refusal(rank, size):
            self._conclude(Verdict("refused", rank, refusal, code=2))
        if self._verdict is not None:
            line.send(**self._verdict.message())
            return
        self._lines[rank] = line
        if self._objection is None:
            self._objection = self._difference(rank, facts)
        if len(self._lines) == self._size:
            self._all_are_here()
        proxy = ServiceProxy(self._service, line)
        try:
            await self._listen(rank, line, proxy)
        finally:
            proxy.close()
        if self._pulse is None:
            self._lines.pop(rank, None)  # it may come again
        elif rank not in self._done:
            self._conclude(Verdict("lost", rank, f"rank {rank} has died: its connection is closed"))

    async def _listen(self, rank: int, line: Connection, proxy: ServiceProxy) -> None:
        """Hear what a process says until its line ends, or carries what it should not."""
        while (received := await line.receive()) is not None:
            if self._pulse is not None:
                self._pulse.hear(rank)
            if isinstance(received, Piece):
                if self._pulse is not None:
                    proxy.deliver(received)
            elif not self._hear(rank, received):
                return

    def _refusal(self, rank: int, size: int) -> str | None:
        """Why a process has no place in this job."""
        if size != self._size:
            return printable(f"rank {rank} was told of {size} processes, and rank 0 of {self._size}", SHORT)
        if not 0 <= rank < size:
            return printable(f"rank {rank} of {size} has come: the first is 0 and the last {size - 1}", SHORT)
        if rank in self._lines:
            return f"two processes have come as rank {rank}: each needs a process id of its own"
        return None

    def _difference(self, rank: int, theirs: dict[str, str]) -> Verdict | None:
        """What a process was started with that rank 0 was not."""
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
        return Verdict("refused", rank, why, code=2)

    def _all_are_here(self) -> None:
        if self._objection is not None:
            self._conclude(self._objection)
        else:
            self._pulse = Pulse(self._lines, self._peer_timeout)
            self._tell_all("go")

    def _hear(self, rank: int, message: Message) -> bool:
        """React to a message; False if it is none that a process sends."""
        match message["say"]:
            case "alive":
                pass
            case "end":
                verdict = Verdict.of(message)
                if verdict is None or verdict.kind not in ("failed", "stuck"):
                    return False
                self._conclude(replace(verdict, rank=rank))
            case "done":
                self._done.add(rank)
                if self._pulse is not None:
                    self._pulse.forget(rank)
                if len(self._done) == self._size:
                    self._tell_all("all done")
            case _:
                return False
        return True

    async def _watch_over(self) -> None:
        """Keep the door open, call the roll; then give signs of life and miss those of others."""
        try:
            await self._call_the_roll()
            await self._miss_the_silent()
        finally:
            self._listener.close()

    async def _call_the_roll(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._join_timeout):
                while self._pulse is None:
                    await asyncio.sleep(min(0.05, self._join_timeout))
        if self._pulse is None:
            absent = sorted(set(range(self._size)) - set(self._lines))
            self._conclude(Verdict("absent", absent[0], self._who_is_absent(absent)))

    def _who_is_absent(self, ranks: list[int]) -> str:
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}"
        if len(ranks) > _NAMED:
            names += f" and {len(ranks) - _NAMED} more"
        why = (
            f"{names} of {self._size} did not come within {self._join_timeout:g} s "
            "(cluster.join_timeout): is each started, and can it reach rank 0?"
        )
        if refused := self._listener.refused:
            why += f" {refused} connection{'s' if refused > 1 else ''} did not know the job's token"
        return why

    async def _miss_the_silent(self) -> None:
        while len(self._done) < self._size:
            pulse = self._pulse
            await asyncio.sleep(pulse.interval if pulse else _PAUSE)
            self._tell_all("alive")
            for rank in pulse.silent() if pulse else ():
                self._conclude(Verdict("lost", rank, silence(rank, self._peer_timeout)))

    def _conclude(self, verdict: Verdict) -> None:
        """End the job: the first verdict is the one that counts."""
        if self._verdict is not None:
            return
        self._verdict = verdict
        # The one that it is about comes last: it waits for the others to have been told.
        for rank in sorted(self._lines, key=lambda rank: rank == verdict.rank):
            self._lines[rank].send(**verdict.message())

    def _tell_all(self, say: str) -> None:
        for line in self._lines.values():
            line.send(say)


def silence(rank: int, limit: float) -> str:
    """What is said of a process that is not heard of."""
    return (
        f"rank {rank} has not been heard of for {limit:g} s (cluster.peer_timeout): it hangs, is stopped, "
        "or its host cannot be reached"
    )
