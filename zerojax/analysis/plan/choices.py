"""Recommends what to keep in host memory if a run does not fit, and otherwise to recompute less."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from zerojax.analysis.plan.cluster import Cluster
from zerojax.analysis.plan.memory import PredictedMemory
from zerojax.analysis.plan.speed import StepTime
from zerojax.errors import ConfigurationError
from zerojax.formatting import duration, size
from zerojax.sharding.host_memory import SAVING, pool_bytes
from zerojax.zero_config.config import ZeroConfig
from zerojax.zero_config.options import HOST_STORES, HostStore, Remat

Predicted = tuple[PredictedMemory, StepTime]
Predict = Callable[[ZeroConfig], Predicted]
_Change = Mapping[str, Any]
_PARTS = tuple(part / 20 for part in range(19, 0, -1))
_WORTH_IT = 1.03
"""The least speed-up to recommend. Predictions are no more accurate."""
_COPIED = ("parameters", "optimizer", "outer", "residual", "other")
"""The kinds of memory that a node sends to another host's memory."""
_SNAPSHOTS = 5
"""Of its own state and of another's, that a node then keeps (``multihost.snapshot_memory``)."""


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
    tried = _tried(zero, _with_more(zero), predict)
    on_device = {option: found for option, found in tried.items() if found[0].total <= cluster.budget}
    fitting = {option: found for option, found in on_device.items() if host_fits(found[0], cluster)}
    trouble = f"{name} does not fit"
    if now.total > cluster.budget:
        trouble += f": a GPU would hold {size(now.total)}, and has {size(cluster.budget)}"
    else:
        trouble += f" in the memory of its hosts: each needs {size(host_needed(now, cluster))}"
    if not fitting:
        # The largest part of the activations with which the first of these options fits.
        whole = [zero] * (now.total <= cluster.budget) + [*on_device]
        parts = (
            option.replace(host_activations=part)
            for option, part in itertools.product(whole, _PARTS)
            if option.in_host("activations")
        )
        found = ((option, predict(option)) for option in parts)
        fitting = dict(itertools.islice((one for one in found if fits(one[1][0], cluster)), 1))
    if not fitting:
        nodes = f"{fewest_nodes} such nodes" if fewest_nodes else "more GPUs"
        ways = f"{nodes}, fewer tokens at a time, or adapters (LoRA, docs/adapters.md)"
        return HostChoice(None, f"{trouble}. {_missing(tried, on_device, cluster)}. Take {ways}.")
    chosen = min(fitting, key=lambda one: (len(one.host) + one.update_in_backward, fitting[one][1].seconds))
    memory, time = fitting[chosen]
    share, in_backward = chosen.host_activations, chosen.update_in_backward
    lines = [f"host = {_listed(chosen)}"]
    lines += [f"host_activations = {share}"] * (share < 1)
    lines += ["update_in_backward = true"] * (in_backward > zero.update_in_backward)
    return HostChoice(
        chosen.host,
        f"{trouble}. It fits with more in host memory: a GPU holds {size(memory.total)}, and a host needs "
        f"{size(host_needed(memory, cluster))}. A step takes {duration(time.seconds)}, including "
        f"{duration(time.copying)} for copies that nothing hides (docs/host-memory.md). Under [zero], set\n\n"
        + "\n".join(f"    {line}" for line in lines),
        share,
        in_backward,
    )


def _tried(zero: ZeroConfig, changes: Iterable[_Change], predict: Predict) -> dict[ZeroConfig, Predicted]:
    """The predictions with each change that the model and its optimizer support."""
    found: dict[ZeroConfig, Predicted] = {}
    for change in changes:
        with suppress(ConfigurationError):
            option = zero.replace(**change)
            found[option] = predict(option)
    return found


def _with_more(zero: ZeroConfig) -> Iterator[_Change]:
    """Changes that keep more in host memory or update in the backward pass, the fewest additions first."""
    others = [store for store in HOST_STORES if store not in zero.host]
    for count in range(len(others) + 1):
        for added in itertools.combinations(others, count):
            host = tuple(store for store in HOST_STORES if store in (*zero.host, *added))
            for in_backward in (zero.update_in_backward, True):
                if (host, in_backward) != (zero.host, zero.update_in_backward):
                    yield {"host": host, "update_in_backward": in_backward, "host_activations": 1.0}


def _missing(
    tried: Mapping[ZeroConfig, Predicted], on_device: Mapping[ZeroConfig, Predicted], cluster: Cluster
) -> str:
    if on_device:
        option = min(on_device, key=lambda option: on_device[option][0].host_total)
        needed, there = size(host_needed(on_device[option][0], cluster)), size(cluster.host_memory or 0)
        return f"With host = {_listed(option)} a host needs {needed}, and has {there}"
    if tried:
        option = min(tried, key=lambda option: tried[option][0].total)
        still = f"{size(tried[option][0].total - cluster.budget)} are still missing"
        return f"With host = {_listed(option)}{' and update_in_backward' * option.update_in_backward} {still}"
    return "The run cannot keep more in host memory (zero.host)"


def _listed(zero: ZeroConfig) -> str:
    return f"[{', '.join(f'"{store}"' for store in zero.host)}]"


def choose_state_spread(zero: ZeroConfig, cluster: Cluster, predict: Predict) -> str | None:
    """Say what it costs that a lost node loses nothing, or little; None if that is so already.

    Every node keeps the whole state. If that does not fit, hosts keep copies of each other's. ``predict`` is
    as for ``choose_remat``.
    """
    if cluster.nodes == 1 or zero.state_spread == "node":
        return None
    for memory, time in _tried(zero, [{"state_spread": "node"}], predict).values():
        if fits(memory, cluster):
            return (
                'Every node can hold the whole state: with state_spread = "node" a lost node loses nothing, '
                "and the loss may end 0.3% higher (docs/quality.md). "
                f"A GPU then holds {size(memory.total)}, and a step takes {duration(time.seconds)}."
            )
    memory, _ = predict(zero)
    sent = cluster.local * sum(map(memory.wherever, _COPIED))
    kept = sent + cluster.local * memory.kinds["secondary"] * zero.weights_delta
    return (
        "A lost node loses its part of the state since the last checkpoint, or since the last copy with "
        f"zerojax launch --copy-seconds. For a copy a node sends {size(sent)}; "
        f"copies and snapshots take {size(_SNAPSHOTS * kept)} of a host's memory for each of its nodes."
    )


def choose_remat(zero: ZeroConfig, cluster: Cluster, predict: Predict) -> str | None:
    """Recommend the fastest ``ZeroConfig.remat`` that fits; None if the run's own is about as fast.

    ``predict`` raises a ConfigurationError for options that the model or its optimizer does not support.
    """
    tried = _tried(zero, ({"remat": remat} for remat in get_args(Remat)), predict)
    fitting = {option.remat: found for option, found in tried.items() if fits(found[0], cluster)}
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
