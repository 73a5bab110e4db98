"""Open files: rank 0 holds some for each process of the job."""

import os
import resource

from zerojax.errors import ZeroError
from zerojax.multihost.peers.listener import PENDING

# A process's line, and both ends of its connection to JAX's service, which is in rank 0, too.
_EACH = 3

# Of the job as a whole: sockets that listen, event loops (seen: 17).
_MORE = 32

# What is left to the training for certain: data, checkpoints, collectives.
_TRAINING = 128


def reserve_files(size: int) -> None:
    """Raise this process's limit, so that what the job takes is not taken from the training.

    Most systems allow 1,024 files (the soft limit), and 4,096 or many more to who asks (the hard limit).

    Args:
        size: processes of the job.

    Raises:
        ZeroError: this process may not have as many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    need = _EACH * size + PENDING + _MORE
    opened = len(os.listdir("/dev/fd"))
    least = opened + _TRAINING + need
    wanted = max(soft + need, least)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        hard = _raise_hard_limit(hard, wanted)
        wanted = min(wanted, hard)
    if wanted < least:
        raise ZeroError(
            f"{size} processes take up to {need:,} open files of rank 0, besides the {opened} that it has "
            f"and {_TRAINING} for the training, and its hard limit is {hard:,} (ulimit -Hn): raise that"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _raise_hard_limit(hard: int, wanted: int) -> int:
    """Raise it if the system lets us, as it does root; return what it is then."""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, wanted))
    except (OSError, ValueError):
        return hard
    return wanted
