"""Finds the network between the nodes of a job in this host's kernel."""

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from zerojax.validation.rates import bytes_per_second

# The environment variable with the rate of a node's link, for interfaces that do not know it.
VARIABLE = "ZEROJAX_LINK_RATE"

# Linux's own description of its interfaces; see Documentation/ABI/testing/sysfs-class-net.
_INTERFACES, _RDMA = Path("/sys/class/net"), Path("/sys/class/infiniband")
_VERBS = Path("/dev/infiniband")

# The coordinator's host after `zerojax.distributed.joined`, when JAX itself only knows a Unix socket.
_joined: list[str] = []


@dataclass(frozen=True)
class Network:
    """The link between this node and the other nodes.

    Attributes:
        interface: name of the interface that leads to the coordinator; "" if there is none.
        rate: bytes/s of this node's link in each direction; None if unknown.
        vendor: PCI vendor of the interface's adapter, such as "0x1d0f"; "" for a virtual adapter.
        rdma: the kind of RDMA that carries NCCL's data instead of TCP sockets; "" if none does.
        loopback: whether the coordinator is on this host.
        address: this node's address for the other nodes; "" if there is no coordinator.
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
    """Note the coordinator's host, from which ``discover_network`` finds the job's network."""
    _joined[:] = [host]


def discover_network(environ: Mapping[str, str] | None = None) -> Network:
    """Find the network that leads to the other nodes of the job.

    ``environ`` has NCCL's variables and ``ZEROJAX_LINK_RATE``. None is this process's environment.

    Raises:
        ConfigurationError: ``ZEROJAX_LINK_RATE`` is not a rate.
    """
    environ = os.environ if environ is None else environ
    rate, rdma = environ.get(VARIABLE, ""), rdma_of(environ)
    given = bytes_per_second(rate, VARIABLE) if rate else None
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

    Virtual interfaces have no rate here, because a container's end of a veth pair always reports 10 Gb/s.
    """
    physical = (interface / "device").exists() or (interface / "bonding").exists()
    if not physical and "DEVTYPE=vlan" not in _text(interface / "uevent"):
        return None
    text = _text(interface / "speed")  # in Mb/s; -1 if unknown, and no text while the link is down
    return int(text) * 1e6 / 8 if text.isdecimal() and int(text) else None


def rdma_of(environ: Mapping[str, str], devices: Path = _RDMA, verbs: Path = _VERBS) -> str:
    """The RDMA that carries NCCL's data instead of TCP sockets, such as "RoCE (mlx5_0)"; "" if none does.

    Containers often have InfiniBand's folder in /sys, ``devices``, but not its folder in /dev, ``verbs``.
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
    """The interfaces among ``names`` that a value of NCCL_SOCKET_IFNAME selects.

    The value is a list of prefixes. After "=" it is a list of names, and after "^" a list to exclude (NCCL's
    documentation).
    """
    unwanted = wanted.startswith("^")
    exact = wanted.lstrip("^").startswith("=")
    listed = tuple(filter(None, wanted.lstrip("^=").split(",")))

    def matches(name: str) -> bool:
        return name in listed if exact else name.startswith(listed)

    return [name for name in names if matches(name) != unwanted]


def _coordinator() -> str:
    """The host of the job's coordinator; "" if there is none."""
    if _joined:
        return _joined[0]
    from jax._src import distributed  # JAX keeps the address nowhere else; launchers do without JAX

    address = distributed.global_state.coordinator_address or ""
    return "" if address.startswith("unix:") else address.rpartition(":")[0].strip("[]")


def _own_address(host: str) -> str:
    """The address from which this host sends packets to another host; "" if it cannot reach that host."""
    try:
        found = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM) if host else []
    except (OSError, UnicodeError):
        return ""
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # on a datagram socket this only chooses the route
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def _interface_of(address: str, environ: Mapping[str, str]) -> str:
    """The interface with an address, or the first one that NCCL_SOCKET_IFNAME selects if it excludes that."""
    every = psutil.net_if_addrs()
    own = next(
        (name for name, has in every.items() if any(a.address.split("%")[0] == address for a in has)), ""
    )
    wanted = environ.get("NCCL_SOCKET_IFNAME", "")
    chosen = chosen_interfaces(every, wanted) if wanted else []
    return own if own in chosen or not chosen else chosen[0]


def _text(file: Path) -> str:
    """The text of a kernel file; "" if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
