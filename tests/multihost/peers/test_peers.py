"""The roll call, and who is missed and when. Without JAX."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from joined_peers import join

from zerojax.errors import JobError, ZeroError
from zerojax.multihost import peers
from zerojax.multihost.distributed import free_port
from zerojax.multihost.peers.heartbeat import Pulse

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("leave_jobs")]


def all_join(*members, **options):
    """What each (rank, size, facts) gets: the peers, or the error."""
    port = free_port()

    def one(member):
        try:
            return join(port, *member, **options)
        except (ZeroError, JobError) as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, members))


def test_all_come_and_leave_together():
    met = [p for p in all_join((0, 3, {}), (1, 3, {}), (2, 3, {})) if isinstance(p, peers.Peers)]
    assert [(p.rank, p.size) for p in met] == [(0, 3), (1, 3), (2, 3)]
    left = []
    threads = [threading.Thread(target=lambda p=p: (p.leave(), left.append(p.rank))) for p in met]
    for thread in threads[:2]:
        thread.start()
    threads[0].join(0.3)
    assert left == [], "somebody left before rank 2 was done"
    threads[2].start()
    for thread in threads:
        thread.join(10)
    assert sorted(left) == [0, 1, 2]


def test_who_never_joins_is_named():
    met = all_join((0, 4, {}), (2, 4, {}), join_timeout=0.5)
    assert [type(error) for error in met] == [JobError, JobError]
    for error in met:
        assert "ranks 1, 3 of 4 did not come within 0.5 s" in str(error)


def test_rank_0_that_never_comes():
    (error,) = all_join((1, 2, {}), join_timeout=0.1)
    assert isinstance(error, JobError)
    assert "rank 0 did not answer at 127.0.0.1:" in str(error)


def test_settings_that_differ_are_refused_by_name():
    ours, theirs = {"train.seed": "1", "x": "1"}, {"train.seed": "2", "x": "1", "extra": "3"}
    met = all_join((0, 3, ours), (1, 3, ours), (2, 3, theirs))
    for error in met:
        assert isinstance(error, ZeroError)
        assert str(error) == (
            "rank 2 was started with other settings: train.seed is 2 there and 1 on rank 0; "
            "extra is 3 there and not set on rank 0"
        )


def test_a_wrong_number_of_processes():
    met = all_join((0, 2, {}), (1, 3, {}))
    assert [str(error) for error in met] == ["rank 1 was told of 3 processes, and rank 0 of 2"] * 2


def test_two_of_the_same_rank():
    met = all_join((0, 3, {}), (1, 3, {}), (1, 3, {}))
    assert all("two processes have come as rank 1" in str(error) for error in met)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(JobError, match=rf"cannot listen at 127\.0\.0\.1, port {port}: .*in use"):
            join(port, 0, 2)


def test_strangers_at_the_door_do_not_matter():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, port, 0, 2)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"[1]\n", b'{"say": "here", "rank": "x"}\n', b""):
            while True:
                try:
                    stranger = socket.create_connection(("127.0.0.1", port))
                    break
                except OSError:
                    continue
            with stranger:
                stranger.sendall(words)
        second = join(port, 1, 2)
        assert first.result().size == second.size == 2


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_silence():
    clock = Clock()
    pulse = Pulse([1, 2], limit=6.0, clock=clock)
    for clock.now in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        assert pulse.silent() == []
        pulse.hear(1)
    clock.now = 7.0
    assert pulse.silent() == [2]
    pulse.forget(2)
    assert pulse.silent() == []


def test_a_pause_of_ones_own_is_nobodys_silence():
    clock = Clock()
    pulse = Pulse([1], limit=6.0, clock=clock)
    clock.now = 1000.0
    assert pulse.silent() == []
    for clock.now in (1002.0, 1004.0, 1006.0):
        assert pulse.silent() == []
    clock.now = 1007.0
    assert pulse.silent() == [1]
