"""Only processes that know the token join a job, and its traffic does not reveal the token."""

import asyncio
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from joined_peers import join

from zerojax.errors import JobError, ZeroError
from zerojax.multihost.distributed import free_port
from zerojax.multihost.peers.handshake import admit, introduce
from zerojax.multihost.peers.messages import Connection, parse

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("leave_jobs")]

TOKEN, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4


async def pair():
    ends = socket.socketpair()
    return [Connection(*await asyncio.open_connection(sock=end)) for end in ends]


async def shake_hands(coordinator_token, client_token):
    coordinator, client = await pair()
    try:
        return await asyncio.gather(admit(coordinator, coordinator_token), introduce(client, client_token))
    finally:
        await coordinator.close()
        await client.close()


@pytest.mark.parametrize(
    ("coordinator", "client", "both"),
    [
        (TOKEN, TOKEN, True),
        ("", "", True),
        (TOKEN, OTHER, False),
        (TOKEN, "", False),
        ("", TOKEN, False),
        (TOKEN, TOKEN[:-1], False),
    ],
)
def test_both_know_the_token(coordinator, client, both):
    assert asyncio.run(shake_hands(coordinator, client)) == [both, both]


class Tap:
    """A proxy between two processes that records their traffic."""

    def __init__(self, port):
        self.port = free_port()
        self.heard = []
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        near, _ = self._listening.accept()
        far = socket.create_connection(("127.0.0.1", self._to))
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source, target):
        while data := source.recv(1 << 16):
            self.heard.append((source.getsockname()[1] == self.port, data))
            target.sendall(data)
        target.close()

    def close(self):
        self._listening.close()


def frames(data):
    """The messages in some bytes."""
    while data:
        size = struct.unpack(">BI", data[:5])[1]
        message = parse(data[5 : 5 + size])
        assert message is not None
        yield message
        data = data[5 + size :]


def receive_frame(stranger):
    size = struct.unpack(">BI", stranger.recv(5, socket.MSG_WAITALL))[1]
    message = parse(stranger.recv(size, socket.MSG_WAITALL))
    assert message is not None
    return message


def when_it_listens(port):
    """A connection to a process that may not have opened its port yet."""
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        time.sleep(0.01)


def answer_again(port, heard):
    """The reply to a replay of what a process of the job has sent."""
    with when_it_listens(port) as stranger:
        receive_frame(stranger)
        stranger.sendall(heard)
        return receive_frame(stranger)


def test_traffic_is_useless_to_an_eavesdropper():
    """The token is never sent, and recorded traffic cannot be replayed."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, port, 0, 3, token=TOKEN)
        when_it_listens(port).close()
        tap = Tap(port)
        second = pool.submit(join, tap.port, 1, 3, token=TOKEN)
        while not any(b'"here"' in data for _, data in tap.heard):
            time.sleep(0.01)
        said = b"".join(data for from_client, data in tap.heard if from_client)
        assert [message["say"] for message in frames(said)] == ["answer", "here"]
        assert answer_again(port, said)["say"] == "refused"
        third = join(port, 2, 3, token=TOKEN)
        assert [p.rank for p in (first.result(), second.result(), third)] == [0, 1, 2]
    assert TOKEN.encode() not in b"".join(data for _, data in tap.heard)
    tap.close()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("", "asks for a token, and none is set"),
        (OTHER, "does not know this process's token"),
    ],
)
def test_a_wrong_token_is_reported_and_the_job_starts_without_that_process(given, why):
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, port, 0, 2, token=TOKEN)
        with pytest.raises(ZeroError, match=f"the server at 127.0.0.1:{port} {why}.*ZEROJAX_JOB_TOKEN"):
            join(port, 1, 2, token=given)
        join(port, 1, 2, token=TOKEN)
        assert first.result().size == 2


def test_an_impostor_of_rank_0_is_noticed():
    """A process that has only taken the address learns neither the settings nor the token."""
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
        impostor.settimeout(20)
        port = impostor.getsockname()[1]
        client = pool.submit(join, port, 1, 2, {"secret": "settings"}, token=TOKEN)
        heard = b""
        while not client.done():
            try:
                near, _ = impostor.accept()
            except TimeoutError:
                break
            with near:
                near.settimeout(20)
                challenge = b'{"say": "challenge", "nonce": "' + b"ab" * 32 + b'"}'
                welcome = b'{"say": "welcome", "proof": "' + b"ab" * 32 + b'"}'
                near.sendall(b"".join(struct.pack(">BI", 1, len(x)) + x for x in (challenge, welcome)))
                while data := near.recv(4096):
                    heard += data
            impostor.settimeout(1)
        with pytest.raises(ZeroError, match="does not know this process's token"):
            client.result()
    assert {message["say"] for message in frames(heard)} == {"answer"}


def test_refused_connections_are_counted_when_a_rank_is_missing():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, port, 0, 2, token=TOKEN, join_timeout=1.5)
        assert answer_again(port, _answer("ab" * 32, "cd" * 32))["say"] == "refused"
        with pytest.raises(
            JobError, match=r"rank 1 of 2 did not join .* 1 connection did not know the job's"
        ):
            first.result()


def _answer(nonce, proof):
    data = f'{{"say": "answer", "nonce": "{nonce}", "proof": "{proof}"}}'.encode()
    return struct.pack(">BI", 1, len(data)) + data


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (10**9, 2)])
def test_a_rank_out_of_range(rank, size):
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        joined = [pool.submit(join, port, 0, 2), pool.submit(join, port, rank, size)]
        for one in joined:
            with pytest.raises(ZeroError, match=f"rank {rank} of 2 joined: ranks are 0 to 1"):
                one.result()


def test_settings_of_others_are_safe_in_a_terminal():
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        ours, theirs = {"x": "1"}, {"x": "\x1b[2J\x07" + "y" * 5000}
        joined = [pool.submit(join, port, 0, 2, ours), pool.submit(join, port, 1, 2, theirs)]
        for one in joined:
            with pytest.raises(ZeroError) as error:
                one.result()
            assert str(error.value).isprintable()
            assert r"x is \x1b[2J\x07yyy" in str(error.value)
            assert len(str(error.value)) < 1000


def test_a_long_list_of_absent_ranks_is_cut():
    with pytest.raises(JobError, match=r"^ranks 1, 2, 3, 4, 5, 6, 7, 8 and 991 more of 1000 did not join"):
        join(free_port(), 0, 1000, join_timeout=0.2)
