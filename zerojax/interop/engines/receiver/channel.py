"""An authenticated connection between a sender and a receiver."""

import hashlib
import hmac
import json
import secrets
import socket
import struct
from contextlib import suppress
from typing import Any

from .patches import Patch, PatchError

# Seconds for a connection to prove that it knows the token, and for which it may then be silent.
_PATIENCE, _SILENT = 10.0, 120.0

_LARGEST = 1 << 28
"""Most bytes of a frame."""

_FRAME = struct.Struct("<IB")
_MESSAGE, _PATCH, _BLOB = 1, 2, 3
_TAG = hashlib.sha256().digest_size


def split_address(address: str) -> tuple[str, int]:
    """Split "HOST:PORT"; an IPv6 address is in brackets.

    Raises:
        ValueError: it has no port.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


class Channel:
    """An authenticated connection: frames that nobody else can make, change, repeat or leave out.

    Both sides prove by HMAC-SHA256 of two random challenges that they know the job's token, which is never
    sent. Each frame has an HMAC of its number and content. Contents are not encrypted.
    """

    def __init__(self, sock: socket.socket, key: bytes, roles: tuple[bytes, bytes]) -> None:
        self._socket = sock
        sock.settimeout(_SILENT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._keys = [hmac.digest(key, role, "sha256") for role in roles]
        self._sent = self._received = 0

    @staticmethod
    def connect(address: str, token: str) -> "Channel":
        """Connect to the receiver at HOST:PORT.

        Raises:
            OSError: it cannot be reached, or one of the two does not know the token.
        """
        sock = socket.create_connection(split_address(address), _PATIENCE)
        try:
            theirs, ours = _read(sock, 32), secrets.token_bytes(32)
            sock.sendall(ours + _proof(token, b"sender", theirs, ours))
            if not hmac.compare_digest(_read(sock, _TAG), _proof(token, b"receiver", theirs, ours)):
                raise ConnectionError(f"{address} does not know the job's token")
            return Channel(sock, _proof(token, b"key", theirs, ours), (b"sender", b"receiver"))
        except BaseException:
            sock.close()
            raise

    @staticmethod
    def accept(sock: socket.socket, token: str) -> "Channel":
        """Admit a sender; errors as ``connect``."""
        sock.settimeout(_PATIENCE)
        ours = secrets.token_bytes(32)
        sock.sendall(ours)
        theirs, proof = _read(sock, 32), _read(sock, _TAG)
        if not hmac.compare_digest(proof, _proof(token, b"sender", ours, theirs)):
            raise ConnectionError("a connection does not know the job's token")
        sock.sendall(_proof(token, b"receiver", ours, theirs))
        return Channel(sock, _proof(token, b"key", ours, theirs), (b"receiver", b"sender"))

    def send(self, content: "dict[str, Any] | Patch | bytes") -> None:
        """Send a message, a patch or bytes."""
        if isinstance(content, Patch):
            kind, parts = _PATCH, [content.header(), content.body]
        else:
            kind = _MESSAGE if isinstance(content, dict) else _BLOB
            parts = [json.dumps(content).encode() if isinstance(content, dict) else content]
        tag = _tag(self._keys[0], self._sent, kind, *parts)
        self._sent += 1
        self._socket.sendall(_FRAME.pack(sum(map(len, parts)), kind) + tag)
        for part in parts:
            self._socket.sendall(part)

    def receive(self) -> dict[str, Any] | Patch | bytearray:
        """The next message, patch or bytes.

        Raises:
            OSError: the connection has ended or was silent too long, or the frame is not the sender's next.
        """
        size, kind = _FRAME.unpack(_read(self._socket, _FRAME.size))
        if size > _LARGEST:
            raise ConnectionError(f"a frame of {size} bytes is too large")
        tag, data = _read(self._socket, _TAG), _read(self._socket, size)
        if not hmac.compare_digest(tag, _tag(self._keys[1], self._received, kind, data)):
            raise ConnectionError("a frame was changed, repeated or left out on its way")
        self._received += 1
        if kind == _MESSAGE:
            return json.loads(data)
        return Patch.of(data) if kind == _PATCH else data

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message, and return the response. Errors as ``response``."""
        self.send(message)
        return self.response()

    def response(self) -> dict[str, Any]:
        """The receiver's next message.

        Raises:
            OSError: as for ``receive``, or something else arrived.
            PatchError: the receiver refused something; its reason.
        """
        response = self.receive()
        if not isinstance(response, dict):
            raise ConnectionError("the receiver sent no message")
        if "refused" in response:
            raise PatchError(str(response["refused"])[:500])
        return response

    def close(self, reason: str = "") -> None:
        """Close the connection.

        A receiver that refuses something gives its ``reason``, which the sender prints.
        """
        with suppress(OSError):
            if reason:
                self.send({"refused": reason})
                # Unread data would reset the connection, and the reason would be lost.
                self._socket.shutdown(socket.SHUT_WR)
                self._socket.settimeout(1.0)
                while self._socket.recv(1 << 20):
                    pass
        self._socket.close()


def _proof(token: str, role: bytes, receiver: bytes | bytearray, sender: bytes | bytearray) -> bytes:
    return hmac.digest(token.encode(), b"zerojax weights " + role + receiver + sender, "sha256")


def _tag(key: bytes, number: int, kind: int, *parts: bytes | bytearray | memoryview) -> bytes:
    made = hmac.new(key, struct.pack("<QB", number, kind), "sha256")
    for part in parts:
        made.update(part)
    return made.digest()


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the connection has ended")
        view = view[count:]
    return data
