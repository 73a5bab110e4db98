"""Join the other processes of a job, and leave them in order."""

import ipaddress
import os
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
from jax._src.clusters import ClusterEnv  # JAX offers its detection of clusters to `initialize` only

from zerojax.errors import JobError, RunError, Stopped, ZeroError, show_traceback
from zerojax.multihost import peers
from zerojax.multihost.devices import visible_gpus
from zerojax.multihost.peers.handshake import SHORTEST, VARIABLE

# The environment variable that allows a job without a token on other interfaces than the loopback one.
_INSECURE = "ZEROJAX_INSECURE"

_HOW = (
    f"give all processes the same {VARIABLE}, such as the output of `openssl rand -hex 32`; or --insecure "
    f"({_INSECURE}=1), on a network where nobody else is"
)

# A Unix socket's path has 108 bytes at most.
_LONGEST_FOLDER = 70

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
    token: str | None = None,
    insecure: bool = False,
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
            all; by default ``JAX_COORDINATOR_BIND_ADDRESS``, else the coordinator's own address.
        token: a secret of this job, the same in all processes, which prove to each other that they know it
            and never send it; by default ``ZEROJAX_JOB_TOKEN``.
        insecure: without a token, do listen where others than this host's users can reach process 0, and
            let anybody who does join the job; by default ``ZEROJAX_INSECURE``.
        join_timeout: seconds to wait for the others.
        peer_timeout: seconds of silence after which a process counts as dead and the job ends.
        report: prints what the block raised; gives the exit code, and a line for the other processes.

    Yields:
        The other processes, or None where there are none.

    Raises:
        ZeroError: some of the three are given and others are not, they are out of range, process 0 would
            listen where the others cannot reach it or, without a token, where anybody can, it may not have
            as many open files as the processes take, or the tokens or facts differ.
        JobError: process 0 cannot listen, or the others did not come in time.
    """
    found = _given(coordinator, process_id, num_processes) or _detected()
    if found is None or found[2] == 1:
        yield None
        return
    others = _join(*found, facts or {}, bind_address, token, insecure, join_timeout, peer_timeout)
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
    token: str | None,
    insecure: bool,
    join_timeout: float,
    peer_timeout: float,
) -> peers.Peers:
    host, port = _split(coordinator)
    listen = None
    if rank == 0:
        interface, port = _split(bind_address or _own_address(coordinator))
        # All interfaces are an address to listen on, not one to call.
        host, listen = ("localhost", None) if interface == "::" else (interface, interface)
    token = _token(token, insecure, None if rank == 0 and listen is None else host)
    # Of use until all are connected: JAX's client never connects again, as its connection never ends.
    with _private_folder() as folder:
        place = peers.Place(host, port, listen, rank, size, token, folder)
        others = peers.join(place, facts, join_timeout=join_timeout, peer_timeout=peer_timeout)
        # Should XLA abort for a reason of its own, a core of many GB would hold the end up.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        # It would swallow SIGTERM.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            f"unix:{place.client}", size, rank,
            local_device_ids=gpus,
            coordinator_bind_address=f"unix:{place.service}",
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


def _token(given: str | None, insecure: bool, host: str | None) -> str:
    """What the processes of the job know and nobody else; empty where there is no need of one.

    Args:
        given: in the program; else the environment is asked.
        insecure: whether the job goes without where it should have one.
        host: that rank 0 listens at; None for all interfaces.

    Raises:
        ZeroError: there is none and should be one, or it is too easy to guess.
    """
    token = (os.environ.get(VARIABLE, "") if given is None else given).strip()
    switch = os.environ.get(_INSECURE, "")
    if switch not in ("", "0", "1"):
        raise ZeroError(f"{_INSECURE} is 1 or 0, not {switch!r}")
    if token:
        if len(token) < SHORTEST or not (token.isascii() and token.isprintable()):
            raise ZeroError(f"a job's token has at least {SHORTEST} plain characters: {_HOW}")
        return token
    if not insecure and switch != "1" and not _only_this_host(host):
        raise ZeroError(
            f"rank 0 listens at {host or 'all interfaces'}, and without a token anybody who reaches it could "
            f"join the job or end it: {_HOW}"
        )
    return ""


def _only_this_host(host: str | None) -> bool:
    """Whether a name stands for the loopback interface alone."""
    try:
        found = socket.getaddrinfo(host, None) if host is not None else []
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(str(info[4][0])).is_loopback for info in found)


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder for Unix sockets that only the user can open, of a short name, for a while.

    Raises:
        JobError: there is no place for one.
    """
    try:
        usual = tempfile.gettempdir()
        parent = usual if len(usual) <= _LONGEST_FOLDER else "/tmp"
        made = tempfile.TemporaryDirectory(prefix="zerojax-", dir=parent, ignore_cleanup_errors=True)
        with socket.socket(socket.AF_UNIX) as probe:  # not every file system has them
            probe.bind(f"{made.name}/probe")
    except OSError as error:
        raise JobError(f"no folder for sockets can be made ({error}): set TMPDIR to another place") from error
    with made as folder:
        yield Path(folder)


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
