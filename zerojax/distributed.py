"""Join the other processes of a job, and leave them in order."""

import ipaddress
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import jax
from jax._src.clusters import ClusterEnv  # JAX offers its detection of clusters to `initialize` only

from zerojax import peers
from zerojax.devices import visible_gpus
from zerojax.errors import RunError, Stopped, ZeroError, show_traceback

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")

# Seconds that a process with an error which it has no words for waits for the news of a peer's death.
_NEWS = 3.0


@contextmanager
def joined(
    coordinator: str | None = None,
    process_id: int | None = None,
    num_processes: int | None = None,
    *,
    facts: Mapping[str, str] | None = None,
    bind_address: str | None = None,
    join_timeout: float = 300.0,
    peer_timeout: float = 60.0,
    report: Callable[[BaseException], tuple[int, str]] = show_traceback,
) -> Iterator[peers.Peers | None]:
    """Be a part of a job; enter it before anything touches a device.

    What is known comes from the first of: the arguments; ``JAX_COORDINATOR_ADDRESS``,
    ``JAX_PROCESS_ID`` and ``JAX_NUM_PROCESSES`` (`zerojax launch` and emulated clusters set them);
    what SLURM, Open MPI or Kubernetes say, by JAX's own detection. Where nothing is said the process
    is on its own.

    When the block ends, this process waits for the others to end theirs. When it raises, the others are
    told and this process ends there and then, without JAX's own farewell, which would wait for them. When
    another process dies, falls silent or fails, this one ends with a line that names it and exit code 4 (2
    where the cause was wrong use).

    Args:
        coordinator: "host:port" of process 0, reachable from all.
        process_id: this process, 0 to ``num_processes - 1``.
        num_processes: of the whole job.
        facts: what has to be the same in all processes, by name, such as the settings.
        bind_address: "address:port" on which process 0 listens, of one interface or "[::]:port" for
            all; by default ``JAX_COORDINATOR_BIND_ADDRESS``, else the coordinator's own address. Anybody
            who can reach it can join the job.
        join_timeout: seconds to wait for the others.
        peer_timeout: seconds of silence after which a process counts as dead and the job ends.
        report: prints what the block raised; gives the exit code, and a line for the other processes.

    Yields:
        The other processes, or None where there are none.

    Raises:
        ZeroError: some of the three are given and others are not, they are out of range, process 0 would
            listen where the others cannot reach it, or the facts differ.
        JobError: process 0 cannot listen, or the others did not come in time.
    """
    found = _given(coordinator, process_id, num_processes) or _detected()
    if found is None or found[2] == 1:
        yield None
        return
    others = _join(*found, facts or {}, bind_address, join_timeout, peer_timeout)
    try:
        yield others
    except (SystemExit, Stopped):  # as all processes do at the same step
        _leave(others)
        raise
    except BaseException as error:
        if not isinstance(error, (ZeroError, RunError, KeyboardInterrupt)):
            others.wait_for_end(_NEWS)  # a collective breaks when a peer is gone, with any kind of error
        others.give_up(*report(error))
    _leave(others)


def _join(
    coordinator: str,
    rank: int,
    size: int,
    gpus: list[int] | None,
    facts: Mapping[str, str],
    bind_address: str | None,
    join_timeout: float,
    peer_timeout: float,
) -> peers.Peers:
    host, port = _split(coordinator)
    listen = None
    if rank == 0:
        interface, port = _split(bind_address or _own_address(coordinator))
        # All interfaces are an address to listen on, not one to call.
        host, listen = ("localhost", None) if interface == "::" else (interface, interface)
    service = free_port() if rank == 0 else 0
    place = peers.Place(host, port, listen, rank, size)
    others, way = peers.join(
        place, facts, service=service, join_timeout=join_timeout, peer_timeout=peer_timeout
    )
    # Should XLA abort for a reason of its own, a core of many GB would hold the end up.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # It would swallow SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        f"127.0.0.1:{service if rank == 0 else way}", size, rank,
        local_device_ids=gpus,
        coordinator_bind_address=f"127.0.0.1:{service}" if rank == 0 else None,
        cluster_detection_method="deactivate",
        # All are here, and `peers` watches over them: JAX's own watch, which aborts, comes second.
        initialization_timeout=600,
        heartbeat_timeout_seconds=int(peer_timeout) + 600,
        shutdown_timeout_seconds=60,
    )  # fmt: skip
    return others


def _leave(others: peers.Peers) -> None:
    sys.stdout.flush()
    others.leave()
    jax.distributed.shutdown()
    others.close()


def free_port() -> int:
    """A port that nobody listens on, on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _given(
    coordinator: str | None, process_id: int | None, num_processes: int | None
) -> tuple[str, int, int, None] | None:
    """The three of the arguments, or the three of the environment, or None if there are none.

    And no choice of GPUs.
    """
    named = {"coordinator": coordinator, "process_id": process_id, "num_processes": num_processes}
    if all(value is None for value in named.values()):
        texts = [os.environ.get(name) for name in _VARIABLES]
        if texts[1] is None and texts[2] is None:
            return None  # a coordinator alone is JAX's own business
        named = dict(zip(_VARIABLES, texts, strict=True))
    if missing := [name for name, value in named.items() if value is None]:
        raise ZeroError(f"a process of a job needs all of {', '.join(named)}; no {missing[0]} given")
    address, index, count = named.values()
    try:
        place, size = int(index or 0), int(count or 0)
    except ValueError:
        raise ZeroError(f"process {index!r} of {count!r}: both have to be whole numbers") from None
    if not 0 <= place < size:
        raise ZeroError(f"process {place} of {size}: the first is 0 and the last {size - 1}")
    _split(str(address))
    return str(address), place, size, None


def _detected() -> tuple[str, int, int, list[int] | None] | None:
    """What a scheduler says: coordinator, process, processes, and the GPUs to use (None: JAX's choice)."""
    tasks_here = _tasks_of_a_scheduler()
    if tasks_here is None:
        return None
    # JAX gives each process of a scheduler's job one GPU, the one of its local rank. With one process
    # per host that would leave all but one idle.
    ids = list(range(len(visible_gpus()))) or None if tasks_here == 1 else None
    address = size = rank = gpus = None
    reason = "it finds no job"
    try:
        address, size, rank, gpus = ClusterEnv.auto_detect_unset_distributed_params(
            os.environ.get(_VARIABLES[0]), None, None, ids, None, 300
        )
    except Exception as error:  # whatever its readers of many schedulers' variables stumble over
        reason = f"{type(error).__name__}: {error}"
    if address is None or size is None or rank is None:
        raise ZeroError(
            f"a scheduler's variables are set, but JAX cannot read the job from them ({reason}): set "
            f"{', '.join(_VARIABLES)}"
        )
    return address, rank, size, list(gpus) if gpus else None


def _split(address: str) -> tuple[str, int]:
    """ "host:port" in two; an IPv6 address stands in brackets."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ZeroError(f"the coordinator is HOST:PORT, not {address!r}")
    return host.strip("[]"), int(port)


def _own_address(coordinator: str) -> str:
    """Where process 0 listens unless told: at the address under which the others look for it."""
    if chosen := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return chosen
    host, _, port = coordinator.rpartition(":")
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), int(port))}
    except OSError as error:
        raise ZeroError(f"the coordinator's host {host} is not known here: {error.strerror}") from error
    local = {address for address in found if ipaddress.ip_address(address).is_loopback}
    if found == local and host not in {"localhost", *found}:
        raise ZeroError(
            f"on its own host the coordinator's name {host} means {min(local)}, where nobody else can "
            "reach it (Debian's /etc/hosts does that): give its address on the network, or set "
            "JAX_COORDINATOR_BIND_ADDRESS to address:port of the interface to listen on"
        )
    return coordinator


def _tasks_of_a_scheduler() -> int | None:
    """How many processes of the job a scheduler has put on this host; None without a scheduler."""
    if "SLURM_STEP_NODELIST" in os.environ:
        # "2(x3),1": two tasks on each of the first three hosts; all are the same with our scripts.
        return _count("SLURM_STEP_TASKS_PER_NODE")
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in os.environ:
        return _count("OMPI_COMM_WORLD_LOCAL_SIZE")
    if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
        return 1
    return None


def _count(variable: str) -> int:
    """The first number in a scheduler's variable; 1 where it is not set."""
    text = os.environ.get(variable, "1").split("(")[0].split(",")[0]
    if not text.isdecimal():
        raise ZeroError(f"{variable} is {os.environ[variable]!r}: it should begin with a number of processes")
    return int(text)
