"""Page-locked memory of this process: how much the host has left, and XLA's limit.

XLA takes page-locked memory from pools, one for each GPU of the process, and reads each pool's limit from the
environment when it starts the GPUs. A pool grows in pieces that double in size up to the limit, and never
shrinks. Without a limit, pools take up to 1.8 times the size of the state (decoders of 1B to 13B parameters).
With a limit of 1.1 times that size the state fits; the rest is lost at the ends of pieces.

The activations that a step keeps there are one array. Behind the state it may need a separate piece, larger
than the limit leaves. So a run reserves all it needs in one piece for each GPU (``zerojax.train.memory``).
``ulimit -l`` has no effect, because the driver locks the pages.
"""

import math
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from zerojax.errors import ConfigurationError

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The environment variable of XLA's limit, in GiB."""

SAVING = 4 << 30
"""Bytes that a process needs at most to save its arrays in host memory, besides the arrays."""

_DEFAULT = 64
_LOCKED = 0.85
"""The share of a host's free memory to lock; the rest is left for other memory of the processes."""
_PIECE = 1.05
_POOL = 1.1
_CGROUPS = Path("/sys/fs/cgroup")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Shortage(NamedTuple):
    """A limit of memory that is too low for the processes that share it.

    Attributes:
        processes: how many share it.
        needed: bytes that they need together.
        free: bytes that the limit leaves.
    """

    processes: int
    needed: int
    free: int


def piece_bytes(held: int) -> int:
    """Bytes of one piece of a GPU's pool in which ``held`` bytes of arrays fit, with gaps between them."""
    return int(_PIECE * held)


def pool_bytes(held: int) -> int:
    """Bytes of a GPU's pool in which ``held`` bytes of arrays fit, a whole number of GiB.

    They are enough for pieces that double, and for one piece and what transfers take besides.
    """
    return math.ceil(_POOL * held / (1 << 30)) << 30


def locked_bytes(held: int) -> int:
    """Bytes that XLA locks for a GPU's ``held`` bytes: pieces of a pool double in size, up to its limit."""
    doubled = 1 << (piece_bytes(held) - 1).bit_length()
    return max(pool_bytes(held), min(doubled, host_limit()))


def host_limit() -> int:
    """XLA's limit for each GPU of this process, in bytes.

    Raises:
        ConfigurationError: the variable is not a number.
    """
    given = os.environ.get(LIMIT, str(_DEFAULT))
    if not given.isdecimal():
        raise ConfigurationError(f"{LIMIT}={given!r}: give a whole number of GiB, such as 96")
    return int(given) << 30


def limit_variable(gpus: int) -> dict[str, str]:
    """The environment variable that lets each of this host's ``gpus`` lock its share of the free memory.

    Empty if the variable is already set. A GPU that several processes use counts once for each.
    """
    if LIMIT in os.environ:
        return {}
    return {LIMIT: str(max(1, int(_LOCKED * free_host_memory() / gpus) >> 30))}


def free_host_memory() -> int:
    """Bytes that this process can still get from the host and from its container."""
    return max(0, min(memory_limits().values()))


def memory_limits() -> dict[str, int]:
    """Bytes that are left under each limit on this process's memory: the host's, and its control groups'.

    Processes under the same limit give it the same key.
    """
    host = _BOOT.read_text().strip() if _BOOT.exists() else platform.node()
    groups = {f"{host} {group}": left for group, left in _left_in_cgroups()}
    return {host: psutil.virtual_memory().available} | groups


def shortage(claims: Sequence[tuple[int, dict[str, int]]]) -> Shortage | None:
    """The limit that the processes exceed by the most bytes; None if all limits suffice.

    Args:
        claims: for each process, the bytes that it needs and its ``memory_limits``.
    """
    shared = [[(needed, left[key]) for needed, left in claims if key in left] for key in _keys(claims)]
    totals = [Shortage(len(of), sum(n for n, _ in of), max(0, min(left for _, left in of))) for of in shared]
    worst = max(totals, key=lambda one: one.needed - one.free)
    return worst if worst.needed > worst.free else None


def _keys(claims: Sequence[tuple[int, dict[str, int]]]) -> list[str]:
    return list(dict.fromkeys(key for _, left in claims for key in left))


def _left_in_cgroups(
    own: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS
) -> Iterator[tuple[str, int]]:
    """Each control group of this process, and the bytes left in it; cached files count as free.

    A group is named by its inode, which is the same under every path where containers see it.
    """
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                base, names = root, ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                base = root / "memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            folder = base / path.lstrip("/")
            while folder.is_relative_to(base):
                # Some groups have no limit ("max"), and a container cannot see the groups around it.
                with suppress(OSError, ValueError):
                    yield f"{names[0]} {folder.stat().st_ino}", _left(folder, *names)
                folder = folder.parent


def _left(folder: Path, limit: str, used: str, cache: str) -> int:
    most, now = (int((folder / name).read_text()) for name in (limit, used))
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return most - now + int(stat.get(cache, 0))
