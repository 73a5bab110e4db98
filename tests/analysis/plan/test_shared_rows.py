"""The plan's bytes of heads that devices exchange are those of the traced step."""

from typing import Any

import jax
import optax
import pytest

import zerojax
from zerojax.analysis.plan.hops import hops_of
from zerojax.analysis.plan.work import work_of
from zerojax.models import GPT, GPTConfig, lm_loss

KEYS = {"recurrent_key_heads": 2, "recurrent_key_width": 6, "recurrent_width": 4, "recurrent_heads": 4}


@pytest.mark.parametrize(
    ("more", "remat"),
    [
        pytest.param(KEYS, "full", id="keys have copies"),
        pytest.param(KEYS | {"recurrent": "mamba2"}, "none", id="mamba2", marks=pytest.mark.slow),
        pytest.param(
            KEYS | {"recurrent": "kimi_delta", "recurrent_key_heads": None},
            "attention",
            id="kimi",
            marks=pytest.mark.slow,
        ),
        pytest.param({"recurrent": "short_conv"}, "full", id="convolutions", marks=pytest.mark.slow),
        pytest.param(
            {"recurrent_layers": (), "sliding_window": 4, "sliding_window_pattern": 3, "full_head_width": 8},
            "full",
            id="widths",
        ),
    ],
)
def test_bytes_of_recurrent_layers_and_attention(more: dict[str, Any], remat: Any):
    settings: dict[str, Any] = {"recurrent_layers": (0, 1), "biases": False} | more
    config = GPTConfig(vocab_size=64, layers=3, d_model=16, heads=4, max_seq_len=16, **settings)
    zero = zerojax.ZeroConfig(sequence_parallel=4, remat=remat)
    mesh = zerojax.make_mesh(1, 4)
    state = zerojax.TrainState.abstract(
        lambda rngs: GPT(config, rngs=rngs), optax.sgd(0.1), lm_loss, mesh=mesh, zero=zero
    )
    report = zerojax.comm_report(state, {"tokens": jax.ShapeDtypeStruct((1, 17), "int32")})
    work = work_of(state.spec, config, sequences=1, length=16)
    planned = sum(hop.local_bytes for hop in hops_of(state.spec, work) if hop.phase == "attention")
    assert report.phases()["attention"] == (planned, 0)
