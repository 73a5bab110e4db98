"""``zerojax emulate``: run a command on every node of a cluster emulated on this machine.

    sudo env PATH="$PATH" zerojax emulate --nodes 2 --gpus-per-node 4 --rate 10gbit -- \\
        zerojax train configs/gpt-tiny.toml

Each node is a network namespace with its own host name, and a full-duplex link of the given rate to a common
switch. It has its own GPUs, or emulated CPU devices if there are none. Environment variables make JAX,
torchrun and NCCL run as one job (see ``EmulatedCluster``). The bytes of each link are printed at the end.

Needs Linux and root. Nothing outside the namespaces is changed, and nothing is left behind, however the run
ends. The exit code is the highest of the nodes' codes.
"""

import argparse
import sys
from collections.abc import Sequence

from zerojax.errors import ConfigurationError
from zerojax.testing.emulated_cluster import ClusterError, EmulatedCluster, LinkBytes


def run(arguments: Sequence[str]) -> None:
    """Parse the command line, run the command on every node, and print the bytes of each link.

    Raises:
        ConfigurationError: the cluster cannot be emulated, at all or on this machine.
        SystemExit: always; the highest of the nodes' exit codes, 2 for wrong options, 0 after --help.
    """
    parser = argparse.ArgumentParser(
        prog="zerojax emulate",
        description="Run a command on every node of a cluster emulated on this machine.",
    )
    add = parser.add_argument
    add("--nodes", type=int, required=True, help="nodes to emulate")
    each = "GPUs, or emulated CPU devices, of each node (default: %(default)s)"
    add("--gpus-per-node", type=int, default=1, help=each)
    rate = "rate of each link, such as 400mbit, or none for no limit (default: %(default)s)"
    add("--rate", default="10gbit", help=rate)
    add("--latency", help="one-way delay to add between nodes, such as 50us")
    add("--mtu", type=int, default=1500, help="bytes of the largest packet (default: %(default)s)")
    add("--platform", choices=("auto", "cpu", "gpu"), default="auto", help="default: GPUs if there are any")
    add("--grace", type=float, default=30.0, help="seconds from SIGTERM to SIGKILL (default: %(default)s)")
    add("command", nargs=argparse.REMAINDER, help="--, then the command and its arguments")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command: give one after --")
    try:
        cluster = EmulatedCluster(
            options.nodes,
            options.gpus_per_node,
            rate=None if options.rate == "none" else options.rate,
            latency=options.latency,
            mtu=options.mtu,
            platform=options.platform,
        )
    except (ValueError, ClusterError) as error:
        raise ConfigurationError(str(error)) from error
    with cluster:
        result = cluster.run(command, grace=options.grace)
        print(table(cluster.link_bytes()), file=sys.stderr)
    sys.exit(result.code)


def table(links: list[LinkBytes]) -> str:
    """A table of the bytes of each link."""
    lines = [f"{'link':8}{'sent, bytes':>20}{'received, bytes':>20}"]
    for node, link in enumerate(links):
        lines.append(f"node{node:<4}{link.sent:>20,}{link.received:>20,}")
    return "\n".join(lines)
