"""Chooses NCCL's variables for the network, before NCCL starts.

NCCL reads its environment when it makes the first communicator. In JAX that is the first collective, so
``make_mesh`` is early enough. Variables that the user has set stay, in the environment or in one of NCCL's
files (NCCL's documentation, "Environment Variables").

Over sockets two GPUs have a connection each way on each of NCCL's two channels. One thread serves them all.
It carries about 20 Gb/s, because it copies every byte. ``NCCL_SOCKET_NTHREADS`` gives each connection several
threads, each with a TCP flow.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zerojax.errors import ConfigurationError
from zerojax.network.discovery import VARIABLE, Network, discover_network

THREADS, SOCKETS = "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"
SPLIT = "NCCL_COMM_SPLIT_SHARE_RESOURCES"
BUFFER, PIECES = "NCCL_BUFFSIZE", "NCCL_P2P_NET_CHUNKSIZE"
NAMES = (SPLIT, THREADS, SOCKETS, BUFFER, PIECES)

CHANNELS = 2
"""Connections each way between two GPUs over sockets (the log of NCCL 2.28)."""

CORES = "ZEROJAX_NODE_CORES"
"""The environment variable with the number of a node's cores, if the kernel counts more than it may use."""

# One thread fills a link of up to _ONE_THREAD bytes/s. A faster link gets _THREADS threads. They poll at both
# ends of a flow, so on nodes of 16 cores four were faster than eight, at 25, 40 and 100 Gb/s
# (docs/clusters.md).
_ONE_THREAD, _THREADS, _CORES_PER_THREAD = 10e9 / 8, 4, 4
# Bytes of a connection's buffer, and of the pieces that all-to-alls hand to the network, at most an eighth of
# the buffer. NCCL divides a piece among the flows of a connection.
_BUFFER, _PIECE = 2**24, 2**21

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
        value: the value to set; None to leave it as it is.
        reason: a sentence for the user.
    """

    name: str
    value: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.name if self.value is None else f'{self.name}={self.value}'}: {self.reason}"


# The variables that this process has set.
_applied: list[Setting] = []


def settings_here(processes: int, devices: int, local: int) -> tuple[Network, list[Setting]]:
    """Find the network of this process, and choose NCCL's variables for it.

    Args:
        processes: of the job.
        devices: of the job.
        local: extent of the mesh over ``local``.

    Raises:
        ConfigurationError: ``ZEROJAX_NODE_CORES`` is not a number of cores.
    """
    own = devices // processes
    local = max(local, own)
    network, given = discover_network(), given_settings(os.environ)
    return network, settings(network, nodes=processes, local=local, cores=_cores(local // own), given=given)


def _cores(processes: int) -> int:
    """The number of cores of this node, on which ``processes`` processes run."""
    if given := os.environ.get(CORES):
        if not given.isdecimal() or not int(given):
            raise ConfigurationError(
                f"{CORES}={given} is not a number of cores: set it to this node's, such as 16"
            )
        return int(given)
    # If a node has a process for each GPU, a scheduler gives each process its share of the cores.
    return min(len(os.sched_getaffinity(0)) * processes, os.cpu_count() or 1)


def settings(
    network: Network, *, nodes: int, local: int, cores: int, given: Mapping[str, str]
) -> list[Setting]:
    """Choose NCCL's variables, including those to leave as they are, with reasons.

    Args:
        network: as ``discover_network`` returns it.
        nodes: processes of the job.
        local: extent of the mesh over ``local``.
        cores: cores that the processes of a node may use.
        given: NCCL's variables that the user has set; see ``given_settings``.
    """
    if nodes == 1:
        return []
    chosen = [
        Setting(SPLIT, "0", "XLA splits communicators, and the parts would share the channels of the whole")
    ]
    if reason := _one_thread_suffices(network, local, cores):
        chosen.append(Setting(THREADS, None, reason))
    else:
        pieces = "pieces of up to 2 MiB instead of 128 KiB, for the flows to share"
        chosen += [_threads(network, local, given), _buffer(local), Setting(PIECES, str(_PIECE), pieces)]
    return [
        Setting(one.name, None, f"set to {given[one.name]} already") if one.name in given else one
        for one in chosen
    ]


def given_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """NCCL's variables that the user has set in the environment or in one of NCCL's files."""
    own = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.nccl.conf"
    found: dict[str, str] = {}
    for file in ("/etc/nccl.conf", own):
        found |= _read(Path(file))
    return found | {name: value for name, value in environ.items() if name.startswith("NCCL_")}


def apply(chosen: list[Setting]) -> None:
    """Set the chosen variables. NCCL must not have started yet."""
    for setting in chosen:
        if setting.value is not None:
            os.environ[setting.name] = setting.value
    # A second mesh finds the variables that the first mesh has set.
    _applied.extend(setting for setting in chosen if setting.value is not None)


def applied() -> list[Setting]:
    """The variables that this process has set so far."""
    return list(_applied)


def exports(chosen: list[Setting]) -> list[str]:
    """The chosen variables as lines of a shell, for other programs."""
    return [f"export {setting.name}={setting.value}" for setting in chosen if setting.value is not None]


def _threads(network: Network, local: int, given: Mapping[str, str]) -> Setting:
    if SOCKETS in given:
        return Setting(THREADS, None, f"{SOCKETS} is set to {given[SOCKETS]} already")
    if network.vendor in _CHOSEN_BY_NCCL:
        return Setting(THREADS, None, _CHOSEN_BY_NCCL[network.vendor])
    each = _threads_of_a_connection(local)
    sending = f"{CHANNELS * each * local} threads of a node send, each with a TCP flow, instead of {local}"
    return Setting(THREADS, str(each), f"{_rate(network)}: {sending}")


def _threads_of_a_connection(local: int) -> int:
    return math.ceil(_THREADS / (CHANNELS * local))


def _buffer(local: int) -> Setting:
    if local > 1:
        return Setting(BUFFER, None, "the buffers between a node's GPUs have the same size, in GPU memory")
    return Setting(BUFFER, str(_BUFFER), "16 MiB a connection in place of 4, for longer pieces")


def _one_thread_suffices(network: Network, local: int, cores: int) -> str:
    """Why NCCL is left to one thread a GPU; "" if it is not."""
    if network.loopback:
        return "all processes share this host"
    if network.rdma:
        return f"{network.rdma} carries the data, not TCP"
    if not network.interface:
        return "the network is not known before the processes have joined"
    if network.rate is not None and network.rate <= _ONE_THREAD:
        return f"one thread fills {_rate(network)}"
    if local >= _THREADS:
        return f"{_rate(network)}: each of a node's {local} GPUs has a thread"
    needed = _CORES_PER_THREAD * CHANNELS * _threads_of_a_connection(local) * local
    if cores < needed:
        return f"{cores} cores are too few for more threads, which need {needed}"
    return ""


def _rate(network: Network) -> str:
    if network.rate is None:
        return f"{network.interface} does not report its rate (set {VARIABLE})"
    return f"a link of {8 * network.rate / 1e9:g} Gb/s"


def _read(file: Path) -> dict[str, str]:
    """The variables in one of NCCL's files. It has lines of NAME=VALUE, and comments after #."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split("#")[0].partition("=") for line in lines)
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}
