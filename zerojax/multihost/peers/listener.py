"""Accepts connections, with a bound on the number of unauthenticated ones."""

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from zerojax.errors import ConfigurationError
from zerojax.multihost.peers.handshake import admit
from zerojax.multihost.peers.messages import Connection, Message

# The most unauthenticated connections. More wait in the kernel's queue.
PENDING = 128

# Seconds in which a connection must authenticate, and the same while others wait. A queue full of idle
# connections is cleared in 16 s.
_PATIENCE = 10.0
_PATIENCE_IF_FULL = 0.5

# Seconds between attempts to accept while no file descriptor is free.
_PAUSE = 0.1

_BACKLOG = 4096


class Listener:
    """The sockets at the coordinator's address.

    ``serve`` is called for each authenticated connection with its first message. When it returns, the
    connection is closed.
    """

    def __init__(self, token: str, serve: Callable[[Connection, Message], Awaitable[None]]) -> None:
        self.refused = 0  # connections with a wrong token
        self._token = token
        self._serve = serve
        self._pending: dict[asyncio.Task[None], float] = {}  # with the time of acceptance; oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: list[asyncio.Task[None]] = []

    def open(self, host: str | None, port: int) -> None:
        """Listen, on all interfaces if ``host`` is None.

        Raises:
            OSError: the address is not local, or the port is taken.
        """
        self._accepting = [self._start(self._accept(listening)) for listening in _listen(host, port)]

    def close(self) -> None:
        """Stop accepting. Existing connections stay open."""
        for task in self._accepting:
            task.cancel()

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            listening.setblocking(False)
            while True:
                await self._make_room()
                try:
                    accepted, _ = await loop.sock_accept(listening)
                except OSError:  # no free file descriptor, or the connection is already closed
                    await asyncio.sleep(_PAUSE)
                    continue
                task = self._start(self._handle(accepted))
                self._pending[task] = loop.time()
                task.add_done_callback(lambda task: self._pending.pop(task, None))

    async def _make_room(self) -> None:
        """Wait until another connection may be accepted. Drop the oldest if its time is up."""
        while len(self._pending) >= PENDING:
            oldest, accepted = next(iter(self._pending.items()))
            left = accepted + _PATIENCE_IF_FULL - asyncio.get_running_loop().time()
            if left <= 0:
                self._pending.pop(oldest)
                oldest.cancel()
            else:
                await asyncio.wait(self._pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def _handle(self, accepted: socket.socket) -> None:
        """Serve one connection until it ends."""
        try:
            connection = Connection(*await asyncio.open_connection(sock=accepted))
        except OSError:  # already closed
            accepted.close()
            return
        message = None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    if await admit(connection, self._token):
                        message = await connection.receive()
                    else:
                        self.refused += 1
            if task := asyncio.current_task():
                self._pending.pop(task, None)
            if isinstance(message, dict):
                await self._serve(connection, message)
        finally:
            await connection.close()


def _listen(host: str | None, port: int) -> list[socket.socket]:
    """Sockets that listen at all addresses of a host name, or on all interfaces (None).

    Raises:
        OSError: the name is unknown, the address is not local, or the port is taken.
    """
    if host is None and socket.has_dualstack_ipv6():
        both = socket.AF_INET6
        return [socket.create_server(("", port), family=both, backlog=_BACKLOG, dualstack_ipv6=True)]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    failure = OSError(errno.EADDRNOTAVAIL, "no such address")
    for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
        try:
            sockets.append(socket.create_server(address, family=family, backlog=_BACKLOG))
        except OSError as error:
            failure = error
            # "localhost" has an IPv6 address even where the kernel has no IPv6.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                sockets.clear()
                break
    if not sockets:
        raise failure
    return sockets


# A process's connection, and both ends of its connection to JAX's service, which is also in rank 0.
_EACH = 3

# For the job as a whole: listening sockets, event loops (17 were measured).
_MORE = 32

# Reserved for training: data, checkpoints, collectives.
_TRAINING = 128


def reserve_files(size: int) -> None:
    """Raise this process's limit by the needs of a job of ``size`` processes.

    Training keeps its share. Most systems set a soft limit of 1,024 files and a hard limit of 4,096 or more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    need = _EACH * size + PENDING + _MORE
    opened = len(os.listdir("/dev/fd"))
    least = opened + _TRAINING + need
    wanted = max(soft + need, least)
    try:
        # Root may raise the hard limit as well.
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted, hard if hard == resource.RLIM_INFINITY else max(hard, wanted))
        )
    except (OSError, ValueError) as error:
        if hard < least:
            raise ConfigurationError(
                f"{size} processes need up to {need:,} open files in rank 0. It also has {opened} open, and "
                f"training needs {_TRAINING}, but its hard limit is {hard:,}: raise it (ulimit -Hn)"
            ) from error
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
