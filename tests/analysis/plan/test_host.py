"""Host memory in plans: what is there, what its copies cost, and which line makes a run fit."""

import dataclasses

import pytest

from zerojax import ZeroConfig
from zerojax.analysis.gpus import GPUS
from zerojax.analysis.plan import Cluster, foresee, predict_memory
from zerojax.analysis.plan.choices import choose_host
from zerojax.analysis.plan.cluster import on_world
from zerojax.analysis.plan.memory import KINDS, PredictedMemory
from zerojax.analysis.plan.speed import StepTime, predict_step
from zerojax.analysis.plan.work import work_of
from zerojax.cli.trained import abstract_run
from zerojax.errors import ConfigurationError
from zerojax.models import GPTConfig
from zerojax.run.config import MeshSection, RunConfig, TrainSection, with_settings
from zerojax.sharding.mesh import MeshShape
from zerojax.train.build import check_host_weights
from zerojax.train.spec import TrainSpec

LENGTH = 512
MODEL = GPTConfig(vocab_size=8192, layers=24, d_model=2048, heads=16, max_seq_len=LENGTH)
CLUSTER = Cluster(1, 2, GPUS["h100"], 0)


def built(optimizer: str = "adamw", clip_norm: float = 1.0, **zero: object) -> TrainSpec:
    """Four micro-batches in breadth, on two devices of one node."""
    train = TrainSection(sequence_length=LENGTH, accumulate=4)
    config = RunConfig(train=train, model=MODEL, mesh=MeshSection(nodes=1, local=2))
    chosen = {"name": optimizer, "clip_norm": clip_norm}
    settings = {"zero": {"accumulate_order": "breadth", **zero}, "optimizer": chosen}
    return abstract_run(with_settings(config, settings))[0].spec


@pytest.fixture(scope="module")
def spec() -> TrainSpec:
    """With nothing in host memory."""
    return built()


@pytest.fixture(scope="module")
def streaming() -> TrainSpec:
    """With the optimizer in host memory."""
    return built(host=["optimizer"])


def with_host(spec: TrainSpec, *host: str) -> TrainSpec:
    return on_world(spec, MeshShape(1, 2), spec.zero.replace(host=host))


@pytest.mark.slow
def test_activations_in_host_memory(spec):
    """What a stack keeps but for its last layer; on the device is one other, and no place for sums."""
    work = work_of(spec, MODEL, sequences=2, length=LENGTH)
    before = predict_memory(spec, work)
    there = predict_memory(with_host(spec, "activations"), work)
    kept = 4 * work.kept
    assert before.host == {}
    assert there.host == {"activations": kept * 23 // 24}
    assert before.kinds["activations"] - there.kinds["activations"] == pytest.approx(kept * 22 / 24)
    in_place = there.kinds["gradients"] - before.kinds["gradients"]
    assert in_place == pytest.approx(kept * 23 / 24)
    half = on_world(spec, MeshShape(1, 2), spec.zero.replace(host=("activations",), host_activations=0.5))
    assert predict_memory(half, work).host["activations"] == pytest.approx(kept * 23 / 24 / 2)
    rows = str(there.table().columns[0]._cells)
    assert "host: activations" in rows
    assert "host: total" in rows


def test_the_optimizer_in_host_memory(spec, streaming):
    """Masters and moments; the device has what passes read and, in the update, five layers of all that."""
    before, there = predict_memory(spec), predict_memory(with_host(streaming, "optimizer"))
    assert there.host == {
        kind: pytest.approx(before.kinds[kind], abs=16) for kind in ("parameters", "optimizer")
    }
    parameters = before.kinds["parameters"] / 4
    assert there.kinds["encoded"] == pytest.approx(2 * parameters)
    assert there.kinds["parameters"] == 0
    stack = next(group for group in spec.groups if group.stack)
    layer, apart = (
        sum(leaf.owned for group in spec.groups if bool(group.stack) == stacked for leaf in group.leaves)
        for stacked in (True, False)
    )
    assert stack.layers == 24
    assert there.kinds["streamed"] == pytest.approx(12 * (5 * layer + apart), rel=1e-3)
    assert predict_memory(with_host(streaming)) == before
    assert predict_memory(streaming) == there
    weights = predict_memory(with_host(streaming, "optimizer", "weights"))
    assert weights.kinds["encoded"] == 0
    assert weights.host["encoded"] == there.kinds["encoded"]


def test_local_updates_in_host_memory():
    """All that a node holds in fp32; the device has what passes read, and layers in the update."""

    def planned(*host: str) -> tuple[TrainSpec, PredictedMemory]:
        config = RunConfig(train=TrainSection(sequence_length=LENGTH), model=MODEL, mesh=MeshSection(2, 2))
        zero = {"preset": "local", "every": 32, "host": list(host)}
        spec = abstract_run(with_settings(config, {"zero": zero}))[0].spec
        return spec, predict_memory(spec, work_of(spec, MODEL, sequences=1, length=LENGTH))

    (_, before), (spec, there) = planned(), planned("optimizer")
    kinds = ("parameters", "outer", "optimizer", "residual")
    assert there.host == {kind: pytest.approx(before.kinds[kind], rel=1e-4) for kind in kinds}
    assert not any(there.kinds[kind] for kind in ("parameters", "outer", "residual"))
    own = before.kinds["parameters"]
    assert there.kinds["encoded"] == pytest.approx(own / 2)
    assert there.host_total == pytest.approx((4 + 8 + 4 + 4 + 8 / 2) / 4 * own, rel=1e-4)
    work = work_of(spec, MODEL, sequences=1, length=LENGTH)
    step = predict_step(spec, work, (), there, CLUSTER)
    alone = dataclasses.replace(there, host={kind: there.host[kind] for kind in ("parameters", "optimizer")})
    exchanged = there.host["outer"] + there.host["residual"]
    assert step.host - predict_step(spec, work, (), alone, CLUSTER).host == pytest.approx(
        CLUSTER.host_seconds(3 * exchanged / 32, exchanged / 32)
    )


def test_frozen_weights_in_host_memory():
    """Two layers of them are on the device, and both passes fetch all."""
    there = built(host=["weights"], frozen=["*/mlp/*"])
    before = predict_memory(with_host(there))
    memory = predict_memory(there)
    assert memory.host == {"frozen": before.kinds["frozen"]}
    assert memory.kinds["frozen"] == 0
    assert memory.kinds["streamed"] == pytest.approx(before.kinds["frozen"] / 12)
    work = work_of(there, MODEL, sequences=2, length=LENGTH)
    step = predict_step(there, work, (), memory, CLUSTER)
    assert step.host == pytest.approx(2 * before.kinds["frozen"] / CLUSTER.host_rate)
    with pytest.raises(ConfigurationError, match="no weight is frozen"):
        built(host=["weights"])


def test_copies_are_hidden_behind_what_takes_longer(spec):
    there = with_host(spec, "activations")
    work = work_of(there, MODEL, sequences=2, length=LENGTH)
    memory = predict_memory(there, work)
    own = predict_step(there, work, (), memory, CLUSTER)
    kept = 4 * work.kept * 23 / 24
    assert own.host == pytest.approx(2 * kept / CLUSTER.host_rate)
    assert own.copying == pytest.approx(own.host / 24)  # a layer's, in either pass
    assert own.waiting == pytest.approx(0)
    slow = dataclasses.replace(CLUSTER, host_bandwidth=1e9)
    step = predict_step(there, work, (), memory, slow)
    assert step.host == pytest.approx(2 * kept / 1e9)
    assert step.seconds == pytest.approx(step.host + step.compute / 24 + step.optimizer, rel=1e-3)
    without = predict_step(there, work, (), dataclasses.replace(memory, host={}), slow)
    assert step.copying == pytest.approx(step.seconds - without.seconds)


def test_weights_are_fetched_for_both_passes_and_the_optimizer_by_itself(spec):
    gigabyte = 10**9
    held = {"parameters": 4 * gigabyte, "optimizer": 8 * gigabyte, "encoded": 2 * gigabyte}
    memory = PredictedMemory(dict.fromkeys(KINDS, 0), held)
    work = work_of(spec, MODEL, sequences=1, length=LENGTH)
    step = predict_step(spec, work, (), memory, CLUSTER)
    rate = 64e9 * 0.84
    update = (12 / 0.8 + 2) * 1e9 / rate  # 12 bytes come, 14 leave
    assert step.host == pytest.approx((2 + 2) * 1e9 / rate + update)
    kernels = (2 * 12 + 4 * 4) * 1e9 / CLUSTER.memory_rate
    assert step.optimizer == pytest.approx(kernels)
    again = predict_step(spec, work, (), dataclasses.replace(memory, host=held | {"encoded": 0}), CLUSTER)
    assert again.copying == pytest.approx(12e9 / 0.8 / rate - kernels + kernels / 24)


def test_updates_in_the_backward_pass(streaming):
    """Sums of one layer instead of all, the update's three layers beside the pass, and its copies, too."""
    with pytest.raises(ConfigurationError, match="norms of gradients"):
        built(host=["optimizer"], update_in_backward=True)
    there = built(host=["optimizer"], update_in_backward=True, clip_norm=0)
    work = work_of(there, MODEL, sequences=8, length=LENGTH)
    before, memory = predict_memory(streaming, work), predict_memory(there, work)
    assert memory.host == before.host
    stack = sum(leaf.owned for group in there.groups if group.stack for leaf in group.leaves)
    in_backward = {kind: x for kind, x in memory.kinds.items() if kind in ("gradients", "streamed")}
    outside = 4 * sum(leaf.owned for group in there.groups if not group.stack for leaf in group.leaves)
    assert in_backward == {"gradients": 4 * stack + outside, "streamed": pytest.approx(3 * 12 * stack)}
    after, step = (
        predict_step(spec, work, (), held, CLUSTER) for spec, held in ((streaming, before), (there, memory))
    )
    assert step.host == pytest.approx(after.host)
    assert step.copying < 0.2 * after.copying
    assert step.seconds < after.seconds
    assert predict_memory(on_world(there, there.world, streaming.zero)) == predict_memory(streaming)


def test_updates_in_the_backward_pass_are_proposed_where_nothing_else_fits():
    def predicted(zero: ZeroConfig) -> tuple[PredictedMemory, StepTime]:
        there = 60e9 * ("optimizer" in zero.host) + 20e9 * zero.update_in_backward
        kinds = dict.fromkeys(KINDS, 0) | {"parameters": int(100e9 - there)}
        return PredictedMemory(kinds, {"parameters": int(60e9)}), StepTime(1, 0, 0, 0, 1, 0, 0)

    own = ZeroConfig(accumulate=2, accumulate_order="breadth")
    for budget, lines in ((50e9, ""), (30e9, "\n    update_in_backward = true")):
        gpu = dataclasses.replace(GPUS["h100"], memory=budget)
        cluster = Cluster(1, 1, gpu, 0, memory_fraction=1.0)
        found = choose_host("zero3", own, cluster, predicted, None)
        assert found.advice.endswith(f'host = ["optimizer"]{lines}')
        assert found.update_in_backward == bool(lines)


def test_both_directions_at_once_are_slower_than_one():
    rate = CLUSTER.host_rate
    assert rate == pytest.approx(54e9, rel=0.01)
    assert 43e9 / CLUSTER.host_seconds(43e9, 43e9) == pytest.approx(43e9, rel=0.01)
    assert CLUSTER.host_seconds(0, 1e9) == pytest.approx(1e9 / rate)
    assert CLUSTER.host_seconds(3e9, 1e9) == pytest.approx((1e9 / 0.8 + 2e9) / rate)


def predicted(zero: ZeroConfig) -> tuple[PredictedMemory, StepTime]:
    """100 GB, of which the optimizer is 50, weights 20 and activations 10; they cost 3, 2 and 1 seconds."""
    sizes = {"optimizer": (50, 3), "weights": (20, 2), "activations": (10, 1)}
    moved = sum(sizes[store][0] for store in zero.host)
    copying = float(sum(sizes[store][1] for store in zero.host))
    kinds = dict.fromkeys(KINDS, 0) | {"parameters": (100 - moved) * 10**9}
    host = {"parameters": moved * 10**9} if moved else {}
    return PredictedMemory(kinds, host), StepTime(1.0, 0.0, 0.0, 0.0, 1.0 + copying, 2 * copying, copying)


@pytest.mark.parametrize(
    ("gigabytes", "line"),
    [(95, '["activations"]'), (60, '["optimizer"]'), (45, '["optimizer", "activations"]'), (10, None)],
)
def test_the_fewest_parts_that_fit_are_proposed(gigabytes, line):
    gpu = dataclasses.replace(GPUS["h100"], memory=gigabytes * 1e9)
    cluster = Cluster(1, 1, gpu, 0, memory_fraction=1.0)
    found = choose_host("zero3", ZeroConfig(), cluster, predicted, fewest_nodes=2)
    assert f"zero3 does not fit: a GPU would hold 100 GB, and has {gigabytes}.0 GB. " in found.advice
    if line is None:
        assert found.host is None
        assert 'With host = ["optimizer", "weights", "activations"] 10.0 GB are still missing' in found.advice
        assert "Take 2 such nodes, fewer tokens at a time, or adapters" in found.advice
        return
    assert found.advice.endswith(f"Under [zero], set\n\n    host = {line}")
    assert found.host is not None
    seconds = sum({"optimizer": 3, "weights": 2, "activations": 1}[store] for store in found.host)
    assert f"A step takes {1 + seconds:.2f} s, including {seconds:.2f} s for copies" in found.advice


def test_what_does_not_go_with_the_model_or_its_optimizer_is_not_proposed(spec):
    """An optimizer that needs norms of weights stays on the device."""

    def without_optimizer(zero):
        if "optimizer" in zero.host:
            raise ConfigurationError("the optimizer computes norms of weights")
        check_host_weights(zero, spec.frozen)
        return predicted(zero)

    cluster = Cluster(1, 1, dataclasses.replace(GPUS["h100"], memory=95e9), 0, memory_fraction=1.0)
    assert choose_host("zero3", ZeroConfig(), cluster, without_optimizer, None).host == ("activations",)
    small = dataclasses.replace(cluster, memory_fraction=0.6)
    found = choose_host("zero3", ZeroConfig(), small, without_optimizer, None)
    assert 'With host = ["activations"] 33.0 GB are still missing' in found.advice
    with pytest.raises(ConfigurationError, match="with the optimizer on the device"):
        on_world(spec, MeshShape(1, 2), spec.zero.replace(host=("optimizer",)))


def test_a_host_without_room_is_no_place():
    gpu = dataclasses.replace(GPUS["h100"], memory=60e9)
    cluster = Cluster(1, 1, gpu, 0, memory_fraction=1.0, host_memory=40e9)
    found = choose_host("zero3", ZeroConfig(), cluster, predicted, fewest_nodes=None)
    assert found.host is None
    assert 'With host = ["optimizer"] a host needs 60.1 GB, and has 40.0 GB. Take more GPUs' in found.advice
    there = dataclasses.replace(cluster, host_memory=61e9)
    assert choose_host("zero3", ZeroConfig(), there, predicted, None).host == ("optimizer",)
    small = dataclasses.replace(there, gpu=GPUS["h200"], host_memory=5e9)
    full = choose_host("zero3", ZeroConfig(host=("activations",)), small, predicted, None)
    assert full.advice.startswith("zero3 does not fit in the memory of its hosts: each needs 16.1 GB")


def test_ways_that_do_not_go_with_host_memory_are_left_out(spec, streaming):
    """A stack of activations there needs stage 3."""

    def names(*host):
        where = Cluster(2, 2, GPUS["h100"], 1e9)
        base = streaming if "optimizer" in host else spec
        there = on_world(base, MeshShape(2, 2), spec.zero.replace(host=host))
        found = foresee(there, MODEL, where, sequences=1, length=LENGTH, optimizer="adamw")
        return {forecast.name for forecast in found.forecasts if " in breadth" not in forecast.name}

    every = {"zero3", "zero++", "delta", "local", "stage 1", "stage 2"}
    assert names() == every
    assert names("activations") == every - {"stage 1", "stage 2"}
    assert names("optimizer") == every


def test_a_part_of_the_activations_where_the_host_has_no_room_for_all():
    """60 GB of them, of which the GPU has room for 20 and the host for 50."""

    def predicted(zero: ZeroConfig) -> tuple[PredictedMemory, StepTime]:
        there = 60e9 * zero.host_activations if "activations" in zero.host else 0
        kinds = {"parameters": int(30e9), "activations": int(60e9 - there)}
        return PredictedMemory(kinds, {"activations": int(there)}), StepTime(1, 0, 0, 0, 0, 0, 0)

    cluster = dataclasses.replace(CLUSTER, local=1, memory_fraction=50 / 85, host_memory=50e9)
    found = choose_host("zero3", ZeroConfig(), cluster, predicted, None)
    assert (found.host, found.host_activations) == (("activations",), 0.7)
    assert found.advice.endswith('host = ["activations"]\n    host_activations = 0.7')
