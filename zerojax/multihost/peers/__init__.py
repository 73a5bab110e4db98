"""The other processes of a job: rendezvous, heartbeats, and the report of a failure to all.

JAX's coordination service reacts to trouble by aborting every process with a page of C++. In jaxlib 0.11 that
is a peer that never joins, a missed heartbeat, or a closed connection to process 0. So each process keeps a
separate connection to the *coordinator*, which runs in process 0 at the coordinator's address. Before JAX
starts, the coordinator waits for all ranks, and compares their settings. Afterwards it reports a process that
dies, falls silent or fails to all others within moments. Each then ends with one line that names that
process.

By itself, jax.distributed 0.11.2 (measured with heartbeats of 10 s) only finds a killed process after 10 s.
It aborts the others when process 0 dies, even with ``jax_enable_recoverability``. It admits anybody who
reaches its port.

JAX's own traffic travels inside these connections (``proxy``). So a job needs one port, and JAX never sees
process 0 vanish. Only a process that knows the job's token (``handshake``) reaches JAX's service.
"""

from zerojax.multihost.peers.peers import Peers as Peers
from zerojax.multihost.peers.proxy import Place as Place
