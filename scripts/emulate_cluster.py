#!/usr/bin/env python3
"""Run a command on every node of a cluster emulated on this machine.

    sudo env PATH="$PATH" scripts/emulate_cluster.py --nodes 2 --gpus-per-node 4 --rate 10gbit -- \\
        zerojax train configs/gpt-tiny.toml

Each node is a network namespace with a full-duplex link of the given rate to a common switch, its
own GPUs (or emulated CPU devices where there are none) and its own host name. JAX, torchrun and NCCL
find in the environment what they need to be one job (see zerojax.cluster.EmulatedCluster). At the
end the bytes of each link are printed. Linux and root; nothing outside is touched, and nothing is
left behind, however the run ends. The exit code is the worst of the nodes' codes.
"""

import argparse
import sys

from zerojax.testing.emulated_cluster import ClusterError, EmulatedCluster, LinkBytes


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run the command on all nodes, print the links' bytes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, required=True, help="how many nodes")
    parser.add_argument("--gpus-per-node", type=int, default=1, help="devices of each node")
    parser.add_argument("--rate", default="10gbit", help="of each link: 10gbit, 400mbit, or none")
    parser.add_argument("--latency", help="one-way delay to add between nodes: 50us")
    parser.add_argument(
        "--platform", choices=("auto", "cpu", "gpu"), default="auto",
        help="real GPUs or emulated CPU devices; by default GPUs where there are any",
    )  # fmt: skip
    parser.add_argument("--grace", type=float, default=30.0, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- command and its arguments")
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
        print(f"emulate_cluster: {error}", file=sys.stderr)
        return 2
    with cluster:
        result = cluster.run(command, grace=options.grace)
        print(table(cluster.link_bytes()), file=sys.stderr)
    return result.code


def table(links: list[LinkBytes]) -> str:
    """The bytes of each link, a line each."""
    lines = [f"{'link':8}{'sent, bytes':>20}{'received, bytes':>20}"]
    for node, link in enumerate(links):
        lines.append(f"node{node:<4}{link.sent:>20,}{link.received:>20,}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
