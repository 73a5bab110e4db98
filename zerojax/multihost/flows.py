"""Measures TCP flows between a job's nodes: plain sockets, from each node to the next in a ring.

All nodes send and receive at the same time, as in a collective. The CPU time of each thread is measured, too.
iperf3 is no Python package and cannot authenticate by a secret of the job. It would have to be installed,
started and stopped on every node.

A flow begins with a secret, then carries zeros. The receiver draws the secret for this measurement, and
shares it only with the job's processes.
"""

import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

import psutil
from jax.sharding import Mesh

from zerojax.analysis.link_report import FlowRate
from zerojax.comm.gather import gather_from_all
from zerojax.errors import JobError
from zerojax.sharding.mesh import node_leaders

# Seconds for all flows of a measurement to open, and seconds that a flow may carry no bytes.
_OPEN, _SILENT = 20.0, 10.0

_SECRET_BYTES = 32

# Seconds for TCP to reach its rate before bytes count.
_WARM_UP = 0.5

# Seconds that a read should take, and its fewest and most bytes. Few calls are needed, and the last ends on
# time.
_READ, _MIN_BYTES, _MAX_BYTES = 0.01, 1 << 16, 1 << 22


class Flows:
    """This node's end of the ring; a context manager, which listens from the start.

    The other nodes reach it by ``host``.

    Attributes:
        address: host, port, and the secret in hexadecimal digits, for the previous node's ``measure``.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise JobError(f"cannot listen at {host} ({error.strerror})") from error
        self._listening.setblocking(False)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self.address = host, int(self._listening.getsockname()[1]), self._secret.hex()

    def __enter__(self) -> "Flows":
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def measure(self, neighbour: Sequence[Any], count: int, seconds: float) -> FlowRate:
        """Open flows to the next node, accept as many, and send and receive. All nodes call it together.

        Args:
            neighbour: the next node's ``address``.
            count: number of flows.
            seconds: duration.

        Returns:
            The rate at which this node received.

        Raises:
            JobError: not all flows could be opened, or one has ended.
        """
        host, port, secret = neighbour
        with ExitStack() as held:
            # The kernel completes a connection before the other side accepts it, so no node waits here.
            opened = [_connect(host, port, secret, held) for _ in range(count)]
            return _exchange(self._accept(count, held), opened, seconds)

    def _accept(self, count: int, held: ExitStack) -> list[socket.socket]:
        """Accept ``count`` flows that begin with the secret, and ignore strangers. ``held`` closes them."""
        selector = held.enter_context(selectors.DefaultSelector())
        selector.register(self._listening, selectors.EVENT_READ)
        admitted: list[socket.socket] = []
        limit = time.monotonic() + _OPEN
        while len(admitted) < count:
            ready = selector.select(max(0.0, limit - time.monotonic()))
            if not ready or time.monotonic() > limit:
                raise JobError(
                    f"{count} TCP flows from the previous node to {self.address[0]} did not open within "
                    f"{_OPEN:g} s: does a firewall between the nodes admit all ports?"
                )
            for key, _ in ready:
                if key.fileobj is self._listening:
                    with suppress(OSError):  # the connection has already ended
                        flow = held.enter_context(self._listening.accept()[0])
                        # The socket is ready once the whole secret has arrived.
                        flow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _SECRET_BYTES)
                        selector.register(flow, selectors.EVENT_READ, flow)
                else:
                    selector.unregister(key.data)
                    if self._begins_with_secret(key.data):
                        admitted.append(key.data)
        return admitted

    def _begins_with_secret(self, flow: socket.socket) -> bool:
        try:
            return hmac.compare_digest(flow.recv(_SECRET_BYTES), self._secret)
        except OSError:  # closed already
            return False


def _connect(host: str, port: int, secret: str, held: ExitStack) -> socket.socket:
    try:
        flow = held.enter_context(socket.create_connection((host, port), timeout=_OPEN))
        flow.sendall(bytes.fromhex(secret))
    except OSError as error:
        raise JobError(f"cannot open a TCP flow to {host}:{port}: {error.strerror or error}") from error
    return flow


def measure_flows(mesh: Mesh, host: str, *, counts: Sequence[int], seconds: float) -> tuple[FlowRate, ...]:
    """Measure flows between the mesh's nodes. All processes call it together.

    Args:
        mesh: of the job.
        host: by which the other nodes reach this process.
        counts: numbers of flows, measured one after another.
        seconds: duration of each measurement.

    One process of each node takes part. The others wait.

    Returns:
        For each count the rate of the slowest node, and the busiest cores. It is empty if a process has
        several nodes, or if there is one node.

    Raises:
        JobError: a flow could not be opened.
    """
    leaders = node_leaders(mesh)
    if len(set(leaders)) < max(2, len(leaders)):
        return ()
    rank = mesh.local_mesh.devices.flat[0].process_index
    if rank not in leaders:
        gather_from_all(None)
        return tuple(_together(count, None) for count in counts)
    with Flows(host) as flows:
        addresses = gather_from_all(flows.address)
        neighbour = addresses[leaders[(leaders.index(rank) + 1) % len(leaders)]]
        # Each result waits for all nodes, so the next measurement begins on all of them at once.
        return tuple(_together(count, flows.measure(neighbour, count, seconds)) for count in counts)


def _exchange(accepted: list[socket.socket], opened: list[socket.socket], seconds: float) -> FlowRate:
    """Send and receive over open flows, and return the rate of receiving."""
    count = len(accepted)
    with ThreadPoolExecutor(2 * count) as threads:
        senders = [threads.submit(_send, flow) for flow in opened]
        readers = [threads.submit(_receive, flow, seconds) for flow in accepted]
        before = psutil.cpu_times()
        try:
            read = [reader.result() for reader in readers]
        finally:
            busy, stolen = _busy(before, psutil.cpu_times())
            for flow in accepted:
                flow.close()  # this ends the previous node's sender
        sent = [sender.result() for sender in senders]
    thread = max(*sent, *(core for _, core in read))
    return FlowRate(count, sum(rate for rate, _ in read), thread, busy, stolen)


def _together(count: int, own: FlowRate | None) -> FlowRate:
    """The rate of the slowest node, with the busiest cores of any node."""
    every = [FlowRate(**found) for found in gather_from_all(own and asdict(own)) if found is not None]
    return FlowRate(
        count,
        min(rate.bytes_per_second for rate in every),
        max(rate.busiest_thread for rate in every),
        max(rate.host_busy for rate in every),
        max(rate.stolen for rate in every),
    )


def _send(flow: socket.socket) -> float:
    """Send zeros until the other end closes the flow, and return the share of a core that it took."""
    _make_blocking(flow)
    zeros, start, core = bytes(_MAX_BYTES), time.monotonic(), time.thread_time()
    with suppress(OSError):
        while True:
            flow.sendall(zeros)
    return (time.thread_time() - core) / (time.monotonic() - start)


def _receive(flow: socket.socket, seconds: float) -> tuple[float, float]:
    """Receive for some seconds, and return bytes per second and the share of a core that it took."""
    _make_blocking(flow)
    buffer, start = memoryview(bytearray(_MAX_BYTES)), time.monotonic()
    rate, warm = _read_until(flow, buffer[:_MIN_BYTES], start + _WARM_UP)
    size = max(_MIN_BYTES, min(_MAX_BYTES, int(rate * _READ)))
    core = time.thread_time()
    rate, end = _read_until(flow, buffer[:size], warm + seconds)
    return rate, (time.thread_time() - core) / (end - warm)


def _read_until(flow: socket.socket, buffer: memoryview, end: float) -> tuple[float, float]:
    """Fill a buffer until ``end``, and return bytes per second and the time of the last full buffer."""
    start = now = time.monotonic()
    received = 0
    while now < end:
        try:
            count = flow.recv_into(buffer, flags=socket.MSG_WAITALL)
        except OSError as error:
            raise JobError(f"a TCP flow has ended or carried nothing for {_SILENT:g} s ({error})") from error
        if count == 0:
            raise JobError("a TCP flow has ended: the previous node has closed it")
        received, now = received + count, time.monotonic()
    return received / (now - start), now


def _make_blocking(flow: socket.socket) -> None:
    """Let calls wait in the kernel, where they do not hold Python's lock, with a time limit."""
    flow.setblocking(True)
    limit = struct.pack("ll", int(_SILENT), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        flow.setsockopt(socket.SOL_SOCKET, option, limit)


def _busy(before: Any, after: Any) -> tuple[float, float]:
    """Between two readings, the shares of this host's cores that were busy, and that its hypervisor took."""
    idle, waiting, stolen = (
        getattr(after, name, 0.0) - getattr(before, name, 0.0) for name in ("idle", "iowait", "steal")
    )
    total = sum(after) - sum(before)
    return (1 - (idle + waiting) / total, stolen / total) if total else (0.0, 0.0)
