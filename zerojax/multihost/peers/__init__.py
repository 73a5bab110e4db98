"""The other processes of a job: who has come, who has gone, and what that means for this one.

JAX's coordination service ends a job by aborting every process with a page of C++ (jaxlib 0.11: a peer
that never joins, a heartbeat that is missed, a connection to process 0 that closes). So the processes
keep a line to each other of their own: each is connected to the *hub*, which runs in process 0 at the
coordinator's address. Before JAX starts the hub calls the roll and compares the settings; then a process
that dies, falls silent or fails is known to all others within moments, and each ends with one line that
names it. JAX's own traffic travels inside these lines (`proxy`): so a job needs one port, only who knows
its token (`handshake`) reaches JAX's service, and JAX never sees process 0 vanish.
"""

from zerojax.multihost.peers.peers import Peers, Place, join

__all__ = ["Peers", "Place", "join"]
