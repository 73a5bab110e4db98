"""JAX's traffic between a client's socket and rank 0's, carried inside a connection."""

import asyncio
import socket
from contextlib import suppress

import pytest

from zerojax.multihost.peers.messages import Connection
from zerojax.multihost.peers.proxy import ClientProxy, ServiceProxy

pytestmark = pytest.mark.alone

BIG = bytes(range(256)) * 4096


def between(tmp_path, scenario):
    """Run a scenario with two connected proxies, and the paths of client and service."""

    async def deliver(connection, proxy):
        while (piece := await connection.receive()) is not None:
            assert isinstance(piece, bytes)
            proxy.deliver(piece)

    async def run():
        near, far = [Connection(*await asyncio.open_connection(sock=end)) for end in socket.socketpair()]
        client, service = ClientProxy(near), ServiceProxy(str(tmp_path / "service"), far)
        await client.open(str(tmp_path / "client"))
        tasks = [asyncio.ensure_future(deliver(*ends)) for ends in ((near, client), (far, service))]
        try:
            async with asyncio.timeout(20):
                await scenario(tmp_path / "client", tmp_path / "service")
        finally:
            client.close()
            service.close()
            for task in tasks:
                task.cancel()
            await near.close()
            await far.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


async def is_open(reader):
    """Whether a connection's other end is still open."""
    with suppress(TimeoutError):
        return await asyncio.wait_for(reader.read(1), 0.3) != b""
    return True


def test_bytes_travel_both_ways_and_wait_for_the_service_to_start(tmp_path):
    async def scenario(client, service):
        reader, writer = await asyncio.open_unix_connection(client)
        writer.write(BIG)
        ended = asyncio.Event()

        async def echo(reader, writer):
            writer.write(await reader.readexactly(len(BIG)))
            assert await reader.read(1) == b"", "the client has ended"
            writer.close()
            ended.set()

        await asyncio.sleep(0.2)
        server = await asyncio.start_unix_server(echo, service)
        assert await reader.readexactly(len(BIG)) == BIG
        writer.close()
        await ended.wait()
        server.close()

    between(tmp_path, scenario)


def test_only_one_connection_is_taken(tmp_path):
    async def scenario(client, service):
        reader, writer = await asyncio.open_unix_connection(client)
        other_reader, other_writer = await asyncio.open_unix_connection(client)
        assert await is_open(reader)
        assert await asyncio.wait_for(other_reader.read(1), 20) == b"", "closed"
        for one in (writer, other_writer):
            one.close()

    between(tmp_path, scenario)


def test_a_client_does_not_see_the_service_end(tmp_path):
    """JAX would abort the process."""

    async def scenario(client, service):
        async def end(reader, writer):
            writer.write(await reader.readexactly(3))
            await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(end, service)
        reader, writer = await asyncio.open_unix_connection(client)
        writer.write(b"abc")
        assert await reader.readexactly(3) == b"abc"
        assert await is_open(reader)
        writer.close()
        server.close()

    between(tmp_path, scenario)
