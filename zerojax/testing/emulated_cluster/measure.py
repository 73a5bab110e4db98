"""What a piece of a distributed program puts on the network, by the interfaces' own counters."""

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
    """What one node did."""

    link: LinkBytes  # bytes on its link during the measured piece
    result: Any  # what the piece returned


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
    """Run a function on every node of an emulated cluster and count its bytes.

    The function runs once per node, joined to the others by `jax.distributed`, on emulated CPU
    devices. It prepares (compiles, warms up) and *returns a function without arguments*: the piece
    that is measured. What that returns (plain JSON data) comes back.

    Args:
      target: "package.module:function", importable from the current directory.
      arguments: keyword arguments for it, plain JSON data.
      nodes: number of nodes, one process each.
      devices_per_node: emulated CPU devices of each.
      rate: of the links, see `EmulatedCluster`. Faster than the processors keep up with, TCP sends
        some packets twice (seen: up to a tenth of the bytes), which counts here as on a real link.
      timeout: seconds for everything.
      output: where the processes' lines go.

    Returns:
      One measurement per node.

    Raises:
      ClusterError: this machine cannot emulate a cluster.
      RuntimeError: a process failed; its output says why.
      TimeoutError: they were not done in time.
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
        return [_load(Path(folder) / f"{node}.json") for node in range(nodes)]


def _load(path: Path) -> Measurement:
    data = json.loads(path.read_text())
    return Measurement(LinkBytes(data["sent"], data["received"]), data["result"])
