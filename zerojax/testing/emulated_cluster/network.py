"""A network of emulated hosts: one namespace and one rate-limited link each, on a common switch.

No namespace has a name. Only this process's file descriptors and the programs inside keep the namespaces
alive, including the switch's. The kernel removes everything when these end, even after a kill -9.

    node 0: wire0 10.77.0.1 ---- port0 \\
    node 1: wire0 10.77.0.2 ---- port1  switch (a bridge)
    node 2: wire0 10.77.0.3 ---- port2 /

Each end of a link has its own token bucket. The node's end limits the rate of sending, the switch's end the
rate of receiving. So links are full duplex, and incast queues up as on a real switch. The nodes reach each
other and nothing else.
"""

import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from zerojax.validation.rates import bytes_per_second

if TYPE_CHECKING:
    from pyroute2 import IPRoute

#: The interface of a node. No interface of the host has this name, because a node's /sys still shows those.
INTERFACE = "wire0"
_TIME = re.compile(r"([\d.]+)\s*(us|ms|s)")


class ClusterError(RuntimeError):
    """An emulated cluster cannot be set up on this machine."""


@dataclass(frozen=True)
class LinkBytes:
    """A node's traffic by its interface's counters: bytes on the link, including headers."""

    sent: int
    received: int

    def __sub__(self, before: "LinkBytes") -> "LinkBytes":
        """The traffic since an earlier reading."""
        return LinkBytes(self.sent - before.sent, self.received - before.received)


def microseconds(time: str) -> int:
    """``"50us"`` -> 50.

    Raises:
        ValueError: it is not a number with the unit us, ms or s.
    """
    found = _TIME.fullmatch(time.strip())
    if found is None or float(found[1]) > 1e9:
        raise ValueError(f"{time!r} is not a latency: give one such as 50us or 1ms")
    return round(float(found[1]) * {"us": 1, "ms": 1e3, "s": 1e6}[found[2]])


def unavailable() -> str | None:
    """Why this machine cannot emulate a cluster; None if it can."""
    if sys.platform != "linux":
        return "emulated clusters need Linux network namespaces, and this is not Linux"
    if os.geteuid() != 0:
        return "network namespaces and their links need root (sudo, or a privileged container)"
    try:
        import pyroute2  # noqa: F401  (a probe)
    except ImportError:
        return "pyroute2 is not installed: pip install 'pyroute2>=0.9'"
    try:
        os.close(_new_namespace())
    except OSError as error:
        return f"this machine does not permit network namespaces ({error.strerror})"
    return None


def link_bytes() -> LinkBytes:
    """The bytes that this process's node has sent and received so far.

    Raises:
        ClusterError: the process does not run in a node of an emulated cluster.
    """
    counters = psutil.net_io_counters(pernic=True, nowrap=False).get(INTERFACE)
    if counters is None:
        raise ClusterError(f"no interface {INTERFACE}: this is not a node of an emulated cluster")
    return LinkBytes(sent=counters.bytes_sent, received=counters.bytes_recv)


def limit_link(rate: str) -> None:
    """Change the rate at which this process's node may send, such as "1gbit".

    The rate of receiving stays. So create the cluster with the highest rate needed, and call this in one
    process of every node.

    Raises:
        ValueError: ``rate`` is not a rate.
        ClusterError: the process does not run in a node of an emulated cluster with rates.
    """
    limit = bytes_per_second(rate)
    link_bytes()  # raises an error if this is not a node

    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    with IPRoute() as ip:
        try:
            ip.tc("change-class", "htb", index=_index(ip, INTERFACE), **_bucket(limit))
        except NetlinkError as error:
            raise ClusterError(
                f"the link's rate cannot be changed to {rate} ({error.args[-1]}): create the cluster "
                "with the highest rate needed"
            ) from error


class Network:
    """Namespaces and links; see the module. ``close`` it, or let the process end.

    Args:
        nodes: number of nodes, 1 to 65534.
        rate: of each link and direction, as for ``bytes_per_second``; None for no limit.
        latency: one-way delay to add between two nodes, as for ``microseconds``; None for none.
        mtu: bytes of the largest packet, 576 to 65535. As on Ethernet, the rate includes the packets'
            headers.

    Raises:
        ValueError: an argument is invalid.
        ClusterError: this machine cannot emulate a cluster. The message says why.
    """

    def __init__(self, nodes: int, rate: str | None, latency: str | None, mtu: int):
        if not 1 <= nodes <= 65534:
            raise ValueError(f"a cluster must have 1 to 65534 nodes, not {nodes}")
        if not 576 <= mtu <= 65535:
            raise ValueError(f"the largest packet (mtu) must have 576 to 65535 bytes, not {mtu}")
        self._mtu = mtu
        self._limit = bytes_per_second(rate) if rate else None
        self._delay = microseconds(latency) if latency else 0
        if reason := unavailable():
            raise ClusterError(reason)
        self._switch = _new_namespace()
        self.namespaces = [_new_namespace() for _ in range(nodes)]
        try:
            self._inside(self._switch, self._build_switch)
            for node, namespace in enumerate(self.namespaces):
                self._inside(namespace, lambda ip, node=node: self._build_node(ip, node))
        except BaseException:
            self.close()
            raise

    def address(self, node: int) -> str:
        """The IPv4 address of a node."""
        return f"10.77.{(node + 1) >> 8}.{(node + 1) & 255}"

    def bytes(self) -> list[LinkBytes]:
        """The byte counters of every node's link, since the network was made.

        Raises:
            ClusterError: the kernel does not show them.
        """

        def read(ip: "IPRoute") -> LinkBytes:
            (link,) = ip.get_links(_index(ip, INTERFACE))
            counters = link.get_attr("IFLA_STATS64")
            return LinkBytes(sent=counters["tx_bytes"], received=counters["rx_bytes"])

        return [self._inside(namespace, read) for namespace in self.namespaces]

    def close(self) -> None:
        """Release the namespaces. A program inside keeps its namespace until it ends."""
        for namespace in (self._switch, *self.namespaces):
            os.close(namespace)
        self.namespaces = []

    def _build_switch(self, ip: "IPRoute") -> None:
        ip.link("add", ifname="switch", kind="bridge")
        bridge = _index(ip, "switch")
        ip.link("set", index=bridge, state="up")
        for node, namespace in enumerate(self.namespaces):
            peer = {"ifname": INTERFACE, "net_ns_fd": namespace, "mtu": self._mtu}
            ip.link("add", ifname=f"port{node}", kind="veth", mtu=self._mtu, peer=peer)
            port = _index(ip, f"port{node}")
            ip.link("set", index=port, master=bridge, state="up")
            self._shape(ip, port, delay=0)

    def _build_node(self, ip: "IPRoute", node: int) -> None:
        ip.link("set", index=_index(ip, "lo"), state="up")
        wire = _index(ip, INTERFACE)
        ip.addr("add", index=wire, address=self.address(node), prefixlen=16)
        ip.link("set", index=wire, state="up")
        self._shape(ip, wire, delay=self._delay)

    def _shape(self, ip: "IPRoute", index: int, delay: int) -> None:
        """Limit and delay the packets that leave an interface."""
        parent: dict[str, Any] = {}
        if self._limit:
            # An HTB with one class is a token bucket. (pyroute2's tbf has 32-bit rates, at most 34 Gb/s.)
            ip.tc("add", "htb", index=index, handle="1:", default=1)
            ip.tc("add-class", "htb", index=index, **_bucket(self._limit))
            parent = {"parent": "1:1"}
        if delay:
            from pyroute2.netlink.exceptions import NetlinkError

            try:
                ip.tc("add", "netem", index=index, handle="2:", delay=delay, limit=100000, **parent)
            except NetlinkError as error:
                raise ClusterError(
                    f"this kernel cannot add latency: it has no netem queueing discipline ({error.args[-1]})"
                ) from error

    def _inside[T](self, namespace: int, work: Callable[["IPRoute"], T]) -> T:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError

        def go() -> T:
            with IPRoute() as ip:
                return work(ip)

        try:
            return _in_thread(namespace, go)
        except NetlinkError as error:
            raise ClusterError(f"the kernel refused to build the network: {error}") from error


def _bucket(limit: int) -> dict[str, Any]:
    """Options of a link's only class: its rate in bytes/s, and bursts of 1 ms but at least 128 KiB."""
    burst = max(1 << 17, limit // 1000)
    return {
        "handle": "1:1", "parent": "1:", "rate": limit, "burst": burst, "cburst": burst, "quantum": 60000,
    }  # fmt: skip


def _index(ip: "IPRoute", name: str) -> int:
    (index,) = ip.link_lookup(ifname=name)
    return index


def _new_namespace() -> int:
    """A file descriptor that keeps a new network namespace alive."""
    return _in_thread(None, lambda: os.open("/proc/thread-self/ns/net", os.O_RDONLY))


def _in_thread[T](namespace: int | None, work: Callable[[], T]) -> T:
    """Run ``work`` in a namespace (None: a new one) on a separate thread, and return its result."""

    def go() -> T:
        if namespace is None:
            os.unshare(os.CLONE_NEWNET)
        else:
            os.setns(namespace, os.CLONE_NEWNET)
        return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(go).result()
