"""Emulated clusters: several nodes with real, rate-limited links on one Linux machine.

``EmulatedCluster`` runs commands on the nodes, ``measure_bytes`` measures the network traffic of part of a
distributed program, and ``zerojax emulate`` is the command line.
"""

from zerojax.testing.emulated_cluster.emulated import EmulatedCluster as EmulatedCluster
from zerojax.testing.emulated_cluster.measure import Measurement as Measurement
from zerojax.testing.emulated_cluster.measure import measure_bytes as measure_bytes
from zerojax.testing.emulated_cluster.network import ClusterError as ClusterError
from zerojax.testing.emulated_cluster.network import LinkBytes as LinkBytes
from zerojax.testing.emulated_cluster.network import limit_link as limit_link
from zerojax.testing.emulated_cluster.network import link_bytes as link_bytes
from zerojax.testing.emulated_cluster.network import unavailable as unavailable
