"""The other processes of a job: rendezvous, heartbeats, and the report of a failure to all.

JAX's coordination service reacts to trouble by aborting every process with a page of C++ (jaxlib 0.11: a peer
that never joins, a missed heartbeat, a closed connection to process 0). So each process keeps a connection of
its own to the *coordinator*, which runs in process 0 at the coordinator's address. Before JAX starts, the
coordinator waits for all ranks and compares their settings. Afterwards a process that dies, falls silent or
fails is reported to all others within moments, and each ends with one line that names it.

jax.distributed 0.11.2 by itself (measured with heartbeats of 10 s) finds a killed process after 10 s, not at
once; aborts the others when process 0 dies, even with ``jax_enable_recoverability``; and admits anybody who
reaches its port.

JAX's own traffic travels inside these connections (``proxy``): a job needs one port, only a process that
knows the job's token (``handshake``) reaches JAX's service, and JAX never sees process 0 vanish.
"""

from zerojax.multihost.peers.peers import Peers
from zerojax.multihost.peers.place import Place

__all__ = ["Peers", "Place"]
