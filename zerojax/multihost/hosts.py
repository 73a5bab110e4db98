"""The launchers of a job on several hosts: one on each, which start the job's processes together.

The launcher of host 0 is the leader. All others connect to it, and prove that they know the job's token. It
tells each host which ranks to start. When they have ended, every host reports how, and the leader decides
whether the job is done or starts again. A host whose connection breaks is lost with its processes. A launcher
with its index may join at any later time. If the job goes on without a host whose launcher then arrives, the
job saves, ends, and starts again with that host. If the leader is lost, the others keep their memory and wait
for a new one.
"""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from queue import SimpleQueue
from typing import Any, Literal, Protocol

import dacite

from zerojax.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_WRONG_USE,
    NO_RESTART,
    ConfigurationError,
    JobError,
)
from zerojax.log import logger
from zerojax.multihost.peers.handshake import VARIABLE, reach
from zerojax.multihost.peers.listener import Listener
from zerojax.multihost.peers.messages import SHORT, Connection, Message, printable
from zerojax.multihost.supervisor import Events, Outcome, Result

# Seconds that a host may take to connect again and report, after its connection broke.
_BROKEN = 5.0
# Seconds between looks at what has arrived.
_LOOK_EVERY = 0.02
# Seconds between requests to end for a host that joins, because a run that has just started ignores them.
_ASK_EVERY = 2.0
# Seconds after a host has joined in which it leaves again if the job fails. Who is at fault is often unknown,
# as when a process does not join the others in time.
_ON_TRIAL = 600.0
# Messages to all launchers that are events for the supervisors.
_EVENTS = {"end": "lost", "join": "join"}


@dataclass(frozen=True)
class Start:
    """A start of the job's processes, for one host.

    Attributes:
        coordinator: "host:port" of rank 0.
        first: the rank of the host's first process.
        count: processes of the host; 0 if the job goes on without it.
        size: processes of all hosts.
    """

    coordinator: str
    first: int
    count: int
    size: int


class Event(StrEnum):
    """Why all processes of a start have ended."""

    LOST = "lost"
    ARRIVED = "arrived"


@dataclass(frozen=True)
class Cause:
    """Why a start has ended: as text, "rank 1 was lost" or "host 1 arrived".

    Attributes:
        event: what has happened.
        who: the hosts or ranks.
    """

    event: Event
    who: str

    def __str__(self) -> str:
        return f"{self.who} was lost" if self.event is Event.LOST else f"{self.who} arrived"


@dataclass(frozen=True)
class Order:
    """What a host does next: a start, and the ones that may come after it.

    Attributes:
        start: now.
        following: after a failure, for processes that stand by; None if the job is not restarted.
        cause: why the start before has ended; None at the first start.
        fewer: with one node less, for processes that compile its program; None if that is not asked for.
    """

    start: Start
    following: Start | None
    cause: Cause | None = None
    fewer: Start | None = None


@dataclass(frozen=True)
class Report:
    """How a start ended on one host, and what the host has for the next one.

    Attributes:
        outcomes: of its processes.
        signals: that its launcher got.
        stands_by: whether all of its processes that stand by can begin.
        ports: free ones, for rank 0 of each start in an ``Order``.
    """

    ports: tuple[int, int, int]
    outcomes: tuple[Outcome, ...] = ()
    signals: tuple[int, ...] = ()
    stands_by: bool = False

    @property
    def failed(self) -> bool:
        """Whether the other hosts' processes cannot go on."""
        return any(one.code not in (EXIT_OK, EXIT_STOPPED) for one in self.outcomes)


def parsed[T](kind: type[T], message: Any) -> T | None:
    """A received message as an object; None if it is invalid."""
    try:
        return dacite.from_dict(kind, message, dacite.Config(cast=[tuple, Event], strict=True))
    except (dacite.DaciteError, AttributeError, TypeError):
        return None


class Launchers(Protocol):
    """The launchers of a job, as one of them sees them.

    Attributes:
        events: for the ``Supervisor`` of the start that ``next`` has returned.
    """

    events: Events

    def next(self, report: Report) -> Order | int:
        """What this host does next, or the job's exit code.

        Args:
            report: how the start before ended here.

        Raises:
            ConfigurationError: the launchers do not fit each other.
            JobError: not all hosts came in time.
        """
        ...

    def close(self) -> None:
        """Leave the others."""
        ...


@dataclass(frozen=True)
class Member:
    """A host that is here: the address at which the others reach it, and its last report."""

    address: str
    report: Report


class Plan:
    """What a job does next, from the reports of its hosts.

    Args:
        hosts: their number.
        nodes: processes of each.
        restarts: how often the job may start again.
        min_nodes: the fewest processes to go on with after a failure; None if all are needed.
        saves: whether the processes save when they are asked to, so that a host can join.
        ahead: whether other processes compile the program of one node less.
    """

    def __init__(
        self,
        hosts: int,
        nodes: int,
        restarts: int,
        min_nodes: int | None = None,
        saves: bool = True,
        ahead: bool = False,
    ) -> None:
        self._all, self._nodes, self._left, self._least = hosts * nodes, nodes, restarts, min_nodes
        self._saves, self._ahead = saves, ahead
        self._counts = dict.fromkeys(range(hosts), nodes)
        self._gone: set[int] = set()  # hosts that were lost and have not come back
        self._asked: set[int] = set()  # hosts for which this start ends
        self._joined: set[int] = set()  # hosts that the start before lacked
        self._trial_ends = 0.0
        self._following: dict[int, Start] = {}
        self._cause: Cause | None = None

    def after(self, reports: Mapping[int, Report]) -> int | None:
        """The job's exit code if it ends now, else None. A host without a report is lost."""
        result = self._result(reports)
        gone = {host for host, count in self._counts.items() if count} - reports.keys()
        if self._asked and result.code == EXIT_STOPPED and not (gone or result.signals):
            self._left += 1  # for a failure of the hosts that join
            self._cause = Cause(Event.ARRIVED, _names(self._asked))
        elif result.signals or not self._left or self._is_final(result):
            return result.code
        else:
            self._gone |= gone
            # The loss of hosts is why the others ended.
            blamed = tuple(f"host {host}" for host in sorted(gone or self._on_trial))
            self._restart_without(blamed or result.failed)
        return None

    def _is_final(self, result: Result) -> bool:
        """Whether a job that has ended in this way would not go on if it started again."""
        if result.code == EXIT_STOPPED:  # on request, unless this was because of a host
            return not (self._asked or all(one.stopped for one in result.outcomes))
        if result.code == EXIT_WRONG_USE:  # of the hosts that were here before, unless a new one differs
            return not self._on_trial
        return result.code in (EXIT_OK, *NO_RESTART)

    @property
    def _on_trial(self) -> set[int]:
        """Hosts that have joined, and leave again if the job fails now."""
        return self._joined if time.monotonic() < self._trial_ends else set()

    def _result(self, reports: Mapping[int, Report]) -> Result:
        """How a start ended. Processes that have saved for a host do not count beside others."""
        outcomes = [one for _, report in sorted(reports.items()) for one in report.outcomes]
        signals = tuple(number for report in reports.values() for number in report.signals)
        saved = EXIT_STOPPED if self._asked and not signals else None
        return Result(tuple([one for one in outcomes if one.code != saved] or outcomes), signals)

    def _restart_without(self, failed: Sequence[str]) -> None:
        """Use a restart, for the hosts or ranks that remain if others may be left out."""
        self._left -= 1
        self._cause = Cause(Event.LOST, printable(", ".join(failed) or "a process", SHORT))
        if self._least is not None:
            self._leave_out({*failed}, self._least)
        now = sum(self._counts.values())
        logger.warning(f"restarting with {now} of {self._all} nodes; {self._left} restarts left")

    def continue_after(self, lost: str) -> None:
        """Let the first start continue a job whose leader was lost."""
        self._cause = Cause(Event.LOST, lost)

    def came(self, host: int) -> None:
        """Note a new launcher of a host; the one before it is lost, if there was one."""
        self._gone.add(host)

    def ask(self, here: Collection[int]) -> set[int]:
        """The hosts that are here and that the running job lacks: it is asked to save and end for them."""
        hosts = self._absent & {*here} if self._saves else set[int]()
        self._asked |= hosts
        return hosts

    @property
    def _absent(self) -> set[int]:
        """Hosts that were lost, and without which the job goes on."""
        return {host for host in self._gone if self._counts[host] < self._nodes}

    def _leave_out(self, failed: Collection[str], least: int) -> None:
        """Go on without what has failed, but with at least so many nodes."""
        before, rank = dict(self._counts), 0
        for host, count in before.items():
            ranks = {f"rank {rank + number}" for number in range(count)}
            self._counts[host] = 0 if f"host {host}" in failed else len(ranks - {*failed})
            rank += count
        missing = least - sum(self._counts.values())
        for host, count in before.items():
            back = min(max(missing, 0), count - self._counts[host])
            self._counts[host] += back
            missing -= back
        if self._counts != before:
            self._following = {}

    def awaited(self, here: Collection[int]) -> list[int]:
        """The hosts without which the job does not start."""
        return [host for host, count in self._counts.items() if count and host not in here]

    def orders(self, members: Mapping[int, Member]) -> dict[int, Order]:
        """What each host that is here does next."""
        self._asked, self._joined = set(), self._absent & members.keys()
        self._trial_ends = time.monotonic() + _ON_TRIAL
        self._gone -= members.keys()
        if self._joined:
            self._counts |= dict.fromkeys(self._joined, self._nodes)
            self._following = {}
            now = sum(self._counts.values())
            logger.warning(f"{_names(self._joined)} joins: starting again with {now} of {self._all} nodes")
        first = next(members[host] for host, count in self._counts.items() if count)
        now, later, ahead = (f"{first.address}:{port}" for port in first.report.ports)
        starts = self._following if all(one.report.stands_by for one in members.values()) else {}
        starts = starts or _starts(now, self._counts)
        self._following = _starts(later, self._counts) if self._left else {}
        fewer = _starts(ahead, self._one_fewer())
        return {
            host: Order(starts[host], self._following.get(host), self._cause, fewer.get(host))
            for host in members
        }

    def _one_fewer(self) -> dict[int, int]:
        """The nodes of each host if one node of the last is lost; none if nothing is compiled for them."""
        nodes = sum(self._counts.values())
        if not (self._ahead and self._left and self._least is not None and nodes > self._least):
            return {}
        last = max(host for host, count in self._counts.items() if count)
        return self._counts | {last: self._counts[last] - 1}


def _starts(coordinator: str, counts: Mapping[int, int]) -> dict[int, Start]:
    size, first, starts = sum(counts.values()), 0, dict[int, Start]()
    for host, count in counts.items():
        starts[host] = Start(coordinator, first, count, size)
        first += count
    return starts


def _names(hosts: Collection[int]) -> str:
    """Hosts as words: "host 1", or "hosts 1, 2"."""
    return f"host{'s' if len(hosts) > 1 else ''} {', '.join(map(str, sorted(hosts)))}"


class Alone:
    """The launcher of a job on one host."""

    def __init__(self, plan: Plan) -> None:
        self.events: Events = SimpleQueue()
        self._plan, self._begun = plan, False

    def next(self, report: Report) -> Order | int:
        """What this host does next, or the job's exit code."""
        if self._begun and (code := self._plan.after({0: report})) is not None:
            return code
        self._begun, self.events = True, SimpleQueue()
        return self._plan.orders({0: Member("127.0.0.1", report)})[0]

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Place:
    """Where the launchers of a job on several hosts meet.

    Attributes:
        host: of the leader, as the others reach it.
        port: of the leader.
        listen: the address and port at which the leader listens; None for all addresses.
        index: of this host.
        hosts: their number.
        token: of the job; empty if none is needed.
        settings: what must be the same on all hosts, by name.
        join_timeout: seconds to wait for all hosts, or for a new leader.
    """

    host: str
    port: int
    listen: tuple[str | None, int]
    index: int
    hosts: int
    token: str
    settings: Mapping[str, str]
    join_timeout: float = 300.0


class _Served(ABC):
    """Connections that another thread serves."""

    def __init__(self, place: Place) -> None:
        self.events: Events = SimpleQueue()
        self._place = place
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="zerojax hosts", daemon=True)
        self._thread.start()

    def _do[T](self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def next(self, report: Report) -> Order | int:
        """What this host does next, or the job's exit code."""
        return self._do(self._next(report))

    @abstractmethod
    async def _next(self, report: Report) -> Order | int: ...

    @abstractmethod
    async def _close(self) -> None:
        """Close the connections."""

    def close(self) -> None:
        """Leave the others."""
        if self._loop.is_closed():
            return
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass
class _Other:
    """Another host that is here, in the leader."""

    connection: Connection
    report: Report
    ended: bool  # whether the report is of the last start
    begun: bool = False  # whether this connection had its order


class Leader(_Served):
    """The launcher of host 0, which decides.

    Raises:
        JobError: it cannot listen.
    """

    def __init__(self, place: Place, plan: Plan) -> None:
        super().__init__(place)
        self._plan = plan
        self._others: dict[int, _Other] = {}
        self._began: set[int] = set()  # the hosts of the last start
        self._coordinator = ""  # of the last start
        self._joined_by = 0.0  # when its processes have joined, or have given up
        self._listener = Listener(place.token, self._serve)
        try:
            self._do(self._open())
        except OSError as error:
            self.close()
            raise JobError(
                f"cannot listen at {place.listen[0] or 'any address'}, port {place.listen[1]} "
                f"({error.strerror or error}): choose another port for the coordinator"
            ) from error

    async def _open(self) -> None:
        self._asking = asyncio.ensure_future(self._ask())
        self._listener.open(*self._place.listen)

    async def _ask(self) -> None:
        """Ask all processes to save and end while a host that the job lacks is here."""
        said = set[int]()
        while True:
            await asyncio.sleep(_ASK_EVERY)
            if (hosts := self._plan.ask(self._others)) and hosts != said:
                logger.warning(f"{_names(hosts)} arrived: the job saves, to start again with all")
            if said := hosts:
                self._tell_all("join")

    async def _next(self, report: Report) -> Order | int:
        if self._began and (code := self._plan.after({0: report, **await self._reports(report)})) is not None:
            self._tell_all("exit", code=code)
            return code
        await self._wait_for_hosts()
        if not self._began and any(one.ended for one in self._others.values()):
            self._plan.continue_after("host 0")
        members = {host: Member(one.connection.address, one.report) for host, one in self._others.items()}
        orders = self._plan.orders({0: Member(self._place.host, report), **members})
        self._began, self.events = {*orders}, SimpleQueue()
        self._coordinator = orders[0].start.coordinator
        self._joined_by = self._loop.time() + self._place.join_timeout
        for host, one in self._others.items():
            one.begun, one.ended = True, False
            one.connection.send("begin", order=asdict(orders[host]))
        return orders[0]

    async def _reports(self, own: Report) -> dict[int, Report]:
        """The reports of the other hosts, as far as they are not lost."""
        if own.failed:
            self._tell_all("end")
        missing, broken = self._began - {0}, dict[int, float]()
        while missing:
            await asyncio.sleep(_LOOK_EVERY)
            for host in [*missing]:
                one, now = self._others.get(host), self._loop.time()
                gone = one is None and now > broken.setdefault(host, now) + _BROKEN
                if gone or (one is not None and (one.ended or not one.begun)):
                    missing.discard(host)
        return {host: one.report for host, one in self._others.items() if one.ended}

    async def _wait_for_hosts(self) -> None:
        limit, said = self._loop.time() + self._place.join_timeout, False
        while absent := self._plan.awaited({0, *self._others}):
            names = _names(absent)
            if not said:
                logger.warning(f"waiting for the launcher of {names}")
                said = True
            if self._loop.time() > limit:
                raise JobError(
                    f"{names} of {self._place.hosts} did not join within {self._place.join_timeout:g} s: is "
                    f"`zerojax launch` started there, and can it reach {self._place.host}:{self._place.port}?"
                )
            await asyncio.sleep(_LOOK_EVERY)

    async def _serve(self, connection: Connection, hello: Message) -> None:
        """Serve the launcher of another host until its connection ends."""
        match hello:
            case {
                "say": "host",
                "host": int(host),
                "settings": dict(settings),
                "stage": stage,
                "start": start,
            }:
                report = parsed(Report, hello.get("report"))
            case _:
                return
        if report is None or not 0 < host < self._place.hosts:
            connection.send("refused", why=f"host {host}: there are hosts 1 to {self._place.hosts - 1}")
        elif why := self._difference(settings):
            connection.send("refused", why=f"host {host} {why}")
        elif stage == "runs" and start != self._coordinator:
            connection.send("over")
        elif stage != "runs" and host in self._others:
            connection.send("busy")  # or it was here a moment ago, and its connection has broken unnoticed
        else:
            if stage == "new":
                self._plan.came(host)
            if broken := self._others.pop(host, None):
                await broken.connection.close()
            connection.keep_alive()
            connection.send("here")
            await self._stay(host, _Other(connection, report, stage == "ended", stage == "runs"))

    async def _stay(self, host: int, other: _Other) -> None:
        """Serve the launcher of another host that is here."""
        self._others[host] = other
        await self._receive(other)
        if self._others.get(host) is other:
            del self._others[host]
        if other.begun and not other.ended and self._loop.time() < self._joined_by:
            self._loop.call_later(_BROKEN, self._lose, host)

    def _lose(self, host: int) -> None:
        """End a start that lacks a host. Processes that have joined would notice its loss by themselves."""
        one = self._others.get(host)
        if not (one and (one.begun or one.ended)):
            self._tell_all("end")

    def _difference(self, theirs: Mapping[str, Any]) -> str:
        own = self._place.settings
        return "; ".join(
            f"was started with {name} {printable(str(theirs.get(name)), SHORT)}, host 0 with {own[name]}"
            for name in own
            if theirs.get(name) != own[name]
        )

    async def _receive(self, other: _Other) -> None:
        while isinstance(message := await other.connection.receive(), dict):
            if (report := parsed(Report, message.get("report"))) is None:
                return
            other.report, other.ended = report, True
            if report.failed:
                self._tell_all("end")

    def _tell_all(self, say: str, **more: Any) -> None:
        """Tell all launchers; some messages are an event for this one."""
        if say in _EVENTS:
            self.events.put((_EVENTS[say], 0))
        for one in self._others.values():
            one.connection.send(say, **more)

    async def _close(self) -> None:
        self._asking.cancel()
        self._listener.close()
        self._tell_all("exit", code=EXIT_FAILED)  # unless they have their code already
        for one in [*self._others.values()]:
            await one.connection.close()


class Follower(_Served):
    """The launcher of another host."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._connection: Connection | None = None
        self._inbox = asyncio.Queue[Message | None]()
        self._hello: Message = {}
        self._start = ""  # the coordinator of the last start
        self._watching: asyncio.Task[None] | None = None

    async def _next(self, report: Report) -> Order | int:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        self._introduce("ended" if self._start else "new", report)
        if self._connection is not None:
            self._connection.send("report", report=asdict(report))
        try:
            message = await self._hear(self._place.join_timeout)
        except TimeoutError:
            place = self._place
            raise JobError(
                f"the launcher of host 0 did not admit this host at {place.host}:{place.port} within "
                f"{place.join_timeout:g} s. Is it started, can this host reach it, and has no other launcher "
                f"the index {place.index}?"
            ) from None
        match message:
            case {"say": "begin", "order": order} if found := parsed(Order, order):
                self._start = found.start.coordinator
                self._introduce("runs", report)
                self._watching = asyncio.create_task(self._watch())
                return found
            case {"say": "exit", "code": int(code)}:
                return code
            case {"why": str(why)}:
                raise ConfigurationError(printable(why))
        raise JobError("the launcher of host 0 has sent an invalid message: are the versions equal?")

    def _introduce(self, stage: Literal["new", "runs", "ended"], report: Report) -> None:
        """Set what this host says when it connects."""
        about = {"settings": dict(self._place.settings), "report": asdict(report)}
        self._hello = {"host": self._place.index, "stage": stage, "start": self._start, **about}

    async def _watch(self) -> None:
        """End this host's processes if the leader continues without them.

        Also if the leader is lost before they have joined each other. Later they notice that themselves.
        """
        joined_by, message = self._loop.time() + self._place.join_timeout, None
        while message is None:
            with suppress(TimeoutError, ConfigurationError):
                message = await self._hear(_BROKEN)
            if self._loop.time() < joined_by:
                break
        self.events.put(("lost", 0))
        if message is not None and message["say"] == "exit":
            self._inbox.put_nowait(message)
        else:
            self._connection = None

    async def _hear(self, patience: float) -> Message:
        """The leader's next message. Connects to it, once there is one, also if the connection has broken.

        Raises:
            ConfigurationError: it does not know the job's token.
            TimeoutError: this has taken more seconds than ``patience``.
        """
        limit = self._loop.time() + patience
        while True:
            if self._connection is None:
                async with asyncio.timeout_at(limit):
                    self._connection = await self._join()
            match await self._inbox.get():
                case {"say": "here"}:
                    continue
                case {"say": "busy"}:
                    await asyncio.sleep(1)
                case None:
                    logger.warning("the connection to the launcher of host 0 has ended; connecting again")
                    limit = self._loop.time() + patience
                case message:
                    return message
            self._connection = None

    async def _join(self) -> Connection:
        """Connect to the leader, once there is one."""
        place = self._place
        connection = await reach(place.host, place.port, place.token)
        if connection is None:
            raise ConfigurationError(
                f"the server at {place.host}:{place.port} does not know this launcher's token: the hosts of "
                f"a job need the same {VARIABLE} (docs/clusters.md, Who can join)"
            )
        connection.keep_alive()
        connection.send("host", **self._hello)
        self._inbox = asyncio.Queue()
        self._reader = asyncio.ensure_future(self._read(connection, self._inbox))
        return connection

    async def _read(self, connection: Connection, inbox: "asyncio.Queue[Message | None]") -> None:
        while isinstance(message := await connection.receive(), dict):
            if kind := _EVENTS.get(message["say"]):
                self.events.put((kind, 0))
                continue
            if message["say"] == "begin":
                self.events = SimpleQueue()
            inbox.put_nowait(message)
            if message["say"] == "exit":
                return
        inbox.put_nowait(None)
        await connection.close()

    async def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._connection is not None:
            await self._connection.close()
