"""The planner against figures of the ZeRO++ paper (Wang et al., 2023): Figure 12 and Table 4."""

import optax
import pytest

import zerojax
from zerojax.analysis.plan.cluster import on_world
from zerojax.analysis.plan.hops import hops_of
from zerojax.analysis.plan.memory import predict_memory
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.sharding.mesh import MeshShape
from zerojax.train.spec import TrainSpec

DGX2 = MeshShape(nodes=64, local=16)
STATES = ("parameters", "optimizer", "gradients", "secondary")


@pytest.fixture(scope="module")
def hundred_billion() -> TrainSpec:
    """100 billion parameters: 55 layers of GPT-3's width."""
    config = GPTConfig(vocab_size=50304, layers=55, d_model=12288, heads=96, max_seq_len=2048)
    return zerojax.TrainState.abstract(
        lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), lm_loss, mesh=zerojax.make_mesh(2, 1)
    ).spec


def model_states(spec: TrainSpec, **zero) -> tuple[float, int]:
    """Bytes per device of weights, gradients and optimizer; and the parameters."""
    there = on_world(spec, DGX2, zerojax.ZeroConfig(**zero))
    memory = predict_memory(there)
    kinds = (*STATES, "weights", "weight gradients") if there.zero.stage == 0 else STATES
    return sum(memory.kinds[kind] for kind in kinds), sum(leaf.count for leaf in there.leaves)


def test_figure_12(hundred_billion):
    """16 bytes a parameter and device under DP; hpZ 8.9 times ZeRO-3, DP 114 times hpZ, says appendix B.2."""
    dp, parameters = model_states(hundred_billion, stage=0)
    zero3, _ = model_states(hundred_billion)
    hpz, _ = model_states(hundred_billion, hpz=True)
    assert parameters == pytest.approx(100e9, rel=0.01)
    assert dp == pytest.approx(1.6e12, rel=0.01)
    assert zero3 == pytest.approx(1.6e12 / 1024, rel=0.01)
    assert hpz / zero3 == pytest.approx(8.9, rel=0.02)
    assert dp / hpz == pytest.approx(114, rel=0.02)


# Forward all-gather, backward all-gather, reduce-scatter; in M, the fp16 bytes of the model.
TABLE_4 = {"zero3": (1, 1, 1), "zero++-paper": (0.5, 0, 0.25)}


@pytest.mark.parametrize("preset", TABLE_4)
def test_table_4(hundred_billion, preset):
    """Traffic between nodes; the paper leaves out scales (1.6% of int4), and a node's own part (1/64)."""
    there = on_world(hundred_billion, DGX2, zerojax.ZeroConfig.preset(preset))
    m = 2 * sum(leaf.count for leaf in there.leaves)
    sent: dict[str, float] = {"weights forward": 0.0, "weights backward": 0.0, "gradients": 0.0}
    for hop in hops_of(there):
        sent[hop.phase] += hop.node_bytes * DGX2.local * DGX2.nodes / (DGX2.nodes - 1) / m
    assert tuple(sent.values()) == pytest.approx(TABLE_4[preset], rel=0.03)
