"""Clusters that are not there: several nodes with real, rate-limited links on one Linux machine.

`EmulatedCluster` runs commands in them, `measure_bytes` measures what a piece of a distributed
program puts on the network, and ``zerojax emulate`` is the command line.
"""

from zerojax.testing.emulated_cluster.emulated import EmulatedCluster
from zerojax.testing.emulated_cluster.measure import Measurement, measure_bytes
from zerojax.testing.emulated_cluster.network import (
    ClusterError,
    LinkBytes,
    limit_link,
    link_bytes,
    unavailable,
)

__all__ = [
    "ClusterError",
    "EmulatedCluster",
    "LinkBytes",
    "Measurement",
    "limit_link",
    "link_bytes",
    "measure_bytes",
    "unavailable",
]
