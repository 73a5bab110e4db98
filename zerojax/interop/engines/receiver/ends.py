"""Both ends of a transfer: the receiver's server, and the sender's feed of one receiver."""

import hashlib
import ipaddress
import socket
import sys
import threading
from contextlib import suppress

from .channel import Channel, split_address
from .manifest import Manifest
from .mirror import Replica, Source
from .patches import FULL, Patch, PatchError

TOKEN = "ZEROJAX_JOB_TOKEN"
"""The environment variable with the job's secret."""

_PENDING = 64
"""Most connections that have not proved yet that they know the token."""


class Receiver:
    """Listens for a job's processes, and applies their patches to a replica of the weights.

    Args:
        mirror: the replica.
        address: HOST:PORT of the interface; port 0 is any free one.
        token: the job's secret. It may be empty only on a loopback interface.

    Attributes:
        address: as given, with the port.

    Raises:
        ValueError: there is no token, and other hosts could connect.
    """

    def __init__(self, mirror: Replica, address: str, token: str) -> None:
        host, port = split_address(address)
        if not token and not _is_loopback(host):
            raise ValueError(
                f"{host} can be reached by others, so a token is needed: set the job's token in {TOKEN}"
            )
        self._mirror, self._token = mirror, token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=256)
        self.address = f"{address.rpartition(':')[0]}:{self._listening.getsockname()[1]}"
        self._pending = threading.Semaphore(_PENDING)
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        for sock in (self._listening, *list(self._open)):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            self._pending.acquire()
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return  # closed
            self._open.add(sock)
            threading.Thread(target=self._handle, args=(sock,), daemon=True).start()

    def _handle(self, sock: socket.socket) -> None:
        try:
            try:
                channel = Channel.accept(sock, self._token)
            finally:
                self._pending.release()
            try:
                self._serve(channel)
            except (PatchError, KeyError, TypeError, IndexError) as error:
                print(f"refused: {error}", file=sys.stderr, flush=True)
                channel.close(reason=str(error) or "an invalid message")
        except (ConnectionError, TimeoutError):
            pass  # a stranger, or the other side has ended: it connects again
        except OSError as error:
            if sock.fileno() >= 0:  # not closed here
                print(f"{error}: is the mirror's disk full?", file=sys.stderr, flush=True)
        finally:
            self._open.discard(sock)
            sock.close()

    def _serve(self, channel: Channel) -> None:
        mirror, hello = self._mirror, channel.response()
        session, pieces = hello["session"], hello["pieces"]
        manifest = mirror.manifest
        if manifest is None or manifest.digest != hello["manifest"]:
            channel.send({"needs": "manifest"})
            data = channel.receive()
            if not isinstance(data, bytearray):
                raise PatchError("a manifest was expected")
            manifest = Manifest(bytes(data))
        mirror.begin(session, manifest)
        channel.send({"versions": mirror.versions(pieces)})
        while True:
            received = channel.receive()
            if isinstance(received, Patch):
                mirror.apply(session, received)
            elif isinstance(received, dict):
                channel.send({"serving": mirror.wait_newer(received["end"] - 1, 0.2)})


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Feed:
    """Keeps one receiver at the newest version of a source, over several TCP flows.

    It connects again when a connection ends, and continues where the receiver is.

    Args:
        source: the weights.
        address: HOST:PORT of the receiver.
        token: the job's secret.
        flows: connections, which share the source's pieces.

    Attributes:
        address: as given.
        error: why a flow is not connected; None if all are.

    Raises:
        ValueError: the address has no port.
    """

    def __init__(self, source: Source, address: str, token: str, flows: int = 4) -> None:
        split_address(address)  # a wrong one fails here, and not in each flow's thread
        self.address, self._source, self._token = address, source, token
        self._errors: list[BaseException | None] = [None] * flows
        self._serving = [FULL] * flows
        self._closed = threading.Event()
        for index in range(flows):
            threading.Thread(target=self._run, args=(index,), daemon=True).start()

    @property
    def error(self) -> BaseException | None:
        """Why a flow is not connected."""
        return next((error for error in self._errors if error is not None), None)

    @property
    def serving(self) -> int:
        """The version that the receiver's engine serves, as far as this process knows."""
        return max(self._serving)

    def close(self) -> None:
        """End the flows once their current messages are sent."""
        self._closed.set()

    def _run(self, index: int) -> None:
        pause = 0.1
        while not self._closed.is_set():
            try:
                if self._source.wait_newer(FULL, 0.5) > FULL:
                    self._connect(index)
                    pause = 0.1
            except (OSError, ValueError, KeyError) as error:
                self._errors[index] = error
                self._closed.wait(pause)
                pause = min(2 * pause, 1.0)

    def _connect(self, index: int) -> None:
        session, manifest, pieces = self._source.description()
        share = pieces[index :: len(self._errors)]
        channel = Channel.connect(self.address, self._token)
        try:
            digest = hashlib.sha256(manifest).hexdigest()
            response = channel.ask({"session": session, "manifest": digest, "pieces": share})
            if "needs" in response:
                channel.send(manifest)
                response = channel.response()
            self._errors[index] = None
            self._keep_up(index, channel, session, dict(zip(share, response["versions"], strict=True)))
        finally:
            channel.close()

    def _keep_up(self, index: int, channel: Channel, session: str, versions: dict[int, int]) -> None:
        done = FULL
        while not self._closed.is_set() and self._source.session == session:
            newest = self._source.wait_newer(done, 0.0 if self._serving[index] < done else 0.2)
            if newest > done:
                try:
                    for piece in versions:
                        for patch in self._source.patches(piece, versions[piece]):
                            channel.send(patch)
                            versions[piece] = patch.version
                except OSError:
                    channel.response()  # raises the receiver's reason, if there is one
                    raise
                done = min(versions.values(), default=newest)
            self._serving[index] = channel.ask({"end": done})["serving"]
