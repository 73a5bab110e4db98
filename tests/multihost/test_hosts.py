"""zerojax.multihost.hosts: what the launchers of several hosts do next."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from queue import Empty
from typing import Any

import pytest

from zerojax.errors import ConfigurationError, JobError
from zerojax.multihost import hosts
from zerojax.multihost.distributed import free_port
from zerojax.multihost.hosts import (
    Cause,
    Event,
    Follower,
    Leader,
    Member,
    Order,
    Place,
    Plan,
    Report,
    Start,
    parsed,
)
from zerojax.multihost.peers import handshake
from zerojax.multihost.supervisor import Outcome

FRESH = Report((1, 2, 5))


def ended(*codes: int, first: int = 0, stopped: bool = False, stands_by: bool = False) -> Report:
    """A report of a host's processes, which have these exit codes."""
    outcomes = (Outcome(f"rank {first + number}", code, stopped) for number, code in enumerate(codes))
    return Report((3, 4, 6), tuple(outcomes), stands_by=stands_by)


def starts(plan: Plan, *reports: Report) -> list[tuple[str, int, int, int]]:
    members = {host: Member(f"host{host}", report) for host, report in enumerate(reports)}
    orders = plan.orders(members)
    return [
        (one.start.coordinator, one.start.first, one.start.count, one.start.size) for one in orders.values()
    ]


def test_each_host_starts_its_ranks():
    plan = Plan(hosts=3, nodes=2, restarts=0)
    assert plan.awaited({0, 2}) == [1]
    assert starts(plan, FRESH, FRESH, FRESH) == [("host0:1", first, 2, 6) for first in (0, 2, 4)]


def test_processes_that_stand_by_begin_if_all_hosts_have_them():
    plan = Plan(2, 1, restarts=2)
    starts(plan, FRESH, FRESH)
    assert plan.after({0: ended(4, stopped=True), 1: ended(137, first=1)}) is None
    stand = ended(4, stands_by=True)
    assert starts(plan, stand, stand)[0][0] == "host0:2"
    assert plan.after({0: ended(1), 1: ended(4, first=1)}) is None
    assert starts(plan, stand, ended(4))[0][0] == "host0:3"


@pytest.mark.parametrize(
    ("restarts", "least", "wanted"),
    [
        (1, 1, [(0, 2, 3), (2, 1, 3)]),
        (0, 1, [None, None]),  # no start follows
        (1, 4, [None, None]),
    ],
)
def test_one_node_of_the_last_host_is_left_out_ahead(restarts: int, least: int, wanted: list[Any]):
    plan = Plan(2, 2, restarts, min_nodes=least, ahead=True)
    orders = plan.orders({0: Member("host0", FRESH), 1: Member("host1", FRESH)})
    fewer = [order.fewer for order in orders.values()]
    assert [one and (one.first, one.count, one.size) for one in fewer] == wanted
    assert {one.coordinator for one in fewer if one is not None} <= {"host0:5"}
    assert [order.start.size for order in orders.values()] == [4, 4]
    others = Plan(2, 2, restarts, min_nodes=least)
    assert others.orders({0: Member("host0", FRESH), 1: Member("host1", FRESH)})[0].fewer is None


def test_the_last_start_has_none_after_it():
    plan = Plan(1, 1, restarts=1)
    members = {0: Member("host0", FRESH)}
    assert plan.orders(members)[0].following == Start("host0:2", 0, 1, 1)
    assert plan.after({0: ended(1)}) is None
    order = plan.orders(members)[0]
    assert (str(order.cause), order.following) == ("rank 0 was lost", None)
    assert plan.after({0: ended(5)}) == 5


@pytest.mark.parametrize(
    ("reports", "code"),
    [
        ({0: ended(0), 1: ended(0)}, 0),
        ({0: ended(75), 1: ended(75)}, 75),
        ({0: ended(4, stopped=True), 1: ended(2)}, 2),
        ({0: replace(ended(143), signals=(15,)), 1: ended(143)}, 143),
        ({0: ended(0)}, 0),  # the launcher of host 1 went away after its processes had ended well
    ],
)
def test_the_job_ends(reports: dict[int, Report], code: int):
    plan = Plan(2, 1, restarts=3)
    starts(plan, FRESH, FRESH)
    assert plan.after(reports) == code


def test_a_lost_host_is_awaited_or_left_out_and_may_come_back():
    lost = {0: ended(4, stopped=True), 2: ended(4, first=2, stopped=True)}
    plan = Plan(3, 1, restarts=2)
    starts(plan, FRESH, FRESH, FRESH)
    assert plan.after(lost) is None
    assert plan.awaited({0, 2}) == [1]

    plan = Plan(3, 1, restarts=2, min_nodes=1)
    starts(plan, FRESH, FRESH, FRESH)
    assert plan.after(lost) is None
    assert plan.awaited({0, 2}) == []
    orders = plan.orders({host: Member(f"host{host}", ended(4)) for host in (0, 2)})
    assert [(one.start.first, one.start.count, one.start.size) for one in orders.values()] == [
        (0, 1, 2),
        (1, 1, 2),
    ]
    assert str(orders[0].cause) == "host 1 was lost"
    assert plan.after({0: ended(1), 2: ended(4, first=1, stopped=True)}) is None
    assert starts(plan, ended(1), FRESH, ended(4)) == [
        ("host1:1", 0, 0, 2),
        ("host1:1", 0, 1, 2),
        ("host1:1", 1, 1, 2),
    ]


def without_host_1(restarts: int = 1, **more: Any) -> Plan:
    """A plan of three hosts that has used a restart to go on without the second one."""
    plan = Plan(3, 1, restarts, min_nodes=1, **more)
    starts(plan, FRESH, FRESH, FRESH)
    assert plan.after({0: ended(4, stopped=True), 2: ended(4, first=2, stopped=True)}) is None
    plan.orders({host: Member(f"host{host}", ended(4)) for host in (0, 2)})
    return plan


def saved(stands_by: bool = False) -> dict[int, Report]:
    return {0: ended(75, stands_by=stands_by), 2: ended(75, first=1, stands_by=stands_by)}


def all_three(plan: Plan, report: Report = FRESH) -> list[Order]:
    reports = [ended(75, stands_by=True), report, ended(75, stands_by=True)]
    return [*plan.orders({host: Member(f"host{host}", one) for host, one in enumerate(reports)}).values()]


def test_a_job_ends_for_a_host_that_it_lacks_and_no_restart_is_used():
    plan = without_host_1(restarts=2)
    assert plan.ask({0, 2}) == set()
    assert plan.ask({0, 1, 2}) == {1}
    assert plan.after(saved()) is None
    # Also if its launcher was only cut off, and has processes that stand by.
    orders = all_three(plan, ended(4, stands_by=True))
    assert [(one.start.first, one.start.size) for one in orders] == [(0, 3), (1, 3), (2, 3)]
    assert str(orders[0].cause) == "host 1 arrived"
    assert plan.ask({0, 1, 2}) == set()
    assert plan.after(saved()) == 75, "nobody has asked this start"


def test_a_host_that_goes_away_again_is_not_awaited():
    plan = without_host_1()
    plan.ask({1, 2})
    assert plan.ask({2}) == set()
    assert plan.after(saved()) is None
    assert plan.awaited({0, 2}) == []


@pytest.mark.parametrize(
    ("new", "others"),
    [
        (ended(1, first=1), ended(4, stopped=True)),
        (ended(2, first=1), ended(2)),  # it has other versions, say
        (ended(143, first=1, stopped=True), ended(4, stopped=True)),
    ],
)
def test_a_host_that_fails_as_it_joins_is_left_out_again(new: Report, others: Report):
    plan = without_host_1()
    plan.ask({1, 2})
    plan.after(saved())
    all_three(plan)
    assert plan.after({0: others, 1: new, 2: others}) is None
    assert [order.start.count for order in all_three(plan)] == [1, 0, 1]
    assert plan.ask({1, 2}) == set(), "it is asked for once"
    plan.came(1)
    assert plan.ask({1, 2}) == {1}, "another launcher of the host is an arrival"


def test_a_host_that_joined_long_ago_is_as_the_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosts, "_ON_TRIAL", 0.0)
    plan = without_host_1(restarts=2)
    plan.ask({1, 2})
    plan.after(saved())
    all_three(plan)
    follows = ended(4, stopped=True)
    assert plan.after({0: ended(1), 1: follows, 2: follows}) is None
    assert [order.start.count for order in all_three(plan, ended(4))] == [0, 1, 1]
    assert plan.after({0: Report((1, 2, 5)), 1: ended(2), 2: follows}) == 2


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_job_that_a_host_has_just_joined_ends(code: int):
    plan = without_host_1()
    plan.ask({1, 2})
    plan.after(saved())
    all_three(plan)
    assert plan.after(dict.fromkeys(range(3), ended(code))) == code


@pytest.mark.parametrize(
    ("reports", "code"),
    [
        ({0: ended(0), 2: ended(0, first=1)}, 0),  # the last step was taken
        ({0: replace(ended(75), signals=(15,)), 2: ended(75, first=1)}, 75),
        ({0: ended(75), 2: ended(3, first=1)}, 3),
        ({0: ended(75), 2: ended(1, first=1)}, 1),  # it could not save, and no restart is left
        ({0: ended(75)}, 75),  # host 2 was lost, and no restart is left
    ],
)
def test_a_job_that_was_asked_ends(reports: dict[int, Report], code: int):
    plan = without_host_1()
    plan.ask({1, 2})
    assert plan.after(reports) == code


def test_a_job_whose_processes_were_told_to_end_for_a_lost_host_starts_again():
    """They have saved, as if a user had asked for that."""
    plan = Plan(2, 1, restarts=1)
    starts(plan, FRESH, FRESH)
    assert plan.after({0: ended(75, stopped=True)}) is None
    assert (
        str(plan.orders({0: Member("host0", FRESH), 1: Member("host1", FRESH)})[0].cause) == "host 1 was lost"
    )


def test_a_host_that_is_lost_while_the_others_save_is_left_out():
    plan = without_host_1(restarts=2)
    plan.ask({1, 2})
    assert plan.after({0: ended(75)}) is None
    assert str(plan.orders({0: Member("host0", FRESH)})[0].cause) == "host 2 was lost"


def test_programs_that_may_not_save_are_not_asked():
    plan = without_host_1(saves=False)
    assert plan.ask({1, 2}) == set()
    assert plan.after(saved()) == 75


def test_processes_that_stand_by_for_more_nodes_do_not_begin():
    plan = Plan(3, 1, restarts=2, min_nodes=1)
    starts(plan, FRESH, FRESH, FRESH)
    stand = ended(4, stopped=True, stands_by=True)
    assert plan.after({0: stand, 2: stand}) is None
    orders = plan.orders({host: Member(f"host{host}", stand) for host in (0, 2)})
    assert [(one.start.coordinator, one.start.size) for one in orders.values()] == [("host0:3", 2)] * 2


def test_the_node_that_failed_is_left_out():
    plan = Plan(2, 2, restarts=1, min_nodes=1)
    starts(plan, FRESH, FRESH)
    other = Report((3, 4, 6), (Outcome("rank 2", 4, True), Outcome("rank 3", 1, False)))
    assert plan.after({0: ended(4, 4, stopped=True), 1: other}) is None
    assert [count for _, _, count, _ in starts(plan, ended(4), ended(4))] == [2, 1]


def test_as_many_failed_nodes_go_on_as_are_needed():
    plan = Plan(2, 2, restarts=1, min_nodes=3)
    starts(plan, FRESH, FRESH)
    assert plan.after({0: ended(1, 1), 1: ended(4, 1, first=2)}) is None
    assert sum(count for _, _, count, _ in starts(plan, ended(1, 1), ended(4, 1))) == 3


def test_messages_that_are_no_reports_are_refused():
    report = ended(137, 4)
    assert parsed(Report, {**asdict(report)}) == report
    order = Order(Start("a:1", 0, 1, 2), None, Cause(Event.LOST, "host 1"))
    assert parsed(Order, json.loads(json.dumps(asdict(order)))) == order
    for wrong in (None, [], {}, {"ports": [1]}, {"ports": ["a", 2, 3]}, asdict(report) | {"more": 1}):
        assert parsed(Report, wrong) is None


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes launchers that meet at one address, and wait 20 seconds for each other; and closes them."""
    port, made = free_port(), list[Leader | Follower]()
    run = asyncio.run_coroutine_threadsafe
    monkeypatch.setattr(hosts._Served, "_do", lambda one, work: run(work, one._loop).result(20))

    def make(index: int, plan: Plan | None = None, **more: Any) -> Leader | Follower:
        standard: dict[str, Any] = {
            "token": "0123456789abcdef",
            "settings": {"nodes": "1"},
            "join_timeout": 20.0,
        }
        place = Place("127.0.0.1", port, ("127.0.0.1", port), index, 2, **(standard | more))
        made.append(Leader(place, plan or Plan(2, 1, 3)) if index == 0 else Follower(place))
        return made[-1]

    yield make
    for one in made:
        one.close()


def all_next(*steps: tuple[Leader | Follower, Report]) -> list[Any]:
    with ThreadPoolExecutor(len(steps)) as threads:
        return [*threads.map(lambda step: step[0].next(step[1]), steps)]


def test_two_launchers_start_restart_and_end_together(meet: Callable[..., Any]):
    leader, follower = meet(0), meet(1)
    first, second = all_next((leader, FRESH), (follower, FRESH))
    assert (first.start.first, second.start.first) == (0, 1)
    assert first.start.coordinator == second.start.coordinator == "127.0.0.1:1"
    failed = threading.Thread(target=follower.next, args=(ended(137, first=1),))
    failed.start()
    assert leader.events.get(timeout=10) == ("lost", 0), "the other host's processes end, even if they hang"
    assert str(leader.next(ended(143, stopped=True)).cause) == "rank 1 was lost"
    failed.join()
    assert all_next((leader, ended(75)), (follower, ended(75, first=1))) == [75, 75]


def test_a_failure_here_ends_the_others(meet: Callable[..., Any]):
    leader, follower = meet(0), meet(1)
    all_next((leader, FRESH), (follower, FRESH))
    with pytest.raises(Empty):
        follower.events.get(timeout=0.05)
    waits = threading.Thread(target=leader.next, args=(ended(1),))
    waits.start()
    assert follower.events.get(timeout=10) == ("lost", 0)
    assert str(follower.next(ended(143, first=1, stopped=True)).cause) == "rank 0 was lost"
    waits.join()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_host_that_is_lost_before_its_process_has_joined_ends_the_others(
    meet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, replaced: bool
):
    monkeypatch.setattr(hosts, "_BROKEN", 0.1)
    leader, follower = meet(0, Plan(2, 1, 1, min_nodes=1)), meet(1)
    all_next((leader, FRESH), (follower, FRESH))
    follower.close()
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(meet(1).next, FRESH) if replaced else None
        assert leader.events.get(timeout=10) == ("lost", 0)
        order = leader.next(ended(143, stopped=True))
        assert str(order.cause) == "host 1 was lost"
        assert waits is None or waits.result().cause == order.cause


def test_processes_that_have_joined_do_not_end_with_the_launcher_of_another_host(
    meet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hosts, "_BROKEN", 0.1)
    leader, follower = meet(0), meet(1)
    all_next((leader, FRESH), (follower, FRESH))
    monkeypatch.setattr(leader._loop, "time", lambda: time.monotonic() + 20.0)
    follower.close()
    with pytest.raises(Empty):
        leader.events.get(timeout=0.5)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("joined", [False, True])
def test_launchers_connect_again_while_their_processes_run(
    meet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, joined: bool, side: int
):
    monkeypatch.setattr(hosts, "_BROKEN", 0.7)
    both = meet(0, join_timeout=0.5 if joined else 20.0), meet(1, join_timeout=0.5 if joined else 20.0)
    leader, follower = both
    all_next((leader, FRESH), (follower, FRESH))
    time.sleep(0.6 if joined else 0)
    both[side]._do(cut_off(both[side]))
    for one in both:
        with pytest.raises(Empty):
            one.events.get(timeout=0.8)
    assert not leader._plan._gone
    failed = threading.Thread(target=leader.next, args=(ended(1),))
    failed.start()
    assert follower.events.get(timeout=10) == ("lost", 0)
    assert str(follower.next(ended(143, first=1, stopped=True)).cause) == "rank 0 was lost"
    failed.join()


@pytest.mark.parametrize("joined", [False, True])
def test_processes_end_if_the_leader_is_lost_before_they_have_joined(
    meet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, joined: bool
):
    """Later they would notice that by themselves."""
    monkeypatch.setattr(hosts, "_BROKEN", 0.1)
    leader, follower = meet(0), meet(1)
    all_next((leader, FRESH), (follower, FRESH))
    monkeypatch.setattr(follower._loop, "time", lambda: time.monotonic() + (20.0 if joined else 0.0))
    leader._do(vanish(leader))
    if joined:
        with pytest.raises(Empty):
            follower.events.get(timeout=0.5)
        waits = threading.Thread(target=meet(0).next, args=(FRESH,))
        waits.start()
        assert follower.events.get(timeout=10) == ("lost", 0), "another leader starts the job again"
        assert str(follower.next(ended(4, first=1)).cause) == "host 0 was lost"
        waits.join()
    else:
        assert follower.events.get(timeout=10) == ("lost", 0)


@pytest.mark.parametrize(
    ("stage", "start", "response"),
    [("runs", "", "here"), ("runs", "another:1", "over"), ("new", "", "busy"), ("ended", "", "busy")],
)
def test_a_second_connection_of_a_host(meet: Callable[..., Any], stage: str, start: str, response: str):
    """The first one may have broken unnoticed. The host proves that it is the same by its start."""
    leader, follower = meet(0), meet(1)
    all_next((leader, FRESH), (follower, FRESH))
    before = leader._others[1]

    async def connect() -> Any:
        connection = await handshake.reach("127.0.0.1", leader._place.port, leader._place.token)
        assert connection is not None
        start_of = {"start": start or follower._start}
        connection.send("host", **(follower._hello | {"stage": stage} | start_of))
        try:
            return await connection.receive(), leader._others[1] is before
        finally:
            await connection.close()

    assert leader._do(connect()) == ({"say": response}, response != "here")
    assert all_next((leader, ended(75)), (follower, ended(75, first=1))) == [75, 75]


def test_the_job_ends_although_a_process_here_still_runs(meet: Callable[..., Any]):
    leader, follower = meet(0), meet(1)
    all_next((leader, FRESH), (follower, FRESH))
    leader.close()
    assert follower.events.get(timeout=10) == ("lost", 0)
    assert follower.next(ended(143, first=1, stopped=True)) == 1


def test_another_launcher_takes_the_place_of_a_lost_one(
    meet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hosts, "_BROKEN", 0.5)
    leader, follower = meet(0), meet(1)
    all_next((leader, FRESH), (follower, FRESH))
    follower.close()
    first, second = all_next((leader, ended(4)), (meet(1), FRESH))
    assert str(first.cause) == str(second.cause) == "host 1 was lost"
    assert (first.start.size, second.start.first) == (2, 1)
    with pytest.raises(Empty):
        leader.events.get(timeout=0.7)


@pytest.mark.parametrize("left_out", [False, True])
def test_a_launcher_that_comes_later_joins_a_job_that_goes_on(
    meet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, left_out: bool
):
    """The launcher of the host was lost, or has stayed after its process had failed."""
    monkeypatch.setattr(hosts, "_ASK_EVERY", 0.02)
    monkeypatch.setattr(hosts, "_BROKEN", 0.1)
    leader, follower = meet(0, Plan(2, 1, restarts=1, min_nodes=1)), meet(1)
    all_next((leader, FRESH), (follower, FRESH))
    if left_out:
        all_next((leader, ended(4)), (follower, ended(1, first=1)))
        follower.close()
    else:
        follower.close()
        leader.next(ended(4))
    with ThreadPoolExecutor(1) as threads:
        later = meet(1)
        waits = threads.submit(later.next, FRESH)
        try:
            assert leader.events.get(timeout=10) == ("join", 0)
            order = leader.next(ended(75))
        finally:
            leader.close()
        assert str(order.cause) == str(waits.result().cause) == "host 1 arrived"
    assert (order.start.size, waits.result().start.first) == (2, 1)


async def cut_off(one: Leader | Follower) -> None:
    found = [one._connection] if isinstance(one, Follower) else [x.connection for x in one._others.values()]
    for connection in found:
        assert connection is not None
        connection._writer.transport.abort()


async def vanish(leader: Leader) -> None:
    """End a leader's connections, as if its process had been killed."""
    leader._listener.close()
    await cut_off(leader)


def test_another_leader_continues_the_job(meet: Callable[..., Any]):
    leader, follower = meet(0), meet(1)
    all_next((leader, FRESH), (follower, FRESH))
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(follower.next, ended(4, first=1))
        leader._do(vanish(leader))
        order = meet(0).next(FRESH)
        assert str(order.cause) == str(waits.result().cause) == "host 0 was lost"


def test_launchers_that_do_not_fit_are_refused(meet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handshake, "_OLD_JOB", 0.1)
    meet(0, settings={"nodes": "2"})
    with pytest.raises(ConfigurationError, match="host 1 was started with nodes 1, host 0 with 2"):
        meet(1).next(FRESH)
    with pytest.raises(ConfigurationError, match="does not know this launcher's token"):
        meet(1, token="another token of 16").next(FRESH)


def test_who_does_not_come_is_named(meet: Callable[..., Any]):
    with pytest.raises(JobError, match=r"host 1 of 2 did not join within 0\.1 s"):
        meet(0, join_timeout=0.1).next(FRESH)


def test_a_leader_that_is_not_there_is_named(meet: Callable[..., Any]):
    with pytest.raises(JobError, match=r"the launcher of host 0 did not admit this host .* within 0\.1 s"):
        meet(1, join_timeout=0.1).next(FRESH)
