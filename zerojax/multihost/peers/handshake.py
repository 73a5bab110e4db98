"""Mutual authentication of two processes by the job's token, which is never sent.

Each side sends a random challenge. Its response to the other's challenge is an HMAC-SHA256 (RFC 2104) under
the token, of both challenges and its own role. This is the challenge and response of CRAM-MD5 (RFC 2195) in
both directions. An eavesdropper does not learn the token. A response can neither be replayed on another
connection nor reflected to its sender. Later traffic is neither encrypted nor signed, so an attacker who can
alter packets can take over a connection. Without a token (a job on the loopback interface, or started as
insecure) the key is empty, and the handshake proves nothing.
"""

import asyncio
import hashlib
import hmac
import random
import re
import secrets
from contextlib import suppress

from zerojax.multihost.peers.messages import Connection

# The environment variable that holds the job's token.
VARIABLE = "ZEROJAX_JOB_TOKEN"

# The shortest accepted token, in characters. `new_token` makes 64.
SHORTEST = 16

# Size limit of a message before authentication, in bytes.
_LIMIT = 512

# Seconds for one attempt to connect: the host may be starting.
_ATTEMPT = 5.0

# Seconds for a listener to prove that it is this job's. It may handle strangers first.
_PATIENCE = 30.0

# Seconds for which the listener of an older job, with another token, may still hold the address.
_OLD_JOB = 5.0

_HEX = re.compile("[0-9a-f]{64}")


def new_token() -> str:
    """A token for a job: 256 random bits in hexadecimal digits."""
    return secrets.token_hex(32)


async def admit(connection: Connection, token: str) -> bool:
    """Authenticate an incoming connection, in rank 0.

    Args:
        connection: to the process that connected.
        token: of the job.

    Returns:
        Whether the other side knows the token.
    """
    ours = secrets.token_hex(32)
    connection.send("challenge", nonce=ours)
    match await connection.receive(_LIMIT):
        case {"say": "answer", "nonce": str(theirs), "proof": str(proof)} if _HEX.fullmatch(theirs):
            if _equal(proof, _prove(token, "client", ours, theirs)):
                connection.send("welcome", proof=_prove(token, "coordinator", ours, theirs))
                return True
            connection.send("refused")
    return False


async def introduce(connection: Connection, token: str) -> bool:
    """Authenticate with rank 0, as a process that connects to it.

    Args:
        connection: to rank 0, or to another listener at its address.
        token: of the job.

    Returns:
        Whether both sides know the token.

    Raises:
        ConnectionError: the other side is not the coordinator of a job, or closed the connection.
    """
    ours = secrets.token_hex(32)
    match await connection.receive(_LIMIT):
        case {"say": "challenge", "nonce": str(theirs)} if _HEX.fullmatch(theirs):
            connection.send("answer", nonce=ours, proof=_prove(token, "client", theirs, ours))
        case _:
            raise ConnectionError("not the coordinator of a job")
    match await connection.receive(_LIMIT):
        case {"say": "welcome", "proof": str(proof)}:
            return _equal(proof, _prove(token, "coordinator", theirs, ours))
        case {"say": "refused"}:
            return False
    raise ConnectionError("connection closed")


async def reach(host: str, port: int, token: str) -> Connection | None:
    """Connect to a job's listener, once there is one; None if the one at the address has another token."""
    refused_since: float | None = None
    now = asyncio.get_running_loop().time
    while refused_since is None or now() - refused_since <= _OLD_JOB:
        with suppress(OSError):
            if connection := await _attempt(host, port, token):
                return connection
            refused_since = refused_since or now()
        # There is no listener yet, or the one of another job that is about to end.
        await asyncio.sleep(random.uniform(0.1, 0.5))
    return None


async def _attempt(host: str, port: int, token: str) -> Connection | None:
    """Connect once; None if the sides have different tokens. Raises OSError if there is no listener."""
    async with asyncio.timeout(_ATTEMPT):
        connection = Connection(*await asyncio.open_connection(host, port))
    known = False
    try:
        async with asyncio.timeout(_PATIENCE):
            known = await introduce(connection, token)
    finally:
        if not known:
            await connection.close()
    return connection if known else None


def _prove(token: str, role: str, coordinator: str, client: str) -> str:
    """The HMAC of a role and both sides' challenges under the token."""
    message = f"zerojax {role} {coordinator} {client}"
    return hmac.new(token.encode(), message.encode(), hashlib.sha256).hexdigest()


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())
