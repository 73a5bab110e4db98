"""Divide this machine's devices among the processes of a job, before any of them starts JAX."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from zerojax.errors import ConfigurationError

Platform = Literal["auto", "cpu", "gpu"]


def visible_gpus() -> list[str]:
    """The ids of the NVIDIA GPUs that this process may use, without initialising any GPU.

    A GPU listed twice in CUDA_VISIBLE_DEVICES counts twice, so that two nodes can share it.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu.strip() for gpu in listed.split(",") if gpu.strip()]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def share_devices(processes: int, each: int, platform: Platform = "auto") -> list[dict[str, str]]:
    """Environment variables that show each process only its own devices.

    Args:
        processes: number of processes.
        each: GPUs (in order) or emulated CPU devices of each process.
        platform: "auto" for GPUs if this machine has any.

    Returns:
        The variables to add, by process.
    """
    if processes < 1 or each < 1:
        raise ConfigurationError(
            f"{processes} processes of {each} devices: give a job at least 1 process of 1 device"
        )
    gpus = [] if platform == "cpu" else visible_gpus()
    if platform == "gpu" or gpus:
        if len(gpus) < processes * each:
            raise ConfigurationError(
                f"{processes} x {each} GPUs were requested, but this machine has {len(gpus)}: request fewer, "
                "or the platform cpu to emulate devices"
            )
        shares = (gpus[i * each :][:each] for i in range(processes))
        return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
    flags = os.environ.get("XLA_FLAGS", "")
    flags = f"{flags} --xla_force_host_platform_device_count={each}".strip()
    return [{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}] * processes


def separate_nodes(shares: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The shares of processes on one machine, with the variables that they need if they share a GPU.

    NCCL refuses a GPU that two processes of a host use; so each process becomes a host for it.
    """
    gpus = [share.get("CUDA_VISIBLE_DEVICES") for share in shares]
    if gpus[0] is None or len({*gpus}) == len(gpus):
        return [dict(share) for share in shares]
    return [
        {"NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": "lo", **share}
        for node, share in enumerate(shares)
    ]
