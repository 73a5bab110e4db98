"""The limit of open files in rank 0, which holds several for each process of the job."""

import os
import resource

from zerojax.errors import ConfigurationError
from zerojax.multihost.peers.listener import PENDING

# A process's connection, and both ends of its connection to JAX's service, which runs in rank 0, too.
_EACH = 3

# For the job as a whole: listening sockets, event loops (17 were measured).
_MORE = 32

# Reserved for training: data, checkpoints, collectives.
_TRAINING = 128


def reserve_files(size: int) -> None:
    """Raise this process's limit by what the connections of a job of ``size`` processes need.

    Training keeps its share. Most systems set a soft limit of 1,024 files and a hard limit of 4,096 or more.

    Raises:
        ConfigurationError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    need = _EACH * size + PENDING + _MORE
    opened = len(os.listdir("/dev/fd"))
    least = opened + _TRAINING + need
    wanted = max(soft + need, least)
    try:
        # Root may raise the hard limit as well.
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted, hard if hard == resource.RLIM_INFINITY else max(hard, wanted))
        )
    except (OSError, ValueError) as error:
        if hard < least:
            raise ConfigurationError(
                f"{size} processes need up to {need:,} open files in rank 0, besides the {opened} it has "
                f"open and {_TRAINING} for training, and its hard limit is {hard:,} (ulimit -Hn): raise that"
            ) from error
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
