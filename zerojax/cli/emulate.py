"""`zerojax emulate`: run a command on every node of a cluster emulated on this machine.

    sudo env PATH="$PATH" zerojax emulate --nodes 2 --gpus-per-node 4 --rate 10gbit -- \\
        zerojax train configs/gpt-tiny.toml

Each node is a network namespace with a full-duplex link of the given rate to a common switch, its own GPUs
(or emulated CPU devices where there are none) and its own host name. JAX, torchrun and NCCL find in the
environment what they need to be one job (see ``EmulatedCluster``). The bytes of each link are printed at the
end.

Linux and root. Nothing outside the namespaces is touched, and nothing is left behind, however the run ends.
The exit code is the worst of the nodes' codes.
"""

import argparse
import sys
from collections.abc import Sequence

from zerojax.errors import ZeroError
from zerojax.testing.emulated_cluster import ClusterError, EmulatedCluster, LinkBytes


def run(arguments: Sequence[str]) -> None:
    """The command; it ends the process with the worst of the nodes' exit codes.

    Raises:
        ZeroError: a cluster that cannot be emulated, or not on this machine.
        SystemExit: wrong options (code 2), or after --help (code 0).
    """
    parser = argparse.ArgumentParser(
        prog="zerojax emulate",
        description="Run a command on every node of a cluster emulated on this machine.",
    )
    add = parser.add_argument
    add("--nodes", type=int, required=True, help="how many nodes")
    add("--gpus-per-node", type=int, default=1, help="devices of each node")
    add("--rate", default="10gbit", help="of each link: 10gbit, 400mbit, or none")
    add("--latency", help="one-way delay to add between nodes: 50us")
    add("--platform", choices=("auto", "cpu", "gpu"), default="auto", help="default: GPUs if there are any")
    add("--grace", type=float, default=30.0, help="seconds from SIGTERM to SIGKILL")
    add("command", nargs=argparse.REMAINDER, help="-- command and its arguments")
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
            platform=options.platform,
        )
    except (ValueError, ClusterError) as error:
        raise ZeroError(str(error)) from error
    with cluster:
        result = cluster.run(command, grace=options.grace)
        print(table(cluster.link_bytes()), file=sys.stderr)
    sys.exit(result.code)


def table(links: list[LinkBytes]) -> str:
    """The bytes of each link, a line each."""
    lines = [f"{'link':8}{'sent, bytes':>20}{'received, bytes':>20}"]
    for node, link in enumerate(links):
        lines.append(f"node{node:<4}{link.sent:>20,}{link.received:>20,}")
    return "\n".join(lines)
