"""Measurements of the links between a job's nodes: their JSON file for the planner, and what limits them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import dacite
import numpy as np

from zerojax.errors import ConfigurationError, file_errors
from zerojax.network.nccl import CHANNELS, SOCKETS, THREADS
from zerojax.validation.untrusted import parse_json, short

Op = Literal["all-gather", "all-to-all"]
Limit = Literal["network", "flows", "cores", "schedule"]

OPS: tuple[Op, ...] = ("all-gather", "all-to-all")

# The network limits collectives that reach this share of the flows' rate.
_REACHED = 0.85
# Cores that are this busy are a limit. So is a hypervisor that takes this share of them, because threads that
# poll then wait for threads that do not run.
_BUSY, _STOLEN = 0.9, 0.03
# Rates differ if one is this much higher.
_MORE = 1.25
# The share of an interface's rate that flows reach after headers, on a link that nothing else uses.
_PAYLOAD = 0.8
# Ethernet's usual packets: 4% of the bytes are headers.
_USUAL_MTU = 1500
# Beyond any measurement, and far from the limits of floats.
_TINY = 1e-18


@dataclass(frozen=True)
class FlowRate:
    """The rate of some TCP flows from each node to the next, all nodes at once.

    Attributes:
        flows: number of flows.
        bytes_per_second: rate at which a node receives, all its flows together.
        busiest_thread: share of a core that the busiest thread of a flow took.
        host_busy: share of a host's cores that were busy with anything.
        stolen: share of a host's cores that its hypervisor gave to other machines.
    """

    flows: int
    bytes_per_second: float
    busiest_thread: float
    host_busy: float
    stolen: float = 0.0


@dataclass(frozen=True)
class CollectiveTime:
    """A collective over ``node``, on all devices at once.

    Attributes:
        op: "all-gather" (of weights) or "all-to-all" (of gradients).
        bytes: number of bytes that each device sends to other nodes.
        seconds: the slowest process's shortest time of several runs.
    """

    op: Op
    bytes: int
    seconds: float


class Line(NamedTuple):
    """A collective's time over its size.

    Attributes:
        latency: seconds of an empty message.
        rate: bytes/s that a node sends.
    """

    latency: float
    rate: float


@dataclass(frozen=True)
class LinkReport:
    """The links between a job's nodes.

    Attributes:
        nodes: number of nodes.
        local: devices of a node.
        platform: of the devices, "gpu" or "cpu".
        interface: name of the network interface that leads to the coordinator.
        rate: bytes/s of the interface; None if unknown.
        flows: rates by the number of flows; empty if one process runs all nodes.
        collectives: times by op and size.
        nccl: NCCL's variables during the measurement.
        rdma: the kind of RDMA that carries collectives instead of TCP; "" if none does.
        mtu: bytes of the interface's largest packet; None if unknown.
    """

    nodes: int
    local: int
    platform: str
    interface: str
    rate: float | None
    flows: tuple[FlowRate, ...]
    collectives: tuple[CollectiveTime, ...]
    nccl: dict[str, str]
    rdma: str = ""
    mtu: int | None = None

    def sizes(self) -> list[int]:
        """The sizes of the collectives: bytes that a device sends, ascending."""
        return sorted({measured.bytes for measured in self.collectives})

    def carried(self, op: Op, size: int) -> float:
        """Bytes/s that a node sends in a collective. ``size`` is one of ``sizes()``."""
        (seconds,) = (found.seconds for found in self.collectives if (found.op, found.bytes) == (op, size))
        return size * self.local / seconds

    def fit(self, op: Op) -> Line:
        """Fit a collective's times by least squares of the relative errors."""
        found = [measured for measured in self.collectives if measured.op == op]
        sizes = np.asarray([measured.bytes for measured in found], float)
        seconds = np.asarray([measured.seconds for measured in found])
        slope, latency = np.polyfit(sizes, seconds, 1, w=1 / seconds) if len(set(sizes)) > 1 else (0.0, 0.0)
        if slope <= 0 or latency < 0:  # noise, or one size: take the largest message alone
            largest = int(np.argmax(sizes))
            slope, latency = seconds[largest] / sizes[largest], 0.0
        return Line(float(latency), float(self.local / slope))

    def expected(self, op: Op) -> Line:
        """The line to expect on GPUs.

        CPUs use gloo's collectives. Their report gives the rate of the best flows instead, because NCCL opens
        as many flows as its variables say.
        """
        if self.platform != "cpu":
            return self.fit(op)
        if not self.flows:
            raise ConfigurationError(
                "the links were measured on CPUs in one process, not between nodes: run zerojax links on the "
                "nodes"
            )
        return Line(0.0, _best(self).bytes_per_second)

    def write(self, file: Path) -> None:
        """Write it as JSON."""
        with file_errors(file, what="cannot write: "):
            file.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(file: Path) -> "LinkReport":
        """Read a file of ``write``.

        Raises:
            ConfigurationError: it cannot be read, or has other contents.
        """
        with file_errors(file, content="not what zerojax links writes"):
            how = dacite.Config(strict=True, cast=[tuple], type_hooks={float: _number})
            report = dacite.from_dict(LinkReport, parse_json(file.read_text()), how)
            if problem := _problem(report):
                raise ValueError(problem)
            return report


@dataclass(frozen=True)
class Diagnosis:
    """The limit of the traffic between nodes.

    Attributes:
        limit: "network", "flows" (too few TCP connections), "cores" of the hosts, or "schedule" (how the
            collectives, or the steps around them, use the link).
        why: the measurements that show it.
        change: the remedy.
    """

    limit: Limit
    why: str
    change: str


def diagnose(report: LinkReport) -> Diagnosis:
    """Find the limit of the collectives by comparing their rates with the flows' rates.

    ``report`` must have flows.
    """
    one, best = report.flows[0], _best(report)
    size = report.sizes()[-1]
    reached = min(report.carried(op, size) for op in OPS)
    found = (
        f"collectives carry {gigabits(reached)} Gb/s a node, {best.flows} TCP flows "
        f"{gigabits(best.bytes_per_second)}, one {gigabits(one.bytes_per_second)}"
    )
    if report.rdma:
        return Diagnosis(
            "network",
            f"{report.rdma} carries the collectives, {gigabits(reached)} Gb/s a node; TCP flows do not show "
            "its limit",
            "compare with the rate of the node's adapters; nccl-tests shows whether NCCL uses all of them",
        )
    if best.host_busy >= _BUSY and not (report.rate and _fills(report, best)):
        return Diagnosis(
            "cores",
            f"{found}; {best.host_busy:.0%} of a host's cores are busy meanwhile",
            "give the processes more cores, or take other work off the hosts; more flows do not help",
        )
    if reached >= _REACHED * best.bytes_per_second:
        return _beyond_collectives(report, found, best)
    stolen = max(rate.stolen for rate in report.flows)
    if stolen >= _STOLEN:
        return Diagnosis(
            "cores",
            f"{found}; the hypervisor gave {stolen:.0%} of a host's cores to others, and NCCL's threads wait",
            "measure again when the machine is quieter, or use machines that are not shared",
        )
    few = best.bytes_per_second > _MORE * one.bytes_per_second and _opened(report) < _enough(report)
    if few and reached <= _MORE * _opened(report) * one.bytes_per_second:
        busy = one.busiest_thread >= _BUSY
        cause = "a core is busy with it" if busy else "the network limits each flow"
        return Diagnosis("flows", f"{found}: {cause}", _more_flows(report, _enough(report)))
    why = f"{found}: neither the link nor the number of flows is the limit"
    change = "look for cores that NCCL's threads lack, a slow node (zerojax doctor), other traffic"
    if report.platform == "cpu":
        change = "nothing: this is gloo, which CPUs use; GPUs use NCCL"
    return Diagnosis("schedule", why, change)


def gigabits(bytes_per_second: float) -> str:
    """A rate in Gb/s, without the unit, with three digits: "94.5"."""
    return f"{8 * bytes_per_second / 1e9:.3g}"


def _beyond_collectives(report: LinkReport, found: str, best: FlowRate) -> Diagnosis:
    """The limit if collectives are as fast as flows."""
    if not _fills(report, best):
        rates = [rate.bytes_per_second for rate in report.flows]
        link = f"{found}, of a link of {gigabits(report.rate or 0)}"
        if len(rates) > 1 and best is report.flows[-1] and rates[-1] > _MORE * rates[-2]:
            return Diagnosis("flows", link, _more_flows(report, 2 * best.flows))
        return Diagnosis(
            "network",
            link,
            "something between the nodes is slower than their links, or carries other traffic",
        )
    usual = report.mtu is not None and report.mtu <= _USUAL_MTU
    jumbo = f"packets have {report.mtu} bytes: jumbo frames carry 4% more. Otherwise " if usual else ""
    return Diagnosis(
        "network",
        found,
        f"{jumbo}only fewer bytes or a faster link help. zerojax plan --links names the preset, and the "
        "smallest zero.every with which compute hides local updates. If steps take longer than it predicts, "
        "the schedule is the limit (zerojax overlap)",
    )


def _more_flows(report: LinkReport, flows: int) -> str:
    connections = CHANNELS * report.local
    threads = min(16, -(-flows // connections))
    return (
        f"NCCL_SOCKET_NTHREADS={threads} gives a node {threads * connections} flows; zerojax itself opens "
        "four over links of more than 10 Gb/s, on nodes of 16 cores or more"
    )


def _best(report: LinkReport) -> FlowRate:
    return max(report.flows, key=lambda rate: rate.bytes_per_second)


def _enough(report: LinkReport) -> int:
    """The fewest flows that reach 90% of the best rate."""
    least = 0.9 * _best(report).bytes_per_second
    return min(rate.flows for rate in report.flows if rate.bytes_per_second >= least)


def _opened(report: LinkReport) -> int:
    """The number of flows that NCCL opens for a node: one a GPU if a single thread serves them all."""
    threads, sockets = (report.nccl.get(name, "") for name in (THREADS, SOCKETS))
    each = int(threads) * int(sockets or 1) if threads.isdecimal() and (sockets or "1").isdecimal() else 0
    return report.local * max(1, CHANNELS * each)


def _fills(report: LinkReport, best: FlowRate) -> bool:
    """Whether flows fill the link; True if its rate is unknown."""
    return report.rate is None or best.bytes_per_second >= _PAYLOAD * report.rate


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{short(value)} is not a number")
    return float(value)


def _problem(report: LinkReport) -> str:
    """The first fault in a file's values; "" if there is none."""
    if report.nodes < 2 or report.local < 1:
        return f"{report.nodes} nodes of {report.local} devices"
    measured = [(found.op, found.bytes) for found in report.collectives]
    if not report.sizes() or sorted(measured) != sorted((op, size) for op in OPS for size in report.sizes()):
        return "each collective is measured once with each size"
    numbers = [rate.bytes_per_second for rate in report.flows]
    numbers += [number for found in report.collectives for number in (found.bytes, found.seconds)]
    if not all(_TINY < number < 1 / _TINY for number in numbers):
        return "sizes, seconds and rates must be above 0"
    return ""
