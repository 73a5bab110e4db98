"""Sets up emulated devices and joins the job's processes, before JAX initialises its devices."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

# JAX's public option would also change the levels of its Python loggers.
from jax._src.lib import utils

from zerojax import compilation_cache, terminal
from zerojax.errors import ConfigurationError
from zerojax.multihost import distributed
from zerojax.multihost.peers import Peers
from zerojax.run.config import ClusterSection, MeshSection, RunConfig, config_to_dict
from zerojax.versions import VERSION

_EMULATION_FLAG = "xla_force_host_platform_device_count"
# Many devices on few cores are slow, but XLA ends the process after 40 s by default.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def emulate_devices(mesh: MeshSection, processes: int | None = None) -> None:
    """Give this process its share of nodes x local emulated CPU devices, if ``mesh.emulate`` is set.

    Call it before anything uses a device, because XLA reads its flags then. It does nothing if XLA_FLAGS
    already sets the number of devices. Accelerators are not affected.

    ``processes`` share the devices; by default there are ``JAX_NUM_PROCESSES``.
    """
    if not mesh.emulate or _EMULATION_FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    count = processes if processes is not None else os.environ.get("JAX_NUM_PROCESSES", "1")
    if not str(count).isdecimal() or int(count) < 1:
        raise ConfigurationError(f"the number of processes must be 1 or more, not {count!r}")
    devices, rest = divmod(mesh.nodes * mesh.local, int(count))
    if rest or not devices:
        raise ConfigurationError(
            f"mesh.nodes {mesh.nodes} x mesh.local {mesh.local} devices do not divide among {count} processes"
            ": change one of the three"
        )
    os.environ["XLA_FLAGS"] = " ".join(
        [os.environ.get("XLA_FLAGS", ""), f"--{_EMULATION_FLAG}={devices}", _PATIENCE]
    ).strip()


@dataclass(frozen=True)
class JobOptions:
    """How this process joins a job.

    Attributes:
        coordinator: host:port of process 0, if no scheduler or `zerojax launch` starts the processes.
        process_id: Number of this process, from 0.
        num_processes: Number of processes.
        insecure: Let anybody who reaches process 0 join if there is no token (ZEROJAX_JOB_TOKEN).
    """

    coordinator: str | None = None
    process_id: int | None = None
    num_processes: int | None = None
    insecure: bool = False


@contextmanager
def joined_cluster(
    mesh: MeshSection,
    cluster: ClusterSection,
    job: JobOptions | None = None,
    facts: dict[str, str] | None = None,
) -> Generator[Peers | None]:
    """Emulate devices, use the compilation cache, and join the other processes, as the settings say.

    In a job of several processes, only zerojax's own output reaches the terminal from then on.

    Arguments and errors are as for ``emulate_devices`` and ``zerojax.distributed.joined``.
    """
    job = job or JobOptions()
    emulate_devices(mesh, job.num_processes)
    compilation_cache.apply_setting(cluster.compilation_cache)
    with distributed.joined(
        job.coordinator,
        job.process_id,
        job.num_processes,
        facts=facts,
        insecure=job.insecure or cluster.insecure,
        join_timeout=cluster.join_timeout,
        peer_timeout=cluster.peer_timeout,
        devices=max(mesh.nodes, 1) * mesh.local or None,
    ) as peers:
        if peers is not None:
            only_own_output()
        yield peers


def only_own_output() -> None:
    """Keep the messages of C++ libraries about jobs that work off the terminal.

    XLA logs to standard error, and only its messages that end the process are kept. Gloo has no log levels,
    and prints to standard output. ``TF_CPP_MIN_LOG_LEVEL=0`` keeps everything. ``NCCL_DEBUG`` keeps standard
    output, where NCCL prints.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # for the plugins of GPUs, which are not loaded yet
    utils.absl_set_min_log_level(3)
    if "NCCL_DEBUG" not in os.environ and sys.stdout is sys.__stdout__ is not None:
        own = os.dup(1)
        sys.stdout.flush()
        sys.stdout = sys.__stdout__ = open(  # noqa: SIM115
            own, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors
        )
        terminal.stdout.descriptor = own
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def facts_of(config: RunConfig, **more: object) -> dict[str, str]:
    """Values that must be equal in all processes of a run: the settings, the versions, and ``more``."""
    values = {
        f"{section}.{key}": value
        for section, values in config_to_dict(config).items()
        for key, value in values.items()
    }
    values |= {"the version of zerojax": VERSION, "the version of jax": jax.__version__} | more
    return {name: str(value) for name, value in values.items()}
