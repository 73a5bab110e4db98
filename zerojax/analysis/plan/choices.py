"""Recommends what to keep in host memory if a run does not fit, and otherwise to recompute less."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

from zerojax.analysis.plan.cluster import Cluster
from zerojax.analysis.plan.memory import PredictedMemory
from zerojax.analysis.plan.speed import StepTime
from zerojax.errors import ConfigurationError
from zerojax.formatting import duration, size
from zerojax.sharding.host_memory import SAVING, pool_bytes
from zerojax.zero_config.config import ZeroConfig
from zerojax.zero_config.options import HOST_STORES, HostStore, Remat

Predict = Callable[[ZeroConfig], tuple[PredictedMemory, StepTime]]
_PARTS = tuple(part / 20 for part in range(19, 0, -1))
_WORTH_IT = 1.03
"""The least speed-up to recommend. Predictions are no more accurate."""
_Option = tuple[tuple[HostStore, ...], bool]
"""``ZeroConfig.host`` and ``ZeroConfig.update_in_backward``."""
_Memories = dict[_Option, PredictedMemory]


@dataclass(frozen=True)
class HostChoice:
    """A recommendation for a run that does not fit.

    Attributes:
        host: as ``ZeroConfig.host``; None if no choice fits.
        advice: its cost, and the lines to add to the config. If no choice fits, the missing bytes.
        host_activations: as ``ZeroConfig.host_activations``.
        update_in_backward: as ``ZeroConfig.update_in_backward``.
    """

    host: tuple[HostStore, ...] | None
    advice: str
    host_activations: float = 1.0
    update_in_backward: bool = False


def host_needed(memory: PredictedMemory, cluster: Cluster) -> int:
    """Bytes of memory that a host needs for its devices, XLA's pool and the saving of checkpoints."""
    saved = memory.host.get("parameters", 0) + memory.host.get("optimizer", 0)
    return cluster.local * pool_bytes(memory.host_total) + (SAVING if saved else 0)


def host_fits(memory: PredictedMemory, cluster: Cluster) -> bool:
    """Whether the host has room; True if its memory is unknown."""
    return cluster.host_memory is None or host_needed(memory, cluster) <= cluster.host_memory


def fits(memory: PredictedMemory, cluster: Cluster) -> bool:
    """Whether the device and its host have room."""
    return memory.total <= cluster.budget and host_fits(memory, cluster)


def choose_host(
    name: str, zero: ZeroConfig, cluster: Cluster, predict: Predict, fewest_nodes: int | None
) -> HostChoice:
    """Choose the fewest parts in host memory with which the run fits, and of equally few the fastest.

    Args:
        name: of the run's way of sharding.
        zero: the run's options, with which it does not fit.
        cluster: of the run.
        predict: raises a ConfigurationError for options that the model or its optimizer does not support.
        fewest_nodes: the fewest nodes on which the run fits as it is; None if more do not help.
    """
    now = predict(zero)[0]
    tried: dict[_Option, tuple[PredictedMemory, StepTime]] = {}
    for option in _with_more(zero):
        with suppress(ConfigurationError):
            tried[option] = predict(_under(zero, option))
    on_device = {option: memory for option, (memory, _) in tried.items() if memory.total <= cluster.budget}
    fitting = [option for option, memory in on_device.items() if host_fits(memory, cluster)]
    trouble = f"{name} does not fit"
    if now.total > cluster.budget:
        trouble += f": a GPU would hold {size(now.total)}, and has {size(cluster.budget)}"
    else:
        trouble += f" in the memory of its hosts: each needs {size(host_needed(now, cluster))}"
    share = 1.0
    if not fitting:
        options = [(zero.host, zero.update_in_backward)] * (now.total <= cluster.budget) + [*on_device]
        if (part := _with_a_part(zero, options, cluster, predict)) is not None:
            option, share, tried[option] = part
            fitting = [option]
    if not fitting:
        memories = {option: memory for option, (memory, _) in tried.items()}
        missing = _missing(memories, on_device, cluster)
        nodes = f"{fewest_nodes} such nodes" if fewest_nodes else "more GPUs"
        ways = f"{nodes}, fewer tokens at a time, or adapters (LoRA, docs/adapters.md)"
        return HostChoice(None, f"{trouble}. {missing}. Take {ways}.")
    option = min(fitting, key=lambda option: (len(option[0]) + option[1], tried[option][1].seconds))
    (host, in_backward), (memory, time) = option, tried[option]
    lines = [f"host = {_listed(host)}"]
    lines += [f"host_activations = {share}"] * (share < 1)
    lines += ["update_in_backward = true"] * (in_backward > zero.update_in_backward)
    return HostChoice(
        host,
        f"{trouble}. It fits with more in host memory: a GPU holds {size(memory.total)}, and a host needs "
        f"{size(host_needed(memory, cluster))}. A step takes {duration(time.seconds)}, including "
        f"{duration(time.copying)} for copies that nothing hides (docs/host-memory.md). Under [zero], set\n\n"
        + "\n".join(f"    {line}" for line in lines),
        share,
        in_backward,
    )


def _under(zero: ZeroConfig, option: _Option, share: float = 1.0) -> ZeroConfig:
    host, in_backward = option
    return zero.replace(host=host, update_in_backward=in_backward, host_activations=share)


def _with_a_part(
    zero: ZeroConfig, options: Sequence[_Option], cluster: Cluster, predict: Predict
) -> tuple[_Option, float, tuple[PredictedMemory, StepTime]] | None:
    """The first of ``options`` that fits with a part of the activations, with the largest such part."""
    for option, share in itertools.product(options, _PARTS):
        if "activations" in option[0]:
            memory, time = predict(_under(zero, option, share))
            if fits(memory, cluster):
                return option, share, (memory, time)
    return None


def _with_more(zero: ZeroConfig) -> Iterator[_Option]:
    """Options that keep more in host memory or update in the backward pass, the fewest additions first."""
    others = [store for store in HOST_STORES if store not in zero.host]
    now = zero.update_in_backward
    for count in range(len(others) + 1):
        for added in itertools.combinations(others, count):
            host: tuple[HostStore, ...] = tuple(
                store for store in HOST_STORES if store in (*zero.host, *added)
            )
            yield from ((host, more) for more in (now, True) if (host, more) != (zero.host, now))


def _missing(tried: _Memories, on_device: _Memories, cluster: Cluster) -> str:
    if on_device:
        option = min(on_device, key=lambda option: on_device[option].host_total)
        needed, there = size(host_needed(on_device[option], cluster)), size(cluster.host_memory or 0)
        return f"With host = {_listed(option[0])} a host needs {needed}, and has {there}"
    if tried:
        option = min(tried, key=lambda option: tried[option].total)
        still = f"{size(tried[option].total - cluster.budget)} are still missing"
        return f"With host = {_listed(option[0])}{' and update_in_backward' * option[1]} {still}"
    return "The run cannot keep more in host memory (zero.host)"


def _listed(host: tuple[HostStore, ...]) -> str:
    return f"[{', '.join(f'"{store}"' for store in host)}]"


def choose_state_spread(zero: ZeroConfig, cluster: Cluster, predict: Predict) -> str | None:
    """Say what it costs to keep the whole state in every node; None if that does not fit, or is so already.

    ``predict`` is as for ``choose_remat``.
    """
    if cluster.nodes == 1 or zero.state_spread == "node":
        return None
    with suppress(ConfigurationError):
        memory, time = predict(zero.replace(state_spread="node"))
        if fits(memory, cluster):
            return (
                'Every node can hold the whole state: with state_spread = "node" a lost node loses nothing. '
                f"A GPU then holds {size(memory.total)}, and a step takes {duration(time.seconds)}."
            )
    return None


def choose_remat(zero: ZeroConfig, cluster: Cluster, predict: Predict) -> str | None:
    """Recommend the fastest ``ZeroConfig.remat`` that fits; None if the run's own is about as fast.

    ``predict`` raises a ConfigurationError for options that the model or its optimizer does not support.
    """
    fitting: dict[Remat, tuple[PredictedMemory, StepTime]] = {}
    for remat in get_args(Remat):
        with suppress(ConfigurationError):
            memory, time = predict(zero.replace(remat=remat))
            if fits(memory, cluster):
                fitting[remat] = memory, time
    if zero.remat not in fitting:
        return None
    now = fitting[zero.remat][1].seconds
    remat = min(fitting, key=lambda remat: fitting[remat][1].seconds)
    memory, time = fitting[remat]
    if _WORTH_IT * time.seconds > now:
        return None
    host = f", and a host needs {size(host_needed(memory, cluster))}" if memory.host_total else ""
    return (
        f'With remat = "{remat}" a step takes {duration(time.seconds)} instead of {duration(now)}, because '
        f"it recomputes less. A GPU then holds {size(memory.total)}{host}."
    )
