"""The limit of open files in rank 0, which has several for each process of the job."""

import os
import resource

from zerojax.errors import ConfigurationError
from zerojax.multihost.peers.listener import PENDING

# A process's connection, and both ends of its connection to JAX's service, which is also in rank 0.
_EACH = 3

# For the job as a whole: listening sockets, event loops (17 were measured).
_MORE = 32

# Reserved for training: data, checkpoints, collectives.
_TRAINING = 128


def reserve_files(size: int) -> None:
    """Raise this process's limit by the needs of a job of ``size`` processes.

    Training keeps its share. Most systems set a soft limit of 1,024 files and a hard limit of 4,096 or more.
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
                f"{size} processes need up to {need:,} open files in rank 0. It also has {opened} open, and "
                f"training needs {_TRAINING}, but its hard limit is {hard:,}: raise it (ulimit -Hn)"
            ) from error
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
