"""Join the other processes of a job."""

import ipaddress
import os
import socket

import jax

from zerojax.devices import visible_gpus
from zerojax.errors import ZeroError

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")


def initialize(
    coordinator: str | None = None,
    process_id: int | None = None,
    num_processes: int | None = None,
    *,
    bind_address: str | None = None,
    timeout_s: int = 300,
    heartbeat_s: int = 100,
) -> bool:
    """Connect this process to its job; call it before anything touches a device.

    What is known comes from the first of: the arguments; ``JAX_COORDINATOR_ADDRESS``,
    ``JAX_PROCESS_ID`` and ``JAX_NUM_PROCESSES`` (`zerojax launch` and emulated clusters set them);
    what SLURM, Open MPI or Kubernetes say, by JAX's own detection. Where nothing is said the process
    is on its own.

    Args:
      coordinator: "host:port" of process 0, reachable from all.
      process_id: this process, 0 to ``num_processes - 1``.
      num_processes: of the whole job.
      bind_address: "address:port" on which process 0 listens, of one interface or "[::]:port" for
        all; by default ``JAX_COORDINATOR_BIND_ADDRESS``, else the coordinator's own address. Anybody
        who can reach it can join the job.
      timeout_s: seconds to wait for the others.
      heartbeat_s: seconds of silence after which a process counts as dead and the job ends.

    Returns:
      Whether this process is part of a job of several.

    Raises:
      ZeroError: some of the three are given and others are not, they are out of range, or process 0
        would listen where the others cannot reach it.
      RuntimeError: the others did not come in time.
    """
    given = _given(coordinator, process_id, num_processes)
    if given is not None:
        coordinator, process_id, num_processes = given
        if num_processes == 1:
            return False
        jax.distributed.initialize(
            coordinator, num_processes, process_id,
            coordinator_bind_address=bind_address or _own_address(coordinator) if process_id == 0 else None,
            cluster_detection_method="deactivate",
            initialization_timeout=timeout_s, heartbeat_timeout_seconds=heartbeat_s,
        )  # fmt: skip
        return True
    tasks_here = _tasks_of_a_scheduler()
    if tasks_here is None:
        return False
    # JAX gives each process of a scheduler's job one GPU, the one of its local rank. With one process
    # per host that would leave all but one idle.
    ids = list(range(len(visible_gpus()))) or None if tasks_here == 1 else None
    jax.distributed.initialize(
        local_device_ids=ids, coordinator_bind_address=bind_address,
        initialization_timeout=timeout_s, heartbeat_timeout_seconds=heartbeat_s,
    )  # fmt: skip
    return jax.process_count() > 1


def _given(
    coordinator: str | None, process_id: int | None, num_processes: int | None
) -> tuple[str, int, int] | None:
    """The three of the arguments, or the three of the environment, or None if there are none."""
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
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdigit():
        raise ZeroError(f"the coordinator is HOST:PORT, not {address!r}")
    return str(address), place, size


def _own_address(coordinator: str) -> str:
    """Where process 0 listens unless told: at the address under which the others look for it."""
    if chosen := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return chosen
    host, _, port = coordinator.rpartition(":")
    found = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), int(port))}
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
        return int(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0].split(",")[0])
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in os.environ:
        return int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
        return 1
    return None
