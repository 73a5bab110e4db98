"""Fuzz tests of the protocol: invalid input from strangers or from processes of the job is refused.

Each test sends a thousand seeded inputs, among them damaged valid ones.
"""

import asyncio
import json
import random
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

import pytest

from zerojax.multihost.peers import Place, handshake
from zerojax.multihost.peers.client import Client
from zerojax.multihost.peers.coordinator import Coordinator
from zerojax.multihost.peers.listener import Listener
from zerojax.multihost.peers.messages import LIMIT, Connection, Failure, parse, printable

pytestmark = pytest.mark.alone

INPUTS = 1000
TOKEN = "a token for the fuzz test"

STRINGS = [
    '""', '"x"', '"\\u001b[2J\\u0007"', '"\\ud800"', '"\\u202e"', '"a\\nzerojax: all is well"',
    json.dumps("x" * 5000),
]  # fmt: skip
DEEP = "[" * 5000 + "]" * 5000
NASTY = [
    "null", "true", "-1", "0", "1", "2", "1e26", "1" + "0" * 400, "1" * 5000, "Infinity", "NaN", "1.5", "[]",
    "{}", "[[]]", DEEP, '{"say": "go"}', *STRINGS,
]  # fmt: skip
FAILURE = {"kind": "failed", "rank": 1, "why": "rank 1 failed: no such source", "code": 1}
MESSAGES = [
    {"say": "here", "rank": 1, "size": 2, "facts": {"train.seed": "1"}},
    {"say": "here", "rank": 1, "size": 2, "facts": {"\x1b]0;title\x07": "1"}},
    {"say": "answer", "nonce": "ab" * 32, "proof": "cd" * 32},
    {"say": "challenge", "nonce": "ab" * 32},
    {"say": "welcome", "proof": "ab" * 32},
    {"say": "refused"},
    {"say": "alive"},
    {"say": "done"},
    {"say": "all done"},
    {"say": "go"},
    {"say": "busy"},
    *[{"say": "end", "failure": FAILURE}] * 3,
]


def place(rank, size):
    return Place("127.0.0.1", 1, None, rank, size, TOKEN, Path("/nowhere"))


def frame(data, kind=1, size=None):
    return struct.pack(">BI", kind, len(data) if size is None else size) + data


def damaged_json(rng, message):
    """A message, some values of which may be replaced."""
    hole, string_hole = "\0hole\0", "\0string\0"

    def walk(value):
        if rng.random() < 0.15:
            return string_hole if isinstance(value, str) and rng.random() < 0.5 else hole
        return (
            {k: walk(v) for k, v in value.items() if rng.random() > 0.05}
            if isinstance(value, dict)
            else value
        )

    text = json.dumps(walk(message) if rng.random() < 0.8 else message)
    for name, values in ((hole, NASTY), (string_hole, STRINGS)):
        while json.dumps(name) in text:
            text = text.replace(json.dumps(name), rng.choice(values), 1)
    return text.encode()


def damaged(rng, message):
    """The bytes of a message: valid, damaged, or something else entirely."""
    data = damaged_json(rng, message)
    match rng.randrange(8):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            return frame(data, kind=rng.choice([0, 2, 3, 255]))
        case 2:
            return frame(data, size=rng.choice([0, 1, len(data) + 1, LIMIT, LIMIT + 1, 2**32 - 1]))
        case 3:
            whole = bytearray(frame(data))
            for _ in range(rng.randrange(1, 4)):
                whole[rng.randrange(len(whole))] = rng.randrange(256)
            return bytes(whole)
        case 4:
            return rng.choice([b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"SSH-2.0-x\r\n", b""])
        case _:
            return frame(data)


def talk(rng, first):
    """A first message, often valid, and some more."""
    begin = damaged(rng, first) if rng.random() < 0.5 else frame(json.dumps(first).encode())
    return begin + b"".join(damaged(rng, rng.choice(MESSAGES)) for _ in range(rng.randrange(5)))


async def pair():
    """Two ends of a connection, the second as bare streams."""
    ours, theirs = socket.socketpair()
    return Connection(*await asyncio.open_connection(sock=ours)), await asyncio.open_connection(sock=theirs)


def check_harmless(failure):
    assert isinstance(failure, Failure)
    assert failure.why.isprintable()
    assert len(failure.why) < 3000
    f"{failure}".encode()


def check_sent(data):
    """Every frame sent is valid, and every line in it is safe to print."""
    while data:
        _, size = struct.unpack(">BI", data[:5])
        message = parse(data[5 : 5 + size])
        assert message is not None
        if message["say"] == "end":
            check_harmless(Failure.of(message))
        data = data[5 + size :]


def run(scenario):
    """Run a scenario to its end, and check that no task raised an unhandled error."""
    errors = []

    async def watched():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with asyncio.timeout(100):
            await scenario()

    asyncio.run(watched())
    assert errors == []


def test_parse_gives_a_valid_message_or_none():
    rng = random.Random(0)
    read = 0
    for _ in range(2 * INPUTS):
        data = damaged_json(rng, rng.choice(MESSAGES))
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data) + 1)] + rng.randbytes(3)
        message = parse(data)
        if message is not None:
            read += 1
            assert isinstance(message["say"], str)
            if (failure := Failure.of(message)) is not None:
                check_harmless(failure)
    assert read > INPUTS // 4


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("rank 1 failed: no such file: données.txt \\ 日本", None),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("a\nzerojax: b\r", "a\\nzerojax: b\\r"),
        ("\u202eabc\u2028\x9b1m\ud800", "\\u202eabc\\u2028\\x9b1m\\ud800"),
        ("x" * 3000, "x" * 2000 + " ..."),
    ],
)
def test_text_from_a_peer_is_safe_in_a_terminal(said, shown):
    assert printable(said) == (said if shown is None else shown)
    assert printable(printable(said)) == printable(said)


def test_strangers(monkeypatch):
    """None of a thousand without the token is admitted, all are disconnected, and one with it is admitted."""
    monkeypatch.setattr("zerojax.multihost.peers.listener._PATIENCE", 2.0)
    rng = random.Random(1)
    served, ended = [], []

    async def serve(connection, message):
        served.append(message)

    async def stranger(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began = time.monotonic()
        writer.write(talk(rng, rng.choice(MESSAGES[:4])))
        if rng.random() < 0.9:  # the others send no end
            writer.write_eof()
        with suppress(ConnectionError):
            check_sent(await asyncio.wait_for(reader.read(), 60))
        ended.append(time.monotonic() - began)
        writer.close()

    async def scenario():
        listener = Listener(TOKEN, serve)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        listener.open("127.0.0.1", port)
        await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.gather(*[stranger(port) for _ in range(INPUTS // 5)])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connection = Connection(reader, writer)
        assert await handshake.introduce(connection, TOKEN)
        connection.send("here", rank=1)
        assert await connection.receive() is None
        await connection.close()
        listener.close()

    run(scenario)
    assert served == [{"say": "here", "rank": 1}]
    assert len(ended) == INPUTS
    assert max(ended) < 30


def test_a_client_that_sends_nonsense_to_the_coordinator():
    rng = random.Random(2)
    joined = []

    async def one():
        coordinator = Coordinator(place(0, 2), {"train.seed": "1"}, 60.0, 60.0)
        coordinator_end, (other_reader, other_writer) = await pair()
        zero = asyncio.ensure_future(
            coordinator._serve(
                coordinator_end, {"say": "here", "rank": 0, "size": 2, "facts": {"train.seed": "1"}}
            )
        )
        await asyncio.sleep(0)
        connection, (reader, writer) = await pair()
        writer.write(talk(rng, rng.choice(MESSAGES[:2])))
        writer.write_eof()
        hello = await connection.receive()
        if isinstance(hello, dict):
            await coordinator._serve(connection, hello)
        await connection.close()
        check_sent(await reader.read())
        other_writer.write_eof()
        await zero
        await coordinator_end.close()
        check_sent(await other_reader.read())
        for end in (writer, other_writer):
            end.close()
        joined.append(coordinator._heartbeat is not None)

    async def scenario():
        for _ in range(INPUTS):
            await asyncio.wait_for(one(), 10)

    run(scenario)
    assert 0 < sum(joined) < INPUTS


def test_a_coordinator_that_sends_nonsense_to_a_client():
    rng = random.Random(3)
    ends = []

    async def one():
        client = Client(place(1, 2), 60.0, 60.0, ends.append)
        connection, (reader, writer) = await pair()
        writer.write(talk(rng, MESSAGES[3]))
        writer.write_eof()
        with suppress(ConnectionError):
            assert not await handshake.introduce(connection, TOKEN), "it does not know the token"
        await connection.close()
        await reader.read()
        writer.close()

        connection, (reader, writer) = await pair()
        writer.write(b"".join(damaged(rng, m) for m in rng.choices(MESSAGES, k=4)) + frame(b"x", 2))
        writer.write_eof()
        client._connected = connection
        client._begin()
        await asyncio.gather(*client._tasks[:1])
        client._tasks[1].cancel()
        await client.close()
        await reader.read()
        writer.close()

    async def scenario():
        for _ in range(INPUTS):
            await asyncio.wait_for(one(), 10)

    run(scenario)
    assert len(ends) > INPUTS // 2
    for failure in ends:
        check_harmless(failure)


def test_pieces_before_the_job_starts_and_after_their_end_are_dropped():
    async def scenario():
        coordinator = Coordinator(place(0, 2), {}, 60.0, 60.0)
        connection, (reader, writer) = await pair()
        far = Connection(reader, writer)
        for number in range(1000):
            await far.send_piece(b"x" if number % 2 else b"")
        writer.write_eof()
        await coordinator._serve(connection, {"say": "here", "rank": 0, "size": 2, "facts": {}})
        await connection.close()
        writer.close()

    run(scenario)
