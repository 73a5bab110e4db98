"""What a run could keep for its backward pass in place of computing it again."""

import dataclasses

import pytest

from zerojax.analysis.gpus import GPUS
from zerojax.analysis.plan import Cluster
from zerojax.analysis.plan.choices import choose_remat, choose_state_spread
from zerojax.analysis.plan.memory import KINDS, PredictedMemory
from zerojax.analysis.plan.speed import StepTime
from zerojax.errors import ConfigurationError
from zerojax.zero_config import ZeroConfig

GPU = dataclasses.replace(GPUS["h100"], memory=80e9)
SECONDS = {"full": 1.2, "attention": 1.1, "none": 1.0}
KEPT = {"full": 1, "attention": 2, "none": 12}


def predicted(zero: ZeroConfig) -> tuple[PredictedMemory, StepTime]:
    """30 GB, and activations of 4, 8 or 48 GB, which may be in host memory."""
    gigabytes = {True: 0, False: 0, "activations" in zero.host: 4 * KEPT[zero.remat]}
    kinds = dict.fromkeys(KINDS, 0) | {"frozen": (30 + gigabytes[False]) * 10**9}
    host = {"activations": gigabytes[True] * 10**9} if gigabytes[True] else {}
    seconds = SECONDS[zero.remat]
    return PredictedMemory(kinds, host), StepTime(seconds, 0, 0, 0, seconds)


@pytest.mark.parametrize(
    ("now", "device", "host", "wanted"),
    [
        (ZeroConfig(), 80e9, None, ("none", "1.00 s instead of 1.20 s", "78.0 GB.")),
        (ZeroConfig(), 77e9, None, ("attention", "1.10 s instead of 1.20 s", "38.0 GB.")),
        (ZeroConfig(remat="attention"), 77e9, None, None),
        (ZeroConfig(remat="none"), 77e9, None, None),  # itself does not fit
        (
            ZeroConfig(host=("activations",)),
            35e9,
            60e9,
            ("none", "1.00 s", "30.0 GB, and a host needs 53.7 GB"),
        ),
        (ZeroConfig(host=("activations",)), 35e9, 50e9, ("attention", "1.10 s", "and a host needs ")),
    ],
)
def test_the_fastest_that_fits_is_named(now, device, host, wanted):
    cluster = Cluster(1, 1, GPU, 0, memory_fraction=device / GPU.memory, host_memory=host)
    advice = choose_remat(now, cluster, predicted)
    if wanted is None:
        assert advice is None
        return
    assert advice is not None
    remat, *parts = wanted
    assert advice.startswith(f'With remat = "{remat}" a step takes ')
    assert all(part in advice for part in parts)


def test_what_is_hardly_faster_or_cannot_be_is_not_named():
    def alike(zero: ZeroConfig) -> tuple[PredictedMemory, StepTime]:
        if zero.remat == "none":
            raise ConfigurationError("not with this model")
        memory, _ = predicted(zero)
        seconds = {"full": 1.02, "attention": 1.0}[zero.remat]
        return memory, StepTime(seconds, 0, 0, 0, seconds)

    assert choose_remat(ZeroConfig(), Cluster(1, 1, GPU, 0, memory_fraction=1.0), alike) is None


@pytest.mark.parametrize(
    ("nodes", "now", "device", "said"),
    [
        (2, "world", 80e9, "A GPU then holds 40.0 GB, and a step takes 1.20 s."),
        (
            2,
            "world",
            30e9,
            "a node sends 6.00 GB; copies and snapshots take 30.0 GB of a host's memory",
        ),
        (1, "world", 80e9, None),
        (2, "node", 80e9, None),
    ],
)
def test_the_state_in_every_node_is_proposed_where_it_fits_else_copies(nodes, now, device, said):
    cluster = Cluster(nodes, 1, GPU, 25e9, memory_fraction=device / GPU.memory)
    tried = []

    def predict(zero: ZeroConfig) -> tuple[PredictedMemory, StepTime]:
        tried.append(zero.state_spread)
        memory, time = predicted(zero)
        return PredictedMemory(memory.kinds | {"parameters": 2 * 10**9, "optimizer": 4 * 10**9}), time

    advice = choose_state_spread(ZeroConfig(state_spread=now), cluster, predict)
    assert (advice is None) == (said is None)
    if advice is not None:
        assert tried == ["node", "world"][: 1 if device == 80e9 else 2]
        assert said in advice
