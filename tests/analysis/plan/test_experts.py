"""The plan of a mixture of experts against what its traced step sends."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

import zerojax
from zerojax.analysis.plan.cluster import on_world
from zerojax.analysis.plan.hops import hops_of
from zerojax.analysis.plan.units import settings_of
from zerojax.analysis.plan.work import work_of
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.sharding.mesh import MeshShape

CONFIG = GPTConfig(
    vocab_size=64,
    layers=3,
    d_model=16,
    heads=2,
    mlp="swiglu",
    biases=False,
    experts=8,
    experts_per_token=2,
    ffn=24,
    max_seq_len=32,
)


def state(
    nodes: int, local: int, *, muon: bool = False, config: GPTConfig = CONFIG, **zero: object
) -> zerojax.TrainState:
    settings = zerojax.ZeroConfig.preset("delta", **zero)
    mesh = zerojax.make_mesh(nodes, local)
    tx = zerojax.scale_by_muon() if muon else optax.sgd(0.1)
    return zerojax.TrainState.abstract(
        lambda rngs: GPT(config, rngs=rngs), tx, lm_loss, mesh=mesh, zero=settings
    )


@pytest.mark.parametrize(
    "zero",
    [
        pytest.param({"remat": "none"}, marks=pytest.mark.slow),
        pytest.param({"remat": "full", "accumulate": 2}, marks=pytest.mark.slow),
        {"experts": "gathered"},
        pytest.param({"config": replace(CONFIG, post_norms=True)}, id="a norm after the experts"),
        pytest.param({"muon": True, "remat": "none", "matrix_spread": "world"}, marks=pytest.mark.slow),
        pytest.param({"muon": True, "remat": "none"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_traced_step(zero):
    """Within a node; between nodes nothing of a token."""
    built = state(2, 4, **zero)
    rows = 2 * 8 * built.spec.zero.accumulate
    report = zerojax.comm_report(built, {"tokens": jax.ShapeDtypeStruct((rows, 33), np.int32)})
    work = work_of(built.spec, zero.get("config", CONFIG), sequences=2, length=32)
    planned: dict[str, tuple[float, float]] = {}
    for hop in hops_of(built.spec, work):
        local, node = planned.get(hop.phase, (0, 0))
        planned[hop.phase] = local + hop.local_bytes, node + hop.node_bytes
    found = {phase: sent for phase, sent in report.phases().items() if phase not in ("metrics", "other")}
    assert found == planned
    assert ("tokens" in found) == ("experts" not in zero)


def test_laid_out_elsewhere_is_what_is_built_there():
    there = on_world(state(1, 1).spec, MeshShape(3, 2), state(3, 2).spec.zero)
    built = state(3, 2).spec
    assert there.leaves == built.leaves
    assert {leaf.parts for leaf in built.leaves if leaf.path[-1] in ("gate", "up", "down")} == {2}
    assert any("4 of 8 on each device" in line for line in settings_of(built))
