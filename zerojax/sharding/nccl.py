"""What NCCL is told before it starts, from what the network is.

NCCL reads its environment when the first communicator is made, which in JAX is the first collective:
``make_mesh`` is in time. A variable that is set already stays, in the environment or in one of NCCL's files
(NCCL's documentation, "Environment Variables").

Over sockets NCCL moves the data between two GPUs in one TCP flow, whose work is done by one thread. A flow
carries about 20 Gb/s where a core copies its bytes, and 5 to 10 on clouds that limit it.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zerojax.errors import ConfigurationError
from zerojax.sharding.network import VARIABLE, Network, network_facts

THREADS, SOCKETS = "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"
SPLIT = "NCCL_COMM_SPLIT_SHARE_RESOURCES"
PIECES = "NCCL_P2P_NET_CHUNKSIZE"
NAMES = (SPLIT, THREADS, SOCKETS, PIECES)

CORES = "ZEROJAX_NODE_CORES"
"""The environment variable that names a node's cores, where the kernel counts more than it may use."""

# The rate in bytes/s up to which one flow fills a node's link, and the flows for a faster one. Each thread
# polls: two nodes of 16 cores were fastest with four threads, at 25 and at 100 Gb/s; two of 8 cores gained
# nothing from two, and lost by four and by eight (docs/clusters.md).
_ONE_FLOW, _FLOWS = 10e9 / 8, 4
_CORES_PER_THREAD = 4
# Bytes that all-to-alls hand to the network at a time; NCCL divides a piece among the flows.
_PIECE = 2**20

# Adapters for which NCCL chooses threads and sockets by itself, by PCI vendor.
_CHOSEN_BY_NCCL = {
    "0x1d0f": "on Amazon's adapters NCCL opens 16 flows by itself",
    "0x1ae0": "on Google's adapters NCCL opens 4 flows by itself",
}


@dataclass(frozen=True)
class Setting:
    """One of NCCL's variables.

    Attributes:
        name: of the variable.
        value: to set it to; None to leave it as it is.
        reason: in words.
    """

    name: str
    value: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.name if self.value is None else f'{self.name}={self.value}'}: {self.reason}"


# What this process has told NCCL.
_applied: list[Setting] = []


def settings_here(processes: int, devices: int, local: int) -> tuple[Network, list[Setting]]:
    """The network as this process finds it, and what NCCL should be told.

    Args:
        processes: of the job.
        devices: of the job.
        local: extent of the mesh's fast axis.

    Raises:
        ConfigurationError: ``ZEROJAX_NODE_CORES`` is not a number of cores.
    """
    own = devices // processes
    local = max(local, own)
    network, given = network_facts(), given_settings(os.environ)
    return network, settings(network, nodes=processes, local=local, cores=_cores(local // own), given=given)


def _cores(processes: int) -> int:
    """The cores of this node, on which ``processes`` processes run."""
    if given := os.environ.get(CORES):
        if not given.isdecimal() or not int(given):
            raise ConfigurationError(f"{CORES}={given}: the number of this node's cores, such as 16")
        return int(given)
    # Where a node has a process for each GPU, a scheduler gives each its share of the cores.
    return min(len(os.sched_getaffinity(0)) * processes, os.cpu_count() or 1)


def settings(
    network: Network, *, nodes: int, local: int, cores: int, given: Mapping[str, str]
) -> list[Setting]:
    """What NCCL should be told, and why; also what it is better not told.

    Args:
        network: between the nodes.
        nodes: processes of the job, each of which has a host or a part of one.
        local: GPUs of a node.
        cores: that the processes of a node may use.
        given: NCCL's variables as they are set already, by name; see ``given_settings``.
    """
    if nodes == 1:
        return []
    threads = _threads(network, local, cores, given)
    return [_split(given), threads, _pieces(threads, given)]


def given_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """NCCL's variables as the user has set them: in the environment, or in one of NCCL's files."""
    own = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.nccl.conf"
    found: dict[str, str] = {}
    for file in ("/etc/nccl.conf", own):
        found |= _read(Path(file))
    return found | {name: value for name, value in environ.items() if name.startswith("NCCL_")}


def apply(chosen: list[Setting]) -> None:
    """Set the variables that are to be set; NCCL must not have started yet."""
    for setting in chosen:
        if setting.value is not None:
            os.environ[setting.name] = setting.value
    # A second mesh finds the variables of the first one set.
    _applied.extend(setting for setting in chosen if setting.value is not None)


def applied() -> list[Setting]:
    """What this process has told NCCL so far."""
    return list(_applied)


def exports(chosen: list[Setting]) -> list[str]:
    """The same for other programs: lines of a shell."""
    return [f"export {setting.name}={setting.value}" for setting in chosen if setting.value is not None]


def _split(given: Mapping[str, str]) -> Setting:
    if SPLIT in given:
        return Setting(SPLIT, None, f"set to {given[SPLIT]} already")
    return Setting(
        SPLIT, "0", "XLA splits communicators, and a part would have no more channels than the whole"
    )


def _threads(network: Network, local: int, cores: int, given: Mapping[str, str]) -> Setting:
    """Threads of a connection, each of which has a flow; every GPU has one connection each way."""
    if reason := _one_flow_suffices(network, local, given):
        return Setting(THREADS, None, reason)
    threads = math.ceil(_FLOWS / local)
    if cores < (needed := _CORES_PER_THREAD * threads * local):
        return Setting(THREADS, None, f"{cores} cores are too few for more flows: {needed} would do")
    flows = f"{threads * local} TCP flows a node in place of {local}"
    return Setting(THREADS, str(threads), f"{_rate(network)}: {flows}")


def _pieces(threads: Setting, given: Mapping[str, str]) -> Setting:
    if PIECES in given:
        return Setting(PIECES, None, f"set to {given[PIECES]} already")
    if threads.value is None:
        return Setting(PIECES, None, "NCCL's own suit the flows that it opens")
    return Setting(PIECES, str(_PIECE), "pieces of 1 MiB in place of 128 KiB, for the flows to share")


def _one_flow_suffices(network: Network, local: int, given: Mapping[str, str]) -> str:
    """Why threads and sockets are left alone; "" if they are not."""
    for name in (THREADS, SOCKETS):
        if name in given:
            return f"{name} is set to {given[name]} already"
    if network.loopback:
        return "all processes share this host"
    if network.rdma:
        return f"{network.rdma} carries the data, not TCP"
    if not network.interface:
        return "the network is not known before the processes have joined"
    if network.vendor in _CHOSEN_BY_NCCL:
        return _CHOSEN_BY_NCCL[network.vendor]
    if network.rate is not None and network.rate <= _ONE_FLOW:
        return f"one TCP flow fills {_rate(network)}"
    if local >= _FLOWS:
        return f"{_rate(network)}: the {local} GPUs of a node open a flow each"
    return ""


def _rate(network: Network) -> str:
    if network.rate is None:
        return f"{network.interface} does not say its rate ({VARIABLE} would)"
    return f"a link of {8 * network.rate / 1e9:g} Gb/s"


def _read(file: Path) -> dict[str, str]:
    """The variables in one of NCCL's files: lines of NAME=VALUE, and comments after #."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split("#")[0].partition("=") for line in lines)
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}
