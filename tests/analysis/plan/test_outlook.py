"""The outlook on absent clusters: what fits, what is fastest, what is advised."""

import dataclasses
import functools
import json
import math
import re
from typing import Any

import numpy as np
import pytest

from zerojax.analysis import links
from zerojax.analysis.gpus import GPUS, find_gpu
from zerojax.analysis.plan import Cluster, foresee, plan_state
from zerojax.analysis.plan.cluster import on_world
from zerojax.analysis.plan.hops import hops_of
from zerojax.analysis.plan.memory import predict_memory
from zerojax.analysis.plan.outlook import _most, _with_more
from zerojax.analysis.plan.outlook_tables import _longest, assumptions
from zerojax.analysis.plan.picture import draw_outlook
from zerojax.analysis.plan.work import decoder_work, work_of
from zerojax.cli import main
from zerojax.cli.trained import abstract_run
from zerojax.errors import ZeroError
from zerojax.models import GPTConfig
from zerojax.run.config import MeshSection, RunConfig, TrainSection, with_settings
from zerojax.sharding.mesh import MeshShape

LENGTH = 512
MODEL = GPTConfig(vocab_size=8192, layers=24, d_model=2048, heads=16, max_seq_len=LENGTH)
SLOW, FAST = 10e9 / 8, 3200e9 / 8


@pytest.fixture(scope="module")
def spec():
    return build(MeshSection(nodes=2, local=1))


@functools.cache
def build(mesh, accumulate=1, rank=0, **zero):
    train = TrainSection(sequence_length=LENGTH, accumulate=accumulate)
    config = RunConfig(train=train, model=MODEL, mesh=mesh)
    config = with_settings(config, {"zero": zero, "lora": {"rank": rank}})
    return abstract_run(config)[0].spec


@functools.cache
def outlook(spec, nodes=2, local=8, gpu="h100", bandwidth=SLOW, sequences=4, **cluster):
    where = Cluster(nodes, local, GPUS[gpu], bandwidth, **cluster)
    return foresee(spec, MODEL, where, sequences=sequences, length=LENGTH, optimizer="adamw")


def by_name(outlook):
    return {forecast.name: forecast for forecast in outlook.forecasts}


def test_laid_out_elsewhere_is_what_is_built_there(spec):
    """The shortcut that derives every cluster's memory from one abstract state."""
    cases: tuple[tuple[dict[str, Any], MeshSection], ...] = (
        ({"preset": "delta"}, MeshSection(nodes=4, local=3)),
        ({"preset": "zero++"}, MeshSection(nodes=3, local=2)),
        ({"preset": "delta", "matmul_dtype": "fp8"}, MeshSection(nodes=2, local=2)),
        ({"preset": "local"}, MeshSection(nodes=3, local=2)),
    )
    for zero, mesh in cases:
        built = build(mesh, **zero)
        there = on_world(spec, MeshShape(mesh.nodes, mesh.local), built.zero)
        assert there.leaves == built.leaves
        assert there.groups == built.groups
        assert hops_of(there) == plan_state(built).hops
        assert predict_memory(there).kinds == predict_memory(built).kinds


def test_a_slow_network_calls_for_delta_and_a_fast_one_for_something_exact(spec):
    slow, fast = outlook(spec), outlook(spec, bandwidth=FAST)
    times = {name: forecast.time.seconds for name, forecast in by_name(slow).items()}
    assert times["zero3"] > 3 * times["zero++"] > 3 * times["delta"] > 3 * times["local"]
    assert outlook(spec, bandwidth=8 * SLOW, sequences=16).advice.startswith("Take delta: its step waits")
    assert by_name(fast)["zero3"].time.seconds < 0.2 * times["zero3"]
    assert "it is exact" in fast.advice


@pytest.mark.slow
def test_where_deltas_exchange_does_not_hide_that_of_local_updates_does(spec):
    """With the smallest power of two as ``every`` that is enough."""
    slow = outlook(spec)
    said = re.fullmatch(r"Take local \(zero.every = (\d+)\): its step (.*)", slow.advice)
    assert said is not None
    assert said[2].startswith("hides its exchange behind compute, the step of delta waits")
    every = int(said[1])
    assert said[2].count(links.expected_loss(every, "adamw")) == 1

    def waiting(every: int) -> float:
        own = outlook(build(MeshSection(nodes=2, local=1), preset="local", every=every)).own
        assert (own.name, own.every) == ("as configured", every)
        return own.time.waiting / own.time.seconds

    assert waiting(every) < 1e-3 < waiting(every // 2)
    crawling = outlook(spec, bandwidth=SLOW / 1e4)
    assert crawling.advice.startswith("Take local (zero.every = 1024): its step waits")
    measured = {"muon": {16: 0.1, 64: 0.31}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "LOSS_ABOVE_ZERO3", measured)
        assert "by 0.31% with muon and zero.every = 64, " in links.expected_loss(32, "muon")
        assert "by an unmeasured amount with muon" in links.expected_loss(128, "muon")


@pytest.mark.slow
def test_the_exchange_is_hidden_in_whole_in_half_or_not_at_all(spec):
    """Local updates by their delay; what crosses nodes takes as long in all three."""
    steps = []
    for delay in (2, 1, 0):
        own = build(MeshSection(nodes=2, local=1), preset="local", every=256, outer_delay=delay)
        steps.append(outlook(own).own.time)
    assert [step.waiting / step.node for step in steps] == pytest.approx([0, 0.5, 1], abs=0.05)
    assert steps[1].node == pytest.approx(steps[0].node) == pytest.approx(steps[2].node)


def test_one_node_exchanges_nothing():
    found = by_name(outlook(build(MeshSection(nodes=2, local=1), preset="local"), nodes=1))
    assert next(iter(found)) == "as configured"
    assert "local" not in found
    own, zero3 = found["as configured"], found["zero3"]
    assert own.hops == zero3.hops
    assert own.time == zero3.time
    assert outlook(build(MeshSection(nodes=2, local=1), preset="local")).configured == "local"


def test_a_picture_that_cannot_be_written_is_refused(spec, tmp_path):
    for name, why in {"none/plan.png": "No such file", "plan.odd": "Format 'odd' is not supported"}.items():
        with pytest.raises(ZeroError, match=rf"{name}: .*{why}"):
            draw_outlook(outlook(spec), tmp_path / name, "a")


def test_micro_batches_are_foreseen_in_both_orders():
    found = outlook(build(MeshSection(nodes=2, local=1), accumulate=4))
    ways = by_name(found)
    for preset in ("zero3", "zero++", "delta"):
        depth, breadth = ways[preset], ways[f"{preset} in breadth"]
        assert breadth.time.seconds < 0.8 * depth.time.seconds
        assert breadth.memory.kinds["activations"] > 2 * depth.memory.kinds["activations"]
    assert ways["zero3"].time.node == pytest.approx(4 * ways["zero3 in breadth"].time.node)
    assert ways["local"].time.node == ways["local in breadth"].time.node
    for order in ("local", "local in breadth"):  # its exchange is beside the passes of all micro-batches
        assert ways[order].time.waiting == pytest.approx(0, abs=1e-9)
    assert "zero.every = " in found.advice.split(":")[0]
    assert 'zero.accumulate_order = "breadth"): its step' in found.advice


def test_bytes_over_bandwidth_bound_the_step(spec):
    """At 10 Gb/s only the network counts: 3 M (N-1)/N bytes, at 0.94 of the rate."""
    zero3 = by_name(outlook(spec))["zero3"]
    model_bytes = 2 * sum(leaf.count for leaf in spec.leaves)
    assert zero3.time.node == pytest.approx(3 * model_bytes / 2 / (0.94 * SLOW), rel=0.05)
    assert zero3.time.node < zero3.time.seconds < 1.1 * zero3.time.node


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not(spec):
    largest = by_name(outlook(spec, gpu="a10g"))["zero++"].largest
    assert largest > 1
    assert by_name(outlook(spec, gpu="a10g", sequences=largest))["zero++"].fits
    assert not by_name(outlook(spec, gpu="a10g", sequences=largest + 1))["zero++"].fits


@pytest.mark.slow
def test_the_longest_rows_fit_and_longer_ones_do_not(spec):
    where = Cluster(2, 1, GPUS["a10g"], SLOW)

    def planned(length, sequences=1):
        shape = dataclasses.replace(MODEL, max_seq_len=1 << 24)
        return foresee(
            spec, shape, where, sequences=sequences, length=length, optimizer="adamw", longest=True
        )

    longest, of_four = planned(LENGTH).longest, planned(LENGTH, sequences=4).longest
    assert longest
    assert of_four
    assert longest % 1024 == 0
    assert planned(longest).own.fits
    assert not planned(longest + 1024).own.fits
    assert of_four < longest


@pytest.mark.slow
def test_the_smallest_cluster_fits_and_a_smaller_one_does_not(spec):
    small = {"local": 1, "gpu": "v100-16", "memory_fraction": 0.5, "sequences": 1}
    least = by_name(outlook(spec, nodes=2, **small))["zero3"].fewest_nodes
    assert least is not None
    assert least > 2
    assert by_name(outlook(spec, nodes=least, **small))["zero3"].fits
    assert not by_name(outlook(spec, nodes=least - 1, **small))["zero3"].fits


def test_when_nothing_fits_the_way_out_is_named(spec):
    tiny = {"gpu": "rtx4090", "local": 1}
    assert "raise train.accumulate" in outlook(spec, nodes=64, sequences=4096, **tiny).advice
    assert "It fits on" in outlook(spec, nodes=1, memory_fraction=0.4, sequences=1, **tiny).advice
    hopeless = outlook(spec, nodes=2, memory_fraction=0.01, sequences=1, **tiny)
    assert "More nodes do not help" in hopeless.advice
    assert {forecast.fewest_nodes for forecast in hopeless.forecasts} == {None}


def test_settings_of_ones_own_are_a_row_of_their_own():
    own = build(MeshSection(nodes=2, local=1), preset="zero++", grads=("int8", "int8"))
    seen = outlook(own)
    assert seen.configured == seen.own.name == "as configured"
    assert outlook(build(MeshSection(nodes=2, local=1), preset="zero++")).configured == "zero++"


@pytest.mark.slow
def test_every_way_keeps_the_frozen_weights_of_the_config():
    def ways(**zero):
        return by_name(outlook(build(MeshSection(nodes=2, local=1), rank=8, **zero)))

    plain, coded = ways(), ways(frozen_weights="nf4")
    assert list(coded) == list(plain) == ["zero3", "zero++", "delta", "local"]  # frozen weights need stage 3
    for name in coded:
        frozen = coded[name].memory.kinds["frozen"]
        assert 0 < frozen < 0.35 * plain[name].memory.kinds["frozen"]
        assert frozen == pytest.approx(coded["zero3"].memory.kinds["frozen"], rel=0.01)
    assert coded["zero3"].hops != coded["zero++"].hops != coded["delta"].hops
    spread = ways(frozen_weights="nf4", frozen_spread="world")
    assert list(spread) == ["zero3"]  # hpz, of the others, keeps whole copies in each node
    half = coded["zero3"].memory.kinds["frozen"] / 2
    assert spread["zero3"].memory.kinds["frozen"] == pytest.approx(half, rel=0.01)
    fine = ways(preset="delta", frozen_weights="int8", block_size=64)
    scales = fine["zero3"].memory.kinds["frozen"]
    assert scales > 1.01 * ways(frozen_weights="int8")["zero3"].memory.kinds["frozen"]


def test_more_flops_are_executed_than_counted_only_where_something_is_computed_again():
    config = GPTConfig(vocab_size=64, layers=2, d_model=64, heads=2, max_seq_len=32, attention="cudnn")
    work = {
        remat: decoder_work(config, remat=remat, dtype="bfloat16", sequences=1, length=32)
        for remat in ("none", "attention", "full")
    }
    head, matrices = 6 * 64 * 64 * 32, 6 * 2 * 12 * 64**2 * 32
    attention = work["none"].model_flops - head - matrices
    assert attention == pytest.approx(12 * 2 * 64 * 32 * 16)
    assert work["none"].flops - work["none"].model_flops == pytest.approx(attention / 6)  # the kernel's
    # One of two layers: the backward pass begins with the last, which has just been computed.
    assert work["full"].flops - work["none"].flops == pytest.approx((matrices + attention) / 3 / 2)
    tiled = dataclasses.replace(config, token_tile=16)
    again = decoder_work(tiled, remat="full", dtype="bfloat16", sequences=1, length=32).flops
    assert again - work["none"].flops == pytest.approx(matrices / 3 + attention / 3 / 2)
    assert work["none"].flops < work["attention"].flops < work["full"].flops
    assert work["none"].kept > work["attention"].kept > work["full"].kept


def test_gradients_of_frozen_matrices_are_not_counted():
    every = decoder_work(MODEL, remat="full", dtype="bfloat16", sequences=1, length=LENGTH)
    frozen = build(MeshSection(nodes=2, local=1), rank=8)
    found = work_of(frozen, MODEL, sequences=1, length=LENGTH)
    blocks, head = 24 * 12 * 2048**2, 8192 * 2048
    assert every.model_flops - found.model_flops == pytest.approx(2 * LENGTH * (blocks + head), rel=0.01)
    assert every.forward - found.forward == pytest.approx(2 * LENGTH * head)


def test_a_window_saves_what_flash_kernels_skip():
    def attention(**settings: Any) -> float:
        config = GPTConfig(vocab_size=64, layers=2, d_model=64, heads=2, max_seq_len=512, **settings)
        work = decoder_work(config, remat="none", dtype="bfloat16", sequences=1, length=512)
        return work.flops - work.weights_forward - work.weights_backward - 6 * 64 * 64 * 512

    pairs = np.arange(512)[:, None] - np.arange(512)
    near = np.sum((pairs >= 0) & (pairs < 64)) / np.sum(pairs >= 0)
    assert attention(sliding_window=64) == pytest.approx(near * attention(), rel=0.01)
    assert attention(sliding_window=600) == attention()
    half = {"sliding_window": 64, "sliding_window_pattern": 2}
    assert attention(**half) == pytest.approx((near + 1) / 2 * attention(), rel=0.01)
    # In a scan this window is a mask to cuDNN, and XLA's attention computes the whole square.
    assert (
        attention(**half, attention="cudnn") == attention() > attention(**half, attention="cudnn", scan=False)
    )
    # Nothing again, but a flash kernel computes the scores twice.
    assert attention(sliding_window=64, attention="xla") == pytest.approx(2 / (7 / 6) * attention())


def test_the_command_draws_and_prints_what_its_json_says(capsys, tmp_path):
    cluster = ["gpt-tiny", "--nodes", "4", "--gpus-per-node", "8", "--gpu", "h100", "--bandwidth", "100gbit"]
    picture = tmp_path / "plan.png"
    assert main(["plan", *cluster, "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", *cluster, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prediction"] is True
    assert found["batch"] == 32
    assert found["advice"].split(":")[0] in printed
    ways = {"zero3", "zero++", "delta", "local", "stage 1", "stage 2"}
    assert {f["name"] for f in found["forecasts"]} == ways
    for forecast in found["forecasts"]:
        kinds = dict(forecast["memory"])
        assert kinds.pop("total") == sum(kinds.values())
        assert math.isclose(forecast["node_bytes"] * 8, forecast["between_nodes"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "4"], "--gpu"),
        (["--gpu", "h900"], "h100"),
        (["--gpu", "h100"], "--gpus-per-node"),
        (["--gpu", "h100", "--nodes", "2", "--gpus-per-node", "8"], "--bandwidth"),
        (["--gpu", "h100", "--nodes", "2", "--gpus-per-node", "8", "--bandwidth", "fast"], "10gbit"),
        (["--gpu", "h100", "--nodes", "1", "--gpus-per-node", "8", "--efficiency", "2"], "efficiency"),
        (["--gpu", "h100", "--nodes", "1", "--gpus-per-node", "8", "--sequences", "0"], "at least one"),
    ],
)
def test_half_a_cluster_is_refused(options, said, capsys):
    assert main(["plan", "gpt2-124m", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_fp8_matmuls_take_half_the_bytes_and_less_time_where_the_gpu_has_them(spec):
    own = build(MeshSection(nodes=2, local=1), matmul_dtype="fp8")
    plain, fp8 = by_name(outlook(spec, bandwidth=FAST)), by_name(outlook(own, bandwidth=FAST))
    assert outlook(own).configured == "zero3"
    assert outlook(own).to_dict()["fp8"]
    for name in ("zero3", "zero++", "delta"):
        assert fp8[name].time.compute < 0.95 * plain[name].time.compute
        assert fp8[name].memory.total < plain[name].memory.total
    assert fp8["zero3"].time.local < 0.8 * plain["zero3"].time.local
    assert fp8["stage 2"].time == plain["stage 2"].time, "its weights are there in bf16"
    assert fp8["stage 2"].memory == plain["stage 2"].memory
    without = by_name(outlook(own, gpu="a100-80", bandwidth=FAST))["zero3"].time.compute
    assert without > by_name(outlook(spec, gpu="a100-80", bandwidth=FAST))["zero3"].time.compute
    assert any("at 1088 of 1979 TFLOP/s" in line for line in assumptions(outlook(own)))
    assert any("no fp8 matmuls" in line for line in assumptions(outlook(own, gpu="a100-80")))


def test_a_rate_that_tcp_does_not_reach_is_remarked_upon(spec):
    assert any("over TCP" in line for line in assumptions(outlook(spec, bandwidth=FAST)))
    assert not any("over TCP" in line for line in assumptions(outlook(spec, bandwidth=SLOW)))


def test_figures_that_cannot_be_are_refused():
    refused: list[dict[str, Any]] = [
        {"local_bandwidth": -1.0}, {"local_bandwidth": 0.0}, {"host_bandwidth": 0.0}
    ]  # fmt: skip
    for changes in refused:
        with pytest.raises(ZeroError, match="above 0"):
            dataclasses.replace(Cluster(1, 1, GPUS["h100"], 0), **changes)
    with pytest.raises(ZeroError, match="at least 1 node"):
        Cluster(0, 8, GPUS["h100"], SLOW)


def test_a_gpu_is_found_in_any_case():
    assert find_gpu("H100-PCIe") is GPUS["h100-pcie"]
    with pytest.raises(ZeroError, match="unknown GPU 'H1000': choose one of b200, h200"):
        find_gpu("H1000")


def test_a_search_that_ends_at_the_most_says_so(spec):
    found = outlook(spec)
    forecast = dataclasses.replace(found.own, largest=1 << 14)
    assert "16384 sequences a device, and at least as many fit, the MFU" in _with_more(forecast, 4)
    assert "8192 sequences a device, the most that fit" in _with_more(
        dataclasses.replace(forecast, largest=1 << 13), 4
    )
    assert _longest(found, 1 << 24).startswith("Sequences of at least 16,777,216 tokens fit, ")
    assert _longest(found, 1 << 23).startswith("The longest sequences that fit have 8,388,608 tokens, ")


def test_the_longest_rows_are_found_across_tiles():
    """Memory falls where tiles begin and where they become smaller."""
    config = dataclasses.replace(MODEL, mlp="swiglu", ffn=8192, max_seq_len=1 << 20)

    def working(number: int, shape: GPTConfig = config) -> int:
        work = decoder_work(shape, remat="full", dtype="bfloat16", sequences=1, length=1024 * number)
        return work.working

    memory = [working(number) for number in range(1, 400)]
    assert memory[32] < memory[31] > memory[30]
    in_tokens = dataclasses.replace(config, token_tile=1)
    assert all(working(number, in_tokens) <= memory[number - 1] for number in range(1, 400))
    for limit in (memory[20], memory[31] - 1, memory[63] - 1, memory[200], memory[300] - 1):
        wanted = max(number for number in range(1, 400) if memory[number - 1] <= limit)
        found = _most(lambda shape, number, limit=limit: working(number, shape) <= limit, config, 1000)
        assert working(found) <= limit
        assert wanted * 255 / 256 - 1 <= found <= wanted
    slope = (working(640) - working(320)) / (320 * 1024)
    # Twice queries, keys, values and heads; the gradient of the output of the block; fp32 sums of the kernel.
    # Products of tiles are at another moment.
    widths, sums = 2 * (3 + 1) + 1, 4 * (config.d_model + config.heads)
    assert slope == pytest.approx(2 * widths * config.d_model + sums)
