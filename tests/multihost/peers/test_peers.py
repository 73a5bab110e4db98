"""Rendezvous and heartbeat timeouts, without JAX."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from joined_peers import join

from zerojax.errors import EXIT_PEER_LOST, AbsentError, JobError, ZeroError, report
from zerojax.multihost import peers
from zerojax.multihost.distributed import free_port
from zerojax.multihost.peers.coordinator import Heartbeat

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("leave_jobs")]


def all_join(*processes, **options):
    """The result for each (rank, size, facts): the peers, or the error."""
    port = free_port()

    def one(process):
        try:
            return join(port, *process, **options)
        except (ZeroError, JobError) as error:
            return error

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def test_all_join_and_leave_together():
    joined = [p for p in all_join((0, 3, {}), (1, 3, {}), (2, 3, {})) if isinstance(p, peers.Peers)]
    assert [(p.rank, p.size) for p in joined] == [(0, 3), (1, 3), (2, 3)]
    left = []
    threads = [threading.Thread(target=lambda p=p: (p.leave(), left.append(p.rank))) for p in joined]
    for thread in threads[:2]:
        thread.start()
    threads[0].join(0.3)
    assert left == [], "somebody left before rank 2 was done"
    threads[2].start()
    for thread in threads:
        thread.join(10)
    assert sorted(left) == [0, 1, 2]


def test_absent_ranks_are_named():
    errors = all_join((0, 4, {}), (2, 4, {}), join_timeout=3)
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, AbsentError)
        assert report(error)[0] == EXIT_PEER_LOST, "a launcher looks for the cause elsewhere"
        assert "ranks 1, 3 of 4 did not join within 3 s" in str(error)


def test_rank_0_is_absent():
    (error,) = all_join((1, 2, {}), join_timeout=0.1)
    assert isinstance(error, AbsentError)
    assert "rank 0 did not respond at 127.0.0.1:" in str(error)


def test_settings_that_differ_are_refused_by_name():
    ours, theirs = {"train.seed": "1", "x": "1"}, {"train.seed": "2", "x": "1", "extra": "3"}
    errors = all_join((0, 3, ours), (1, 3, ours), (2, 3, theirs))
    for error in errors:
        assert isinstance(error, ZeroError)
        assert str(error) == (
            "rank 2 was started with other settings: train.seed is 2 there and 1 on rank 0; "
            "extra is 3 there and not set on rank 0"
        )


def test_a_wrong_number_of_processes():
    errors = all_join((0, 2, {}), (1, 3, {}))
    assert [str(error) for error in errors] == ["rank 1 was started for 3 processes, rank 0 for 2"] * 2


def test_two_of_the_same_rank():
    errors = all_join((0, 3, {}), (1, 3, {}), (1, 3, {}))
    assert all("two processes joined as rank 1" in str(error) for error in errors)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(JobError, match=rf"cannot listen at 127\.0\.0\.1, port {port}: .*in use"):
            join(port, 0, 2)


def test_invalid_connections_are_ignored():
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
    heartbeat = Heartbeat([1, 2], limit=6.0, clock=clock)
    for clock.now in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        assert heartbeat.silent() == []
        heartbeat.hear(1)
    clock.now = 7.0
    assert heartbeat.silent() == [2]
    heartbeat.forget(2)
    assert heartbeat.silent() == []


def test_a_pause_of_this_process_is_not_silence_of_others():
    clock = Clock()
    heartbeat = Heartbeat([1], limit=6.0, clock=clock)
    clock.now = 1000.0
    assert heartbeat.silent() == []
    for clock.now in (1002.0, 1004.0, 1006.0):
        assert heartbeat.silent() == []
    clock.now = 1007.0
    assert heartbeat.silent() == [1]
