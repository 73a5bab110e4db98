"""Emulated clusters: several nodes with real, rate-limited links on one Linux machine.

``EmulatedCluster`` runs commands on the nodes, ``measure_bytes`` measures the network traffic of part of a
distributed program, and ``zerojax emulate`` is the command line.
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
