"""Which parts of a run to keep in host memory, if its devices have no room for them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from zerojax.analysis.plan.cluster import Cluster
from zerojax.analysis.plan.memory import PredictedMemory
from zerojax.analysis.plan.speed import StepTime
from zerojax.errors import ConfigurationError
from zerojax.formatting import duration, size
from zerojax.sharding.host_memory import SAVING, pool_bytes
from zerojax.zero_config import ZeroConfig
from zerojax.zero_config.values import HOST_STORES, HostStore

Predict = Callable[[ZeroConfig], tuple[PredictedMemory, StepTime]]
_PARTS = tuple(part / 20 for part in range(19, 0, -1))
_Memories = dict[tuple[HostStore, ...], PredictedMemory]


@dataclass(frozen=True)
class HostChoice:
    """What a run that does not fit would keep in host memory.

    Attributes:
        host: as ``ZeroConfig.host``; None if it does not fit with anything there.
        host_activations: as ``ZeroConfig.host_activations``.
        advice: what it costs, and at the end the line to add; or what is missing.
    """

    host: tuple[HostStore, ...] | None
    advice: str
    host_activations: float = 1.0


def host_needed(memory: PredictedMemory, cluster: Cluster) -> int:
    """Bytes of a host's memory that its devices need, with what XLA's pool and checkpoints take besides."""
    saved = memory.host.get("parameters", 0) + memory.host.get("optimizer", 0)
    return pool_bytes(cluster.local * memory.host_total) + (SAVING if saved else 0)


def host_fits(memory: PredictedMemory, cluster: Cluster) -> bool:
    """Whether the host has room; also if its memory is not known."""
    return cluster.host_memory is None or host_needed(memory, cluster) <= cluster.host_memory


def choose_host(
    name: str, zero: ZeroConfig, cluster: Cluster, predict: Predict, fewest_nodes: int | None
) -> HostChoice:
    """The fewest parts in host memory with which a run fits that does not; of as many, the fastest.

    Args:
        name: of the way of sharding.
        zero: the run's options.
        cluster: to run on.
        predict: the memory and the time of a step under other options; raises a ConfigurationError for those
            that do not go with the model or its optimizer.
        fewest_nodes: on which it fits as it is; None if more do not help.
    """
    now = predict(zero)[0]
    tried: dict[tuple[HostStore, ...], tuple[PredictedMemory, StepTime]] = {}
    for host in _with_more(zero.host):
        with suppress(ConfigurationError):
            tried[host] = predict(zero.replace(host=host))
    on_device = {host: memory for host, (memory, _) in tried.items() if memory.total <= cluster.budget}
    fitting = [host for host, memory in on_device.items() if host_fits(memory, cluster)]
    trouble = f"{name} does not fit"
    if now.total > cluster.budget:
        trouble += f": a GPU would hold {size(now.total)}, and has {size(cluster.budget)}"
    else:
        trouble += f" in the memory of its hosts: each needs {size(host_needed(now, cluster))}"
    share = 1.0
    if not fitting:
        hosts = [zero.host] * (now.total <= cluster.budget) + [*on_device]
        if (part := _with_a_part(zero, hosts, cluster, predict)) is not None:
            host, share, tried[host] = part
            fitting = [host]
    if not fitting:
        memories = {host: memory for host, (memory, _) in tried.items()}
        missing = _missing(memories, on_device, cluster)
        nodes = f"{fewest_nodes} such nodes" if fewest_nodes else "more GPUs"
        ways = f"{nodes}, fewer tokens at a time, or adapters (LoRA, docs/adapters.md)"
        return HostChoice(None, f"{trouble}. {missing}. Take {ways}.")
    host = min(fitting, key=lambda host: (len(host), tried[host][1].seconds))
    memory, time = tried[host]
    return HostChoice(
        host,
        f"{trouble}. It fits with more in host memory: a GPU holds {size(memory.total)}, and a host needs "
        f"{size(host_needed(memory, cluster))}. A step takes {duration(time.seconds)}, of which "
        f"{duration(time.copying)} are copies that nothing hides (docs/host-memory.md). Under [zero], set\n\n"
        f"    host = {_listed(host)}" + (f"\n    host_activations = {share}" if share < 1 else ""),
        share,
    )


def _with_a_part(
    zero: ZeroConfig, hosts: Sequence[tuple[HostStore, ...]], cluster: Cluster, predict: Predict
) -> tuple[tuple[HostStore, ...], float, tuple[PredictedMemory, StepTime]] | None:
    """The first of ``hosts`` that fits with a part of the activations, and the largest such part."""
    for host, share in itertools.product(hosts, _PARTS):
        if "activations" in host:
            memory, time = predict(zero.replace(host=host, host_activations=share))
            if memory.total <= cluster.budget and host_fits(memory, cluster):
                return host, share, (memory, time)
    return None


def _with_more(now: tuple[HostStore, ...]) -> Iterator[tuple[HostStore, ...]]:
    """What could be in host memory besides what is there now."""
    others = [store for store in HOST_STORES if store not in now]
    for count in range(1, len(others) + 1):
        for added in itertools.combinations(others, count):
            yield tuple(store for store in HOST_STORES if store in (*now, *added))


def _missing(tried: _Memories, on_device: _Memories, cluster: Cluster) -> str:
    if on_device:
        host = min(on_device, key=lambda host: on_device[host].host_total)
        needed = size(host_needed(on_device[host], cluster))
        return f"With host = {_listed(host)} a host needs {needed}, and has {size(cluster.host_memory or 0)}"
    if tried:
        host = min(tried, key=lambda host: tried[host].total)
        return f"With host = {_listed(host)} {size(tried[host].total - cluster.budget)} are still missing"
    return "No more of it can be in host memory (zero.host)"


def _listed(host: tuple[HostStore, ...]) -> str:
    return f"[{', '.join(f'"{store}"' for store in host)}]"
