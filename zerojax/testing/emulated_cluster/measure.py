"""The network traffic of part of a distributed program, read from the interfaces' counters."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from zerojax.testing.emulated_cluster.emulated import EmulatedCluster
from zerojax.testing.emulated_cluster.network import LinkBytes


@dataclass(frozen=True)
class Measurement:
    """The measurement of one node."""

    link: LinkBytes  # bytes on its link during the measured part
    result: Any  # result of the measured part


def measure_bytes(
    target: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    nodes: int,
    devices_per_node: int = 1,
    rate: str | None = "2gbit",
    timeout: float = 300.0,
    output: BinaryIO | None = None,
) -> list[Measurement]:
    """Run a function on every node of an emulated cluster, and count the bytes sent and received.

    One process per node runs the function, on emulated CPU devices. ``jax.distributed`` joins the processes.
    The function prepares (compiles, warms up) and *returns a function without arguments*. That one is
    measured, and returns plain JSON data.

    Args:
        target: "package.module:function", importable from the current directory.
        arguments: keyword arguments for it, plain JSON data.
        nodes: number of nodes, one process each.
        devices_per_node: emulated CPU devices of each node.
        rate: of the links, see ``EmulatedCluster``. If the processors cannot keep up, TCP retransmits packets
            (up to a tenth of the bytes were measured). They count as on a real link.
        timeout: seconds for the whole measurement.
        output: destination of the processes' lines.

    Returns:
        One measurement per node.

    Raises:
        ClusterError: this machine cannot emulate a cluster.
        RuntimeError: a process failed; its output says why.
        TimeoutError: the processes did not finish in time.
    """
    with (
        tempfile.TemporaryDirectory(prefix="zerojax-measure-") as folder,
        EmulatedCluster(nodes, devices_per_node, rate=rate, platform="cpu") as cluster,
    ):
        command = [
            sys.executable,
            "-m",
            "zerojax.testing.emulated_cluster.worker",
            target,
            json.dumps(dict(arguments or {})),
            folder,
        ]
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        done = cluster.run(command, env={"PYTHONPATH": path}, timeout=timeout, grace=10, output=output)
        if failed := [f"{o.name} ({o.code})" for o in done.outcomes if o.code]:
            raise RuntimeError(f"{target} failed on {', '.join(failed)}")
        found = [json.loads((Path(folder) / f"{node}.json").read_text()) for node in range(nodes)]
        return [Measurement(LinkBytes(one["sent"], one["received"]), one["result"]) for one in found]
