"""Finds the network that joins the nodes of a job, from what the kernel of this host says of it."""

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from jax._src import distributed  # JAX keeps the coordinator's address nowhere else

from zerojax.errors import ConfigurationError
from zerojax.validation.rates import bytes_per_second

# The environment variable that names the rate of a node's link, where its interface does not know it.
VARIABLE = "ZEROJAX_LINK_RATE"

# Linux's own description of its interfaces; see Documentation/ABI/testing/sysfs-class-net.
_INTERFACES, _RDMA = Path("/sys/class/net"), Path("/sys/class/infiniband")
_VERBS = Path("/dev/infiniband")

# The host of the coordinator that `zerojax.distributed.joined` has connected to: JAX's is a Unix socket then.
_joined: list[str] = []


@dataclass(frozen=True)
class Network:
    """What joins this node to the others.

    Attributes:
        interface: the one that leads to the coordinator; "" if there is none.
        rate: of this node's link in each direction, in bytes/s; None if it is not known.
        vendor: PCI vendor of the interface's adapter, such as "0x1d0f"; "" for a virtual one.
        rdma: what carries NCCL's data in place of TCP sockets, in words; "" if nothing does.
        loopback: whether the coordinator is reached without leaving this host.
        address: of this node, by which the others reach it; "" if there is no coordinator.
        mtu: bytes of the interface's largest packet; None if there is no interface.
    """

    interface: str = ""
    rate: float | None = None
    vendor: str = ""
    rdma: str = ""
    loopback: bool = False
    address: str = ""
    mtu: int | None = None


def remember_coordinator(host: str) -> None:
    """Note the coordinator's host, which tells the job's network."""
    _joined[:] = [host]


def discover_network(environ: Mapping[str, str] | None = None) -> Network:
    """Find the network that leads to the other nodes of the job.

    NCCL's variables and ``ZEROJAX_LINK_RATE`` are read from ``environ``, by default this process's.

    Raises:
        ConfigurationError: ``ZEROJAX_LINK_RATE`` is not a rate.
    """
    environ = os.environ if environ is None else environ
    given, rdma = _given_rate(environ), rdma_of(environ)
    address = _own_address(_coordinator())
    if not address:
        return Network(rate=given, rdma=rdma)
    interface = _interface_of(address, environ)
    stats = psutil.net_if_stats().get(interface)
    return Network(
        interface=interface,
        rate=given or interface_rate(_INTERFACES / interface),
        vendor=_text(_INTERFACES / interface / "device" / "vendor"),
        rdma=rdma,
        loopback=ipaddress.ip_address(address).is_loopback,
        address=address,
        mtu=None if stats is None else stats.mtu,
    )


def interface_rate(interface: Path) -> float | None:
    """The rate in bytes/s of an interface in /sys/class/net; None if the kernel does not know it.

    A virtual interface, such as a container's end of a veth pair, reports 10 Gb/s whatever carries it.
    """
    physical = (interface / "device").exists() or (interface / "bonding").exists()
    if not physical and "DEVTYPE=vlan" not in _text(interface / "uevent"):
        return None
    text = _text(interface / "speed")  # in Mb/s; -1 if unknown, and no text while the link is down
    return int(text) * 1e6 / 8 if text.isdecimal() and int(text) else None


def rdma_of(environ: Mapping[str, str], devices: Path = _RDMA, verbs: Path = _VERBS) -> str:
    """What carries NCCL's data in place of TCP sockets, in words; "" if nothing does.

    Containers often have InfiniBand's folder in /sys, ``devices``, and lack the one in /dev, ``verbs``.
    """
    transport = environ.get("NCCL_NET", "")
    if transport:
        return "" if transport.lower() == "socket" else f"NCCL_NET={transport}"
    if environ.get("NCCL_IB_DISABLE", "0") not in ("", "0") or not list(verbs.glob("uverbs*")):
        return ""
    for device in sorted(devices.glob("*")):
        for port in device.glob("ports/*"):
            if _text(port / "state").startswith("4"):  # "4: ACTIVE"
                kind = "RoCE" if _text(port / "link_layer") == "Ethernet" else "InfiniBand"
                return f"{kind} ({device.name})"
    return ""


def chosen_interfaces(names: Iterable[str], wanted: str) -> list[str]:
    """The interfaces that a value of NCCL_SOCKET_IFNAME stands for.

    A list of prefixes; after "=" they are names, after "^" those to leave out (NCCL's documentation).
    """
    unwanted = wanted.startswith("^")
    exact = wanted.lstrip("^").startswith("=")
    listed = tuple(filter(None, wanted.lstrip("^=").split(",")))

    def matches(name: str) -> bool:
        return name in listed if exact else name.startswith(listed)

    return [name for name in names if matches(name) != unwanted]


def _given_rate(environ: Mapping[str, str]) -> float | None:
    text = environ.get(VARIABLE, "")
    try:
        return bytes_per_second(text) if text else None
    except ValueError as error:
        raise ConfigurationError(f"{VARIABLE}: {error}") from error


def _coordinator() -> str:
    """The host of the job's coordinator, "" if there is none."""
    if _joined:
        return _joined[0]
    address = distributed.global_state.coordinator_address or ""
    return "" if address.startswith("unix:") else address.rpartition(":")[0].strip("[]")


def _own_address(host: str) -> str:
    """The address of this host from which packets to another leave; "" if they cannot."""
    try:
        found = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM) if host else []
    except (OSError, UnicodeError):
        return ""
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # of a datagram socket: chooses the route, and sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def _interface_of(address: str, environ: Mapping[str, str]) -> str:
    """The interface that has an address, unless NCCL is told to use others: then the first of those."""
    every = psutil.net_if_addrs()
    own = next(
        (name for name, has in every.items() if any(a.address.split("%")[0] == address for a in has)), ""
    )
    wanted = environ.get("NCCL_SOCKET_IFNAME", "")
    chosen = chosen_interfaces(every, wanted) if wanted else []
    return own if own in chosen or not chosen else chosen[0]


def _text(file: Path) -> str:
    """The text of one of the kernel's files; "" if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
