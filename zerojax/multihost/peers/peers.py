"""The main thread's interface to a job (join, leave, fail), and the thread that may end the process."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from zerojax import terminal
from zerojax.errors import EXIT_PEER_LOST, NO_RESTART, AbsentError, ConfigurationError, JobError
from zerojax.multihost.peers.client import Client
from zerojax.multihost.peers.coordinator import Coordinator
from zerojax.multihost.peers.listener import reserve_files
from zerojax.multihost.peers.messages import Failure
from zerojax.multihost.peers.proxy import Place
from zerojax.multihost.watchdog import dump_stacks

# Seconds that a stuck process waits after dumping its stacks. Its end would break the collectives in which
# the others hang, before they have dumped theirs.
_LINGER = 2.0

# Seconds for a process to end by itself after a peer has failed, because it often fails in the same way.
_GRACE = 3.0


class Peers:
    """The other processes of a job. The event loop of their connections runs in a separate thread.

    After the constructor returns, JAX's client may connect to ``place.client``, and in rank 0 JAX's service
    may listen at ``place.service``.

    Args:
        place: of this process.
        facts: values that must be the same in all processes, by name: settings, versions.
        join_timeout: seconds for all to join.
        peer_timeout: seconds of silence after which a process counts as lost.

    Raises:
        ConfigurationError: facts or tokens differ, a rank or the number of processes is wrong, or rank 0's
            limit of open files is too low.
        JobError: rank 0 cannot listen.
        AbsentError: some processes did not join in time. The message names them.
    """

    def __init__(
        self, place: Place, facts: Mapping[str, str], *, join_timeout: float, peer_timeout: float
    ) -> None:
        self.rank = place.rank
        self.size = place.size
        self._stacks: Path | None = None
        self._note: Callable[[str], None] = lambda why: None
        self._ending = False  # whether this process has begun to end by itself
        self._failed = threading.Event()  # whether the job has failed
        self._coordinator = coordinator = None
        if place.rank == 0:
            reserve_files(place.size)
            self._coordinator = coordinator = Coordinator(place, facts, join_timeout, peer_timeout)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="zerojax peers", daemon=True)
        self._thread.start()
        self._client = Client(place, join_timeout, peer_timeout, self._on_failure)
        try:
            self._join(coordinator, place, facts)
        except BaseException:
            self.close()
            raise

    def record_failures(self, stacks: Path, note: Callable[[str], None] = lambda why: None) -> None:
        """Record a failure that ends this process.

        Args:
            stacks: file for this process's stacks if the job is stuck.
            note: called with the reason, in another thread, for at most 2 s.
        """
        self._stacks, self._note = stacks, note

    def leave(self) -> None:
        """Wait until all processes are done. Failures are still noticed meanwhile."""
        self._do(self._client.report_done())
        self._do(self._client.all_done.wait())

    def wait_for_closed(self, seconds: float) -> None:
        """In rank 0, wait at most ``seconds`` until the others have closed their connections."""
        if self._coordinator is not None:
            with suppress(TimeoutError):
                self._do(asyncio.wait_for(self._coordinator.wait_for_closed(), seconds))

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._do(_cancel_all())
        self._do(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def fail(self, code: int, why: str) -> NoReturn:
        """End this failed process with an exit code, after sending the others the reason (one line)."""
        self._ending = True
        self._report(Failure("failed", self.rank, f"rank {self.rank} failed: {why}", code))
        terminal.last_words("")
        os._exit(code)

    def wait_for_failure(self, seconds: float) -> None:
        """Wait for a report that a peer has failed. If one arrives, this process ends here."""
        self._failed.wait(seconds)
        if self._failed.is_set():
            time.sleep(2 * _GRACE)

    def stuck(self, why: str) -> NoReturn:
        """End this stuck process and the job. All processes dump their stacks."""
        failure = Failure("stuck", self.rank, f"rank {self.rank}: {why}")
        self._ending = True
        self._report(failure)
        self._die(failure)

    def _report(self, failure: Failure) -> None:
        """Send the others a failure, and wait until rank 0, whose end closes all connections, has sent it."""
        asyncio.run_coroutine_threadsafe(self._client.report(failure), self._loop)
        self._failed.wait(2)
        time.sleep(0.2)

    def _on_failure(self, failure: Failure) -> None:
        """React to the job's failure. The client calls it in the event loop's thread."""
        self._failed.set()
        if self._ending:
            return
        if failure.kind == "failed":
            self._loop.call_later(_GRACE, lambda: self._ending or self._die(failure))
        else:
            self._die(failure)

    def _die(self, failure: Failure) -> NoReturn:
        """End the process at once, even if its main thread hangs."""
        where = ""
        if failure.kind == "stuck" and self._stacks is not None:
            where = dump_stacks(self._stacks)
            time.sleep(_LINGER)
        # A disk that hangs must not keep the process alive.
        note = threading.Thread(target=self._note, args=(failure.why,), daemon=True)
        note.start()
        note.join(2)
        terminal.last_words(f"zerojax: {failure.why}{where}\n")
        os._exit(failure.code if failure.code in NO_RESTART else EXIT_PEER_LOST)

    def _do[T](self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _join(self, coordinator: Coordinator | None, place: Place, facts: Mapping[str, str]) -> None:
        if coordinator is not None:
            try:
                self._do(coordinator.open())
            except OSError as error:
                raise JobError(
                    f"rank 0 cannot listen at {place.listen or 'any address'}, port {place.port}: "
                    f"{error.strerror or error}; choose another port for the coordinator, or set "
                    "JAX_COORDINATOR_BIND_ADDRESS to another interface"
                ) from error
        if failure := self._do(self._client.join(facts)):
            time.sleep(0.5)  # time for rank 0 to send it to the others
            raise (ConfigurationError if failure.kind == "refused" else AbsentError)(failure.why)
        if coordinator is None:
            self._do(self._client.serve_jax())


async def _cancel_all() -> None:
    """Cancel all other tasks of this event loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
