"""``zerojax links``: measures TCP flows and collectives between a job's nodes, and what limits them.

    sudo env PATH="$PATH" zerojax emulate --nodes 2 --rate 10gbit -- zerojax links --json links.json
    zerojax plan gpt-1.3b --gpu h100 --nodes 2 --gpus-per-node 1 --links links.json

The second command plans with the measured links.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import jax
from rich.console import Group
from rich.table import Table

from zerojax.analysis.link_report import OPS, LinkReport, diagnose, gigabits
from zerojax.analysis.links import time_collectives
from zerojax.cli.cluster import JobOptions, joined_cluster
from zerojax.cli.options import read_options
from zerojax.errors import ConfigurationError
from zerojax.formatting import numeric, plain_text, size
from zerojax.multihost.flows import measure_flows
from zerojax.network.discovery import discover_network
from zerojax.network.nccl import NAMES, given_settings
from zerojax.run.config import ClusterSection, MeshSection
from zerojax.sharding.mesh import MeshShape

COUNTS = (1, 2, 4, 8)
_MIB = 1 << 20
_MAX_MIB = 1 << 10  # in MiB


@dataclass(frozen=True)
class Options(JobOptions):
    """Measure the rates of TCP flows and collectives between the nodes of a job, and say what limits them.

    Run it like training: under `zerojax launch`, `zerojax emulate` or a scheduler, or on each host with the
    same options and variables.

    Attributes:
        mesh: The mesh to measure; by default processes x devices.
        seconds: How long to measure each number of flows.
        sizes: MiB that a device sends to other nodes in one collective; choose about the size of a layer's
            payload.
        json: File to write the measurements to, for `zerojax plan --links`.
    """

    mesh: MeshSection = field(default_factory=MeshSection)
    seconds: float = 1.0
    sizes: tuple[int, ...] = (1, 16, 64)
    json: Path | None = None


def run(arguments: list[str]) -> None:
    """Measure the links, print the tables, and write the file that ``--json`` names."""
    options = read_options(Options, "links", arguments)
    if not 0.1 <= options.seconds <= 60:
        raise ConfigurationError(f"--seconds {options.seconds:g} must be from 0.1 to 60")
    if not options.sizes or not all(0 < size <= _MAX_MIB for size in options.sizes):
        sizes = " ".join(map(str, options.sizes))
        raise ConfigurationError(f"--sizes {sizes} must be whole numbers from 1 to {_MAX_MIB}, in MiB")
    with joined_cluster(options.mesh, ClusterSection(), options):
        report = _measure(options)
        if jax.process_index() == 0:
            print(plain_text(tables(report)))
            if options.json is not None:
                report.write(options.json)


def _measure(options: Options) -> LinkReport:
    mesh = options.mesh.to_mesh()
    shape, network = MeshShape.of(mesh), discover_network()
    if shape.nodes == 1:
        raise ConfigurationError(
            "one node: there are no links to measure. Run it in a job of several processes, such as "
            "zerojax launch --nodes 2 --devices-per-node 1 links"
        )
    flows = measure_flows(mesh, network.address, counts=COUNTS, seconds=options.seconds)
    return LinkReport(
        nodes=shape.nodes,
        local=shape.local,
        platform=jax.default_backend(),
        interface=network.interface,
        rate=network.rate,
        flows=flows,
        collectives=time_collectives(mesh, [_MIB * size for size in sorted(set(options.sizes))]),
        nccl=given_settings(os.environ),
        rdma=network.rdma,
        mtu=network.mtu,
    )


def tables(report: LinkReport) -> Group:
    """The measurements as tables, and the limit that they show."""
    rate = "of unknown rate" if report.rate is None else f"{gigabits(report.rate)} Gb/s"
    where = f"{report.nodes} nodes of {report.local} {report.platform} devices, {report.interface}, {rate}"
    where = ", ".join([where, *(f"{name}={report.nccl[name]}" for name in NAMES if name in report.nccl)])
    parts = [_flows(report), _collectives(report), *(_latency(report))]
    if report.flows:
        found = diagnose(report)
        parts += [f"limit: {found.limit}. {found.why}", f"change: {found.change}"]
    return Group(where, *parts)


def _flows(report: LinkReport) -> Table | str:
    if not report.flows:
        return "TCP flows: not measured, because the nodes are not separate processes"
    columns = (
        "flows",
        "Gb/s a node",
        "busiest thread, of a core",
        "busy, of all cores",
        "stolen, of all cores",
    )
    table = Table(*numeric(*columns), title="TCP flows from each node to the next, all at once")
    for flow in report.flows:
        table.add_row(
            str(flow.flows),
            gigabits(flow.bytes_per_second),
            f"{flow.busiest_thread:.0%}",
            f"{flow.host_busy:.0%}",
            f"{flow.stolen:.0%}",
        )
    return table


def _collectives(report: LinkReport) -> Table:
    numbers = numeric("", *(f"{count / _MIB:.3g} MiB" for count in report.sizes()))
    table = Table(*numbers, title="Collectives between the nodes, Gb/s a node, by what a device sends")
    for op in OPS:
        table.add_row(op, *(gigabits(report.carried(op, count)) for count in report.sizes()))
    return table


def _latency(report: LinkReport) -> list[str]:
    """For each collective, the size from which it sends for longer than it waits."""
    lines: list[str] = []
    for op in OPS:
        latency, rate = report.fit(op)
        if latency:
            even = size(latency * rate / report.local)
            sends = f"waits {1e6 * latency:,.0f} us, then sends at {gigabits(rate)} Gb/s"
            lines.append(f"{op}: {sends}, so with less than {even} a device it mostly waits")
    return lines
