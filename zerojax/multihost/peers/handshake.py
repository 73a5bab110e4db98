"""Two processes prove to each other that they know the token of their job; it is never sent.

Each sends a random challenge and answers the other's with an HMAC-SHA256 under the token of both challenges
and its own role (RFC 2104; challenge and response as in CRAM-MD5, RFC 2195, both ways). So nobody who
listens learns the token, an answer is of use on no other connection, and cannot be sent back to who gave it.
What comes after is neither encrypted nor signed: who can change packets under way can take a connection over.
Without a token (a job on the loopback interface, or one that was told to be insecure) the key is empty, and
the handshake proves nothing.
"""

import hashlib
import hmac
import re
import secrets

from zerojax.multihost.peers.messages import Connection

# The environment variable in which the processes of a job find their token.
VARIABLE = "ZEROJAX_JOB_TOKEN"

# The shortest token that is taken, in characters. `new_token` gives 64.
SHORTEST = 16

# Bytes of a message from somebody who has not proved anything.
_LIMIT = 512

_HEX = re.compile("[0-9a-f]{64}")


def new_token() -> str:
    """A token for a job: 256 random bits in hexadecimal digits."""
    return secrets.token_hex(32)


async def admit(connection: Connection, token: str) -> bool:
    """Do rank 0's part.

    Args:
        connection: to somebody who has come.
        token: of the job.

    Returns:
        Whether they know the token.
    """
    ours = secrets.token_hex(32)
    connection.send("challenge", nonce=ours)
    match await connection.receive(_LIMIT):
        case {"say": "answer", "nonce": str(theirs), "proof": str(proof)} if _HEX.fullmatch(theirs):
            if _equal(proof, _prove(token, "member", ours, theirs)):
                connection.send("welcome", proof=_prove(token, "hub", ours, theirs))
                return True
            connection.send("refused")
    return False


async def introduce(connection: Connection, token: str) -> bool:
    """Do the part of a process that comes to rank 0.

    Args:
        connection: to rank 0, or to whoever is in its place.
        token: of the job.

    Returns:
        Whether both know the token.

    Raises:
        ConnectionError: what answers is no process of a job, or has gone.
    """
    ours = secrets.token_hex(32)
    match await connection.receive(_LIMIT):
        case {"say": "challenge", "nonce": str(theirs)} if _HEX.fullmatch(theirs):
            connection.send("answer", nonce=ours, proof=_prove(token, "member", theirs, ours))
        case _:
            raise ConnectionError("not the hub of a job")
    match await connection.receive(_LIMIT):
        case {"say": "welcome", "proof": str(proof)}:
            return _equal(proof, _prove(token, "hub", theirs, ours))
        case {"say": "refused"}:
            return False
    raise ConnectionError("gone")


def _prove(token: str, role: str, hub: str, member: str) -> str:
    """What only who knows the token can say, for these two challenges."""
    return hmac.new(token.encode(), f"zerojax {role} {hub} {member}".encode(), hashlib.sha256).hexdigest()


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())
