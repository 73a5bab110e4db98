"""Devices and processes, before JAX has looked at them."""

import os

from zerojax import distributed
from zerojax.config import MeshSection
from zerojax.errors import ZeroError

_EMULATION_FLAG = "xla_force_host_platform_device_count"
# Many devices on few cores are slow, not dead: XLA would end the process after 40 seconds.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def join_cluster(
    mesh: MeshSection,
    *,
    coordinator: str | None = None,
    process_id: int | None = None,
    num_processes: int | None = None,
) -> None:
    """Emulate devices where the settings say so, and meet the other processes where there are any.

    Must come before anything touches a device: XLA reads its flags then.

    Args:
        mesh: with `emulate`, this process gets its share of nodes x local CPU devices, unless
            XLA_FLAGS says how many already. Accelerators are not affected.
        coordinator: host:port of process 0; this and the next two as in `zerojax.distributed.initialize`.
        process_id: which this process is.
        num_processes: how many there are.

    Raises:
        ZeroError: half of the three is given, or the devices do not divide among the processes.
    """
    if mesh.emulate and _EMULATION_FLAG not in os.environ.get("XLA_FLAGS", ""):
        processes = num_processes or int(os.environ.get("JAX_NUM_PROCESSES", "1"))
        devices, rest = divmod(mesh.nodes * mesh.local, processes)
        if rest:
            raise ZeroError(
                f"mesh.nodes {mesh.nodes} x mesh.local {mesh.local} devices do not divide among "
                f"{processes} processes"
            )
        os.environ["XLA_FLAGS"] = " ".join(
            [os.environ.get("XLA_FLAGS", ""), f"--{_EMULATION_FLAG}={devices}", _PATIENCE]
        ).strip()
    distributed.initialize(coordinator, process_id, num_processes)
