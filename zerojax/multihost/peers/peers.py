"""A job as the main thread sees it: join, leave, give up; and the thread that may end the process."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from zerojax.errors import EXIT_PEER_LOST, NO_RESTART, JobError, ZeroError
from zerojax.multihost.peers.client import Member
from zerojax.multihost.peers.coordinator import Hub
from zerojax.multihost.peers.files import reserve_files
from zerojax.multihost.peers.messages import Verdict
from zerojax.multihost.watchdog import dump_stacks

# Seconds that a process which is stuck stays after it has dumped its stacks: its end would break the
# collectives that the others hang in, before they have dumped theirs.
_LINGER = 2.0

# Seconds that a process whose peer has failed gets to end by itself: often it has failed in the same way.
_GRACE = 3.0


@dataclass(frozen=True)
class Place:
    """This process's place in a job.

    Attributes:
        host: of rank 0, as all can reach it.
        port: of rank 0's door.
        listen: the interface that rank 0 listens on; None is all of them.
        rank: of this process.
        size: processes of the job.
        token: what its processes know, and nobody else; empty where anybody may come.
        folder: where this process's Unix sockets lie, which only the user can open.
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
        """The Unix socket of JAX's coordination service; in rank 0."""
        return str(self.folder / "service")

    @property
    def client(self) -> str:
        """The Unix socket at which JAX's client in this process finds the service."""
        return self.service if self.rank == 0 else str(self.folder / "client")


class Peers:
    """The other processes, while this one works with them."""

    def __init__(self, place: Place, join_timeout: float, peer_timeout: float) -> None:
        """Start the thread that everything here runs in; `join` does the rest."""
        self.rank = place.rank
        self.size = place.size
        # Where this process's stacks go when the job gets stuck, and what else is to be told why it ended.
        self.stacks: Path | None = None
        self.note: Callable[[str], None] = lambda why: None
        self._ending = False  # whether this process has begun to end by itself
        self._told = threading.Event()  # that the job ends
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="zerojax peers", daemon=True)
        self._thread.start()
        self._member = Member(
            place.host,
            place.port,
            place.rank,
            place.size,
            place.token,
            join_timeout,
            peer_timeout,
            self._end,
        )

    def leave(self) -> None:
        """Wait until all have done their part; the watch over them goes on meanwhile."""
        self._do(self._member.say_done())
        self._do(self._member.all_done.wait())

    def close(self) -> None:
        """Hang up and end the thread."""
        self._do(_cancel_all())
        self._do(self._member.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def give_up(self, code: int, why: str) -> NoReturn:
        """End this process, which has failed, once the others know of it.

        Args:
            code: its exit code.
            why: one line.
        """
        self._ending = True
        self._tell(Verdict("failed", self.rank, f"rank {self.rank} failed: {why}", code))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def wait_for_end(self, seconds: float) -> None:
        """Wait for what the others may have to say; when the job ends, so does this process, here."""
        self._told.wait(seconds)
        if self._told.is_set():
            time.sleep(2 * _GRACE)

    def stuck(self, why: str) -> NoReturn:
        """End this process, which does not get on, and the job with it; all processes dump their stacks."""
        verdict = Verdict("stuck", self.rank, f"rank {self.rank}: {why}")
        self._ending = True
        self._tell(verdict)
        self._die(verdict)

    def _tell(self, verdict: Verdict) -> None:
        """Let the others know, and wait for a moment: rank 0's end would cut the line."""
        asyncio.run_coroutine_threadsafe(self._member.tell(verdict), self._loop)
        self._told.wait(2)
        time.sleep(0.2)

    def _end(self, verdict: Verdict) -> None:
        """The job ends; called by the member, in the loop's thread."""
        self._told.set()
        if self._ending:
            return
        if verdict.kind == "failed":
            self._loop.call_later(_GRACE, lambda: self._ending or self._die(verdict))
        else:
            self._die(verdict)

    def _die(self, verdict: Verdict) -> NoReturn:
        """End the process at once, whatever its main thread is stuck in."""
        where = ""
        if verdict.kind == "stuck" and self.stacks is not None:
            where = dump_stacks(self.stacks)
            time.sleep(_LINGER)
        # A disk or pipe that hangs must not keep the process.
        last = threading.Thread(target=lambda: (self.note(verdict.why), sys.stdout.flush()), daemon=True)
        last.start()
        last.join(2)
        os.write(2, f"zerojax: {verdict.why}{where}\n".encode())
        os._exit(verdict.code if verdict.code in NO_RESTART else EXIT_PEER_LOST)

    def _do[T](self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _join(self, hub: Hub | None, place: Place, facts: Mapping[str, str]) -> None:
        if hub is not None:
            try:
                self._do(hub.open(place.listen, place.port))
            except OSError as error:
                raise JobError(
                    f"rank 0 cannot listen at {place.listen or 'any address'}, port {place.port}: "
                    f"{error.strerror or error}; another port of the coordinator, or "
                    "JAX_COORDINATOR_BIND_ADDRESS for another interface, may do"
                ) from error
        if verdict := self._do(self._member.join(facts)):
            time.sleep(0.5)  # rank 0 tells the others: let it finish
            raise (ZeroError if verdict.kind == "refused" else JobError)(verdict.why)
        if hub is None:
            self._do(self._member.open_way_to_jax(place.client))


def join(place: Place, facts: Mapping[str, str], *, join_timeout: float, peer_timeout: float) -> Peers:
    """Meet the other processes.

    Args:
        place: of this process.
        facts: what has to be the same in all of them, by name: settings, versions.
        join_timeout: seconds in which all have to come.
        peer_timeout: seconds of silence after which a process counts as lost.

    Returns:
        The peers. JAX's client may connect to `place.client` now, and on rank 0 JAX's service listen at
        `place.service`.

    Raises:
        ZeroError: the facts or the tokens differ, the processes' numbers do not fit, or rank 0 may not have
            as many open files as they take; says what and where.
        JobError: rank 0 cannot listen, or not all came in time; says which.
    """
    if place.rank == 0:
        reserve_files(place.size)
    peers = Peers(place, join_timeout, peer_timeout)
    hub = None
    if place.rank == 0:
        hub = Hub(place.size, facts, place.token, place.service, join_timeout, peer_timeout)
    try:
        peers._join(hub, place, facts)
        return peers
    except BaseException:
        peers.close()
        raise


async def _cancel_all() -> None:
    """End what else runs in this event loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
