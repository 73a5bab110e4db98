"""The plan's formulas against the count of the traced step: two accounts that share no arithmetic."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import optax
import pytest
from wire_models import abstract_state, batch_of

import zerojax
from zerojax.analysis.comm_report import CommReport, comm_report
from zerojax.analysis.plan import describe_plan, plan_state
from zerojax.zero_config.config import Preset

MESHES = [(2, 4), (4, 2), (1, 8), (8, 1)]
SETTINGS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "qwZ": {"weights": "int8"},
    "hpZ": {"hpz": True},
    "qgZ": {"grads": ("int4", "int4")},
    "zero++": {"weights": "int8", "hpz": True, "grads": ("int4", "int4")},
    "delta": {"preset": "delta"},
    "delta with accumulation": {"preset": "delta", "accumulate": 2},
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1, "weights": "int8", "grads": ("int8", "int4")},
    "stage 2": {"stage": 2, "accumulate": 2, "grads": ("int8", "int4")},
    "zero3 with accumulation": {"accumulate": 2},
    "resync": {"preset": "delta", "delta_resync": 4},
    "quantized local": {"weights": "int4", "local_weights": "fp8", "hpz": True, "grads": ("fp6", "bf16")},
    "one hop": {"grads": ("int8", "int8"), "grads_hops": 1},
    "chunks": {"grads": ("int4", "int4"), "chunks": 2, "block_size": 64},
    "stage 2, one node hop": {"stage": 2, "accumulate": 2, "grad_sync": "step"},
    "zero3 in breadth": {"accumulate": 2, "accumulate_order": "breadth"},
    "delta in breadth": {"preset": "delta", "accumulate": 3, "accumulate_order": "breadth"},
    "frozen in nf4": {"frozen": ("blocks/*",), "frozen_weights": "nf4"},
    "updated in the backward pass": {"preset": "zero++", "host": ("optimizer",), "update_in_backward": True},
}

IN_FP8: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero++": {"preset": "zero++"},
    "delta": {"preset": "delta"},
    "resync": {"preset": "delta", "delta_resync": 4},
    "zero3 with accumulation": {"accumulate": 2},
    "qwZ in int4": {"weights": "int4", "hpz": True},
    "zero++ in breadth": {"preset": "zero++", "accumulate": 2, "accumulate_order": "breadth"},
}
WITH_MUON: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero++ with accumulation": {"preset": "zero++", "accumulate": 2},
    "delta": {"preset": "delta"},
    "delta in breadth": {"preset": "delta", "accumulate": 2, "accumulate_order": "breadth"},
    "spread": {"matrix_spread": "world"},
    "in host memory": {"host": ("optimizer",)},
    "stage 2": {"stage": 2},
    "fp8": {"preset": "delta", "matmul_dtype": "fp8"},
}
SMALL = ("metrics", "scales")
"""Phases of a few bytes, which plans leave out."""


def config(preset: Preset = "zero3", **settings) -> zerojax.ZeroConfig:
    return zerojax.ZeroConfig.preset(preset, **settings)


def check(style: str, zero: zerojax.ZeroConfig, nodes: int, local: int, **sizes: Any) -> CommReport:
    state = abstract_state(style, zerojax.make_mesh(nodes, local), zero, **sizes)
    report = comm_report(state, batch_of(nodes * local * zero.accumulate))
    plan = plan_state(state)
    counted = {phase: sent for phase, sent in report.phases().items() if phase not in SMALL and any(sent)}
    assert plan.phases() == counted
    seldom = sum(c.node_bytes for c in report.collectives if not c.usual)
    assert sum(hop.node_bytes for hop in plan.hops if not hop.usual) == seldom
    assert plan.parameters == report.parameters
    if nodes == 1:
        assert plan.between_nodes == report.between_nodes == 0
        assert "one node" in plan.summary()
        assert any("no hop over node" in line for line in plan.settings)
    return report


@pytest.mark.parametrize("name", SETTINGS)
def test_plan_and_report_agree_to_the_byte(name):
    check("stacked", config(**SETTINGS[name]), *MESHES[0])


def some(grid: Sequence[tuple[str, str]], usual: Sequence[tuple[str, str]]) -> pytest.MarkDecorator:
    """Cases of a style or mesh, and settings; those that are not among the usual ones are marked slow."""
    cases = [pytest.param(*case, marks=() if case in usual else pytest.mark.slow) for case in grid]
    return pytest.mark.parametrize(("kind", "name"), cases)


NAMES = list(SETTINGS)[:10]
ELSEWHERE = {str(mesh): mesh for mesh in MESHES[1:]}


@some(
    [(mesh, name) for mesh in ELSEWHERE for name in NAMES],
    # One with quantized hops on each.
    list(zip(ELSEWHERE, ("zero++", "delta", "delta with accumulation"), strict=True)),
)
def test_they_agree_on_every_mesh(kind, name):
    check("stacked", config(**SETTINGS[name]), *ELSEWHERE[kind])


@some(
    [
        (style, name)
        for style in ("kinds", "parts", "listed", "linen")
        for name in ("zero3", "zero++", "delta with accumulation", "delta in breadth", "stage 2")
    ],
    [
        ("kinds", "zero++"),
        ("parts", "zero3"),
        ("listed", "delta in breadth"),
        ("listed", "stage 2"),
        ("linen", "zero++"),
    ],
)
def test_they_agree_for_blocks_of_two_kinds_for_parts_for_lists_and_for_linen(kind, name):
    check(kind, config(**SETTINGS[name]), 2, 4)


@some(
    [*(("stacked", name) for name in IN_FP8), ("listed", "delta"), ("linen", "zero3"), ("linen", "zero++")],
    [
        ("stacked", "resync"),
        ("linen", "zero++"),
    ],
)
def test_they_agree_where_matmuls_are_in_fp8(kind, name):
    zero = config(**IN_FP8[name], matmul_dtype="fp8")
    report = check(kind, zero, 2, 4, width=32, hidden=48)
    (scales,) = (c for c in report.collectives if c.phase == "scales")
    assert (scales.primitive, scales.dtype, scales.elements, scales.count) == ("pmax", "float32", 6, 1)


LOCAL_UPDATES: dict[str, dict[str, Any]] = {
    "local": {},
    "at the end": {"every": 3, "outer_delay": 0, "grads": ("int8", "int4")},
    "a step later": {"every": 5, "outer_delay": 1, "stage": 1, "accumulate": 2},
    "exact": {"every": 3, "weights": None, "grads": (None, None), "rotation": 0, "stage": 2},
}


OF_NODES = {str(mesh): mesh for mesh in ((2, 4), (2, 1), (3, 2), (1, 4))}


@some(
    [(mesh, name) for mesh in OF_NODES for name in LOCAL_UPDATES],
    [("(2, 4)", "local"), ("(3, 2)", "a step later")],
)
def test_they_agree_with_local_updates(kind, name):
    (nodes, local), zero = OF_NODES[kind], config("local", **LOCAL_UPDATES[name])
    phases = check("stacked", zero, nodes, local).phases()
    alone = () if zero.outer_delay >= 2 else ("delta",)
    crossing = {phase for phase, (_, between) in phases.items() if between}
    assert crossing == ({"fragment", *alone} if nodes > 1 else set())


@pytest.mark.parametrize(
    "name",
    [
        "delta in breadth",
        "in host memory",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("zero3", "zero++ with accumulation", "stage 2", "delta", "spread", "fp8")
        ),
    ],
)
def test_they_agree_for_muon(name):
    check("stacked", config(**WITH_MUON[name]), 2, 4, tx=zerojax.scale_by_muon(), width=32, hidden=48)


def test_half_the_bytes_of_bf16_weights_are_sent_in_fp8():
    def weights(**settings):
        state = abstract_state("stacked", zerojax.make_mesh(2, 4), config(**settings), width=32, hidden=48)
        return plan_state(state).phases()["weights forward"]

    kernels, others = 3 * 2 * 32 * 48, 3 * 48 + 4 * 32 + 32 + 32 + 8
    local, node = weights(matmul_dtype="fp8")
    assert node == (kernels + 2 * others) // 8
    assert local == 3 * 2 * node
    assert 1.9 < weights()[1] / node < 2


def test_weights_computed_with_in_fp8_are_listed_and_the_others_with_the_reason():
    zero = config("zero++", matmul_dtype="fp8", fp8=("*kernel", "!*down*"))
    state = abstract_state("listed", zerojax.make_mesh(2, 4), zero, width=32, hidden=48)
    plan = plan_state(state)
    assert plan.fp8 is not None
    assert [(row.name, row.copies, row.elements) for row in plan.fp8.chosen] == [
        ("blocks/*/up/kernel", 3, 3 * 32 * 48)
    ]
    reasons = {row.name: row.left_out for row in plan.fp8.rows}
    assert reasons["blocks/*/down/kernel"] == "excluded by '!*down*'"
    assert reasons["blocks/*/up/bias"] == "not two-dimensional"
    assert reasons["embed/kernel"] == "in no unit"
    assert plan.fp8.share == pytest.approx(32 * 48 / (2 * 32 * 48 + 48))
    for words in ("Matmuls in fp8: 3 weights, 49.23% of the units' parameters", "excluded by '!*down*'"):
        assert words in str(plan)
    found = json.loads(json.dumps(plan.to_dict()))["fp8"]
    assert found["weights"] == 3
    assert [row["name"] for row in found["rows"] if row["left_out"] is None] == ["blocks/*/up/kernel"]
    assert plan_state(abstract_state("listed", zerojax.make_mesh(2, 4), config())).fp8 is None


@pytest.mark.parametrize("options", [{}, {"host": ("optimizer",), "update_in_backward": True}])
def test_awkward_sizes(options):
    zero = config("zero++", **options)
    state = abstract_state("stacked", zerojax.make_mesh(3, 2), zero, width=7, hidden=13, layers=1)
    report = comm_report(state, batch_of(6))
    counted = {phase: sent for phase, sent in report.phases().items() if phase != "metrics"}
    assert plan_state(state).phases() == counted


def test_settings_without_effect_are_named():
    state = abstract_state("stacked", zerojax.make_mesh(1, 8), config("zero++"))
    text = describe_plan(state)
    assert "one node: no hop over node; weights='int8', grads[1]='int4' without effect" in text
    state = abstract_state("stacked", zerojax.make_mesh(8, 1), config("zero++"))
    assert "one device per node: no hop over local; grads[0]='int8' without effect" in describe_plan(state)


def test_the_table_shows_units_leaves_formats_and_sizes():
    state = abstract_state("listed", zerojax.make_mesh(2, 4), config("zero++"))
    plan = plan_state(state)
    blocks, rest = plan.units
    assert (blocks.name, blocks.copies) == ("blocks/*", 3)
    assert blocks.elements == 24 * 40 + 40 + 40 * 24
    kernel = next(leaf for leaf in blocks.leaves if leaf.name == "blocks/*/up/kernel")
    assert (kernel.shape, kernel.copies) == ((24, 40), 3)
    assert (kernel.weights, kernel.grads) == (("int8", "bf16"), ("int8", "int4"))
    bias = next(leaf for leaf in blocks.leaves if leaf.name == "blocks/*/up/bias")
    assert (bias.weights, bias.grads) == (("bf16", "bf16"), ("bf16", "bf16"))
    assert rest.name is None
    for word in ("up/kernel", "24 x 40", "int8", "(outside units)", "hpZ", "secondary", "= 1.098 M"):
        assert word in str(plan)
    assert json.loads(json.dumps(plan.to_dict()))["between_nodes"] == plan.between_nodes


def test_lasting_memory_is_what_the_state_holds():
    own = config("delta", error_feedback=True), config("local")
    for zero in (config(stage=0), config(stage=1), config(), *own):
        state = abstract_state("stacked", zerojax.make_mesh(2, 4), zero, tx=optax.adam(1e-3))
        memory, local = plan_state(state).memory, state.local
        fields = [state.params, state.opt_state, state.residual, state.model_state]
        fields += [] if local is None else [local.weights, local.known, local.momentum]
        held = sum(
            x.dtype.itemsize * x.size * _copies(x) // len(x.sharding.device_set)
            for x in jax.tree.leaves(fields)
        )
        assert memory.lasting == held


def _copies(x: jax.ShapeDtypeStruct) -> int:
    """The number of devices that hold the same part."""
    assert x.sharding is not None
    parts = {str(index) for index in x.sharding.devices_indices_map(x.shape).values()}
    return len(x.sharding.device_set) // len(parts)
