"""Join and leave a job of several processes."""

# The functions that use JAX import it themselves: the launcher starts in a fifth of the time without it.

import ipaddress
import os
import re
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from zerojax.errors import ConfigurationError, JobError, RunError, error_line
from zerojax.errors import report as report_error
from zerojax.multihost.devices import visible_gpus
from zerojax.multihost.peers import Peers, Place
from zerojax.multihost.peers.handshake import SHORTEST, VARIABLE
from zerojax.network.discovery import remember_coordinator
from zerojax.sharding.host_memory import limit_variable

# The environment variable that permits a job without a token on interfaces other than loopback.
_INSECURE = "ZEROJAX_INSECURE"

_HOW = (
    f"give all processes the same {VARIABLE}, such as the output of `openssl rand -hex 32`; or --insecure "
    f"({_INSECURE}=1), on a network that nobody else can reach"
)

# A Unix socket's path has at most 108 bytes.
_MAX_FOLDER_LENGTH = 70

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
"""The variables that describe a job to its processes, like the first three arguments of ``joined``."""

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
"""The variable with the address:port at which process 0 listens, if it is not the coordinator's address."""

_UNREACHABLE = "which no other host can reach (Debian's /etc/hosts does that)"

# The limits of JAX's heartbeats and of a wait in Gloo, in seconds. Both would otherwise end the job when the
# wall clock jumps forwards, by JAX's default of 100 s and XLA's of 30 minutes.
_TEN_YEARS = 10 * 365 * 24 * 3600
_GLOO_TIMEOUT = "xla_cpu_collective_timeout_seconds"

# Seconds that rank 0, which runs JAX's service, waits for the others to leave it.
_SHUTDOWN_TIMEOUT = 60.0

# Seconds that an unexpected error waits for a report that a peer died.
_PATIENCE = 3.0


@contextmanager
def joined(
    coordinator: str | None = None,
    process_id: int | None = None,
    num_processes: int | None = None,
    *,
    facts: Mapping[str, str] | None = None,
    bind_address: str | None = None,
    token: str | None = None,
    insecure: bool = False,
    join_timeout: float = 300.0,
    peer_timeout: float = 60.0,
    report: Callable[[BaseException], tuple[int, str]] = report_error,
    devices: int | None = None,
) -> Generator[Peers | None]:
    """Join a job for the duration of a ``with`` block. Enter it before any use of a device.

    The first of these describes the job: the arguments; ``JAX_COORDINATOR_ADDRESS``, ``JAX_PROCESS_ID`` and
    ``JAX_NUM_PROCESSES`` (set by ``zerojax launch`` and emulated clusters); SLURM, Open MPI or Kubernetes,
    through JAX's detection. Without any of them the process runs alone.

    On hosts with GPUs XLA may use most of the host's free memory. The GPUs of the processes that a scheduler
    has started there share it (``zerojax.sharding.host_memory``).

    When the block ends, this process waits for the others to end theirs. When the block raises an error, this
    process reports it to the others and exits at once. It skips JAX's shutdown, which would wait for the
    others. When another process dies, falls silent or fails, this process exits with a line that names it,
    and code 4 (2 if the cause was wrong use).

    A program for ``zerojax launch`` only needs this:

        with zerojax.distributed.joined():
            main()

    Args:
        coordinator: "host:port" of process 0, reachable from all processes.
        process_id: of this process, 0 to ``num_processes - 1``.
        num_processes: of the whole job.
        facts: values that must be the same in all processes, by name, such as the settings.
        bind_address: "address:port" for process 0 to listen on, or "[::]:port" for all interfaces. None reads
            ``JAX_COORDINATOR_BIND_ADDRESS``, else takes the coordinator's own address.
        token: the job's secret, the same in all processes. They prove to each other that they know it, and
            never send it. None reads ``ZEROJAX_JOB_TOKEN``.
        insecure: without a token, listen even if other hosts' users can reach process 0, and let anybody
            join. ``ZEROJAX_INSECURE`` does the same.
        join_timeout: seconds to wait for the others.
        peer_timeout: seconds of silence after which a process counts as dead and the job ends.
        report: prints an error raised by the block. It returns the exit code and a line for the other
            processes.
        devices: number of GPUs that this process will use; None for all that it sees.

    Yields:
        The other processes, or None if there are none.

    Raises:
        ConfigurationError: the first three arguments are incomplete or out of range. Or process 0 would
            listen where the others cannot reach it, or, without a token, where anybody can. Or its limit of
            open files is too low. Or tokens or facts differ.
        JobError: process 0 cannot listen. Its subclass AbsentError: the others did not join in time.
    """
    found = find_job(coordinator, process_id, num_processes)
    if here := visible_gpus():
        own = len(found[3] if found and found[3] else here)
        os.environ.update(limit_variable(min(own, devices or own) * (_tasks_of_a_scheduler() or 1)))
    if found is None or found[2] == 1:
        yield None
        return
    address, rank, size, gpus = found
    host, port = split_address(address)
    listen = None
    if rank == 0:
        listen, port = listening_at(bind_address or own_address(address))
        # "All interfaces" is an address to listen on, not one to connect to.
        host = listen or "localhost"
    remember_coordinator(split_address(address)[0] if listen is None else host)
    token = job_token(token, insecure, None if rank == 0 and listen is None else host)
    # The folder is needed until all are connected. JAX's client never reconnects, because its connection
    # never ends.
    with _private_folder() as folder:
        place = Place(host, port, listen, rank, size, token, folder)
        others = Peers(place, facts or {}, join_timeout=join_timeout, peer_timeout=peer_timeout)
        # If XLA itself aborts, dumping a core of many GB would delay the end.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        _connect_jax(place, gpus)
    try:
        yield others
    except SystemExit:  # all processes raise it at the same step
        _leave(others)
        raise
    except BaseException as error:
        if not isinstance(error, (ConfigurationError, RunError, KeyboardInterrupt)):
            others.wait_for_failure(_PATIENCE)  # a dead peer breaks collectives with any kind of error
        others.fail(*report(_explained(error, address)))
    _leave(others)


def _connect_jax(place: Place, gpus: list[int] | None) -> None:
    """Start JAX's service in rank 0, and connect JAX's client to it.

    All processes have joined, and ``Peers`` watches them by the monotonic clock. JAX's own checks would abort
    the process. Its service and Gloo measure time by the wall clock, so their limits are longer than a clock
    is likely to jump.
    """
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    if _GLOO_TIMEOUT not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_GLOO_TIMEOUT}={_TEN_YEARS}".strip()
    # JAX's preemption service would intercept SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    # If the wall clock jumps backwards, the service considers all processes lost, and would end the job. It
    # ignores the loss of recoverable processes, but warns in rank 0 that they are experimental.
    jax.config.update("jax_enable_recoverability", True)
    _set_log_level(2)
    jax.distributed.initialize(
        f"unix:{place.client}", place.size, place.rank,
        local_device_ids=gpus,
        coordinator_bind_address=f"unix:{place.service}",
        cluster_detection_method="deactivate",
        initialization_timeout=600,
        heartbeat_timeout_seconds=_TEN_YEARS,
    )  # fmt: skip
    _set_log_level(1)


def _set_log_level(level: int) -> None:
    """Set the level of XLA's log, unless the user has changed it from JAX's default."""
    from jax._src.lib import utils

    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        utils.absl_set_min_log_level(level)


def _leave(others: Peers) -> None:
    """Wait for all processes, then leave: JAX's clients, its service, the connections."""
    import jax

    sys.stdout.flush()
    others.leave()
    # A GPU's client watches JAX's service until the client is destroyed. An array that outlives the block
    # prevents that. Without the service the client would print a warning of six lines every second.
    _set_log_level(2)
    # JAX's service does not wait for recoverable processes.
    others.wait_for_closed(_SHUTDOWN_TIMEOUT)
    jax.distributed.shutdown()
    others.close()


def job_token(given: str | None, insecure: bool, host: str | None) -> str:
    """The job's token; empty if none is set and none is needed.

    ``given`` is the program's token; None reads the environment. ``host`` is the interface on which rank 0
    listens; None for all.
    """
    token = (os.environ.get(VARIABLE, "") if given is None else given).strip()
    switch = os.environ.get(_INSECURE, "")
    if switch not in ("", "0", "1"):
        raise ConfigurationError(f"{_INSECURE} must be 1 or 0, not {switch!r}")
    if token:
        if len(token) < SHORTEST or not (token.isascii() and token.isprintable()):
            raise ConfigurationError(f"a job's token must have at least {SHORTEST} plain characters: {_HOW}")
        return token
    if not insecure and switch != "1" and not _only_this_host(host):
        raise ConfigurationError(
            f"rank 0 listens on {host or 'all interfaces'}, and without a token anybody who reaches it could "
            f"join the job or end it: {_HOW}"
        )
    return ""


def _only_this_host(host: str | None) -> bool:
    """Whether a host name resolves to loopback addresses only."""
    try:
        found = socket.getaddrinfo(host, None) if host is not None else []
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(str(info[4][0])).is_loopback for info in found)


@contextmanager
def _private_folder() -> Generator[Path]:
    """A temporary folder for Unix sockets, with a short path, that only the user can open."""
    try:
        usual = tempfile.gettempdir()
        parent = usual if len(usual) <= _MAX_FOLDER_LENGTH else "/tmp"
        made = tempfile.TemporaryDirectory(prefix="zerojax-", dir=parent, ignore_cleanup_errors=True)
        with socket.socket(socket.AF_UNIX) as probe:  # not every file system supports Unix sockets
            probe.bind(f"{made.name}/probe")
    except OSError as error:
        raise JobError(
            f"cannot create a folder for sockets ({error}): set TMPDIR to another place"
        ) from error
    with made as folder:
        yield Path(folder)


def free_ports(count: int) -> list[int]:
    """TCP ports of this host that were free at the time of the call."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


def free_port() -> int:
    """A TCP port of this host that was free at the time of the call."""
    return free_ports(1)[0]


def find_job(
    coordinator: str | None, process_id: int | None, num_processes: int | None
) -> tuple[str, int, int, list[int] | None] | None:
    """The job that the arguments, the environment or a scheduler describe; None if none of them does.

    Returns:
        The coordinator, this process's index, the number of processes, and its GPUs (None: JAX's choice).

    Raises:
        ConfigurationError: the description is incomplete or out of range.
    """
    return _given(coordinator, process_id, num_processes) or _detected()


def listening_at(address: str) -> tuple[str | None, int]:
    """The interface and port of an address to listen on; None for all interfaces."""
    interface, port = split_address(address)
    return (None if interface == "::" else interface), port


def _given(
    coordinator: str | None, process_id: int | None, num_processes: int | None
) -> tuple[str, int, int, None] | None:
    """The job in the arguments or the environment, with JAX's choice of GPUs; None if neither has one."""
    named = {"coordinator": coordinator, "process_id": process_id, "num_processes": num_processes}
    if all(value is None for value in named.values()):
        texts = [os.environ.get(name) for name in VARIABLES]
        if texts[1] is None and texts[2] is None:
            return None  # JAX interprets a coordinator alone
        named = dict(zip(VARIABLES, texts, strict=True))
    if missing := [name for name, value in named.items() if value is None]:
        raise ConfigurationError(f"a process of a job needs all of {', '.join(named)}; no {missing[0]} given")
    address, index, count = named.values()
    try:
        place, size = int(index or 0), int(count or 0)
    except ValueError:
        raise ConfigurationError(f"process {index!r} of {count!r}: both must be whole numbers") from None
    if not 0 <= place < size:
        raise ConfigurationError(f"process {place} of {size}: processes are 0 to {size - 1}")
    split_address(str(address))
    return str(address), place, size, None


def _detected() -> tuple[str, int, int, list[int] | None] | None:
    """The job as a scheduler describes it: coordinator, process, processes, GPUs (None: JAX's choice)."""
    from jax._src.clusters import ClusterEnv  # JAX exposes its cluster detection only through `initialize`

    tasks_here = _tasks_of_a_scheduler()
    if tasks_here is None:
        return None
    # JAX gives each process of a scheduler's job the one GPU of its local rank. With one process per host all
    # other GPUs would be idle.
    ids = list(range(len(visible_gpus()))) or None if tasks_here == 1 else None
    address = size = rank = gpus = None
    reason = "it finds no job"
    try:
        address, size, rank, gpus = ClusterEnv.auto_detect_unset_distributed_params(
            os.environ.get(VARIABLES[0]), None, None, ids, None, 300
        )
    except Exception as error:  # JAX's parsers of schedulers' variables raise errors of many kinds
        reason = f"{type(error).__name__}: {error}"
    if address is None or size is None or rank is None:
        raise ConfigurationError(
            f"a scheduler's variables are set, but JAX cannot read the job from them ({reason}): set "
            f"{', '.join(VARIABLES)}"
        )
    return address, rank, size, list(gpus) if gpus else None


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port"; an IPv6 address is in brackets."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"the coordinator must be HOST:PORT, not {address!r}")
    return host.strip("[]"), int(port)


def own_address(coordinator: str) -> str:
    """The default address for process 0 to listen on, which is the address that the others connect to."""
    if chosen := os.environ.get(BIND_VARIABLE):
        return chosen
    host, _, port = coordinator.rpartition(":")
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), int(port))}
    except OSError as error:
        raise ConfigurationError(
            f"the coordinator's host {host} is not known here ({error.strerror}): correct the name, "
            "or give an address"
        ) from error
    local = {address for address in found if ipaddress.ip_address(address).is_loopback}
    if found == local and host not in {"localhost", *found}:
        raise ConfigurationError(
            f"on its own host the coordinator's name {host} means {min(local)}, {_UNREACHABLE}: give its "
            "address on the network, or set JAX_COORDINATOR_BIND_ADDRESS to the address:port to listen on"
        )
    return coordinator


def _explained(error: BaseException, coordinator: str) -> BaseException:
    """The error to report, with an explanation if a host's name means a loopback address.

    Gloo, which runs the collectives of CPUs, gets each host's address from the host's own name. If that is a
    loopback address, the others' connections are refused.
    """
    found = re.search(r"Gloo context .* remote=\[(127\.[\d.]+|::1)\]", str(error), re.DOTALL)
    if found is None or _only_this_host(split_address(coordinator)[0]):
        return error
    return ConfigurationError(
        f"on its own host the name of a host means {found[1]}, {_UNREACHABLE}: in each host's /etc/hosts, "
        f"give its name its address on the network ({error_line(error)})"
    )


def _tasks_of_a_scheduler() -> int | None:
    """The number of processes that a scheduler has started on this host; None without a scheduler."""
    if "SLURM_STEP_NODELIST" in os.environ:
        # "2(x3),1" is two tasks on each of the first three hosts; with our scripts all are equal.
        return _count("SLURM_STEP_TASKS_PER_NODE")
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in os.environ:
        return _count("OMPI_COMM_WORLD_LOCAL_SIZE")
    if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
        return 1
    return None


def _count(variable: str) -> int:
    """The first number in a scheduler's variable; 1 if it is not set."""
    text = os.environ.get(variable, "1").split("(")[0].split(",")[0]
    if not text.isdecimal():
        raise ConfigurationError(
            f"{variable} is {os.environ[variable]!r}: it must begin with a number of processes"
        )
    return int(text)
