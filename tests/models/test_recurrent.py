"""Decoders with recurrent layers: packed documents, exactness on meshes, and their number of parameters."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from documents import check_documents
from flax import nnx
from plain_step import check_step

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.models.size import flops_per_token, parameter_count
from zerojax.train.step import lower_train_step

DELTA = GPTConfig(
    vocab_size=64,
    layers=4,
    d_model=16,
    heads=4,
    kv_heads=2,
    head_width=8,
    ffn=24,
    norm="rms",
    norm_offset=1.0,
    positions="rope",
    rope_fraction=0.5,
    mlp="swiglu",
    biases=False,
    qk_norm=True,
    attention_gate=True,
    recurrent_layers=(0, 2),
    recurrent_heads=4,
    recurrent_key_heads=2,
    recurrent_width=6,
    recurrent_key_width=4,
    max_seq_len=128,
)
SHORT = replace(DELTA, recurrent="short_conv", conv_width=3, attention_gate=False)
MAMBA = replace(DELTA, recurrent="mamba2")
KIMI = replace(
    DELTA,
    recurrent="kimi_delta",
    recurrent_key_heads=None,
    kv_heads=None,
    qk_norm=False,
    norm_offset=0.0,
    attention_gate=False,
    rope_fraction=1.0,
    latent_rank=10,
    latent_rope_width=4,
    latent_value_width=6,
    no_rope_layers=(0, 1, 2, 3),
)
TWO_KIMI = replace(KIMI, layers=2, recurrent_layers=(0,), no_rope_layers=(0, 1))
OLMO = replace(
    DELTA,
    pre_norms=False,
    post_norms=True,
    recurrent_pre_norms=True,
    recurrent_negative=True,
    recurrent_norm_eps=1e-3,
)
MIXTURE = replace(
    DELTA, experts=4, dense_layers=(0,), dense_ffn=20, shared_ffn=8, shared_gate=True, balance_loss=0.0
)
NEMOTRON = replace(
    MAMBA,
    layers=5,
    mlp="relu2",
    attention_gate=False,
    recurrent_layers=(0, 3),
    mlp_layers=(1, 4),
    no_rope_layers=(0, 1, 2, 3, 4),
    experts=4,
    dense_layers=(4,),
    dense_ffn=20,
    shared_ffn=8,
    expert_latent=4,
    balance_loss=0.0,
)


@pytest.mark.parametrize(
    "config",
    [DELTA, SHORT, MIXTURE, MAMBA, OLMO, NEMOTRON, KIMI],
    ids=["gated_delta", "short_conv", "mixture", "mamba2", "olmo", "nemotron", "kimi"],
)
def test_parameters_are_counted(config):
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert parameter_count(config) == sum(leaf.size for leaf in leaves)


def test_recurrent_layers_take_no_flops_for_pairs_of_tokens():
    plain = replace(DELTA, recurrent_layers=())
    growth = [flops_per_token(config, 128) - flops_per_token(config, 64) for config in (DELTA, plain)]
    assert growth[0] == pytest.approx(growth[1] * 2 / 4)


@pytest.mark.parametrize(
    "config",
    [
        *(replace(one, layers=2, recurrent_layers=(0,)) for one in (DELTA, SHORT, MAMBA)),
        TWO_KIMI,
        pytest.param(
            replace(MAMBA, layers=3, recurrent_layers=(0,), mlp_layers=(2,), mlp="relu2"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gated_delta", "short_conv", "mamba2", "kimi_delta", "one branch"],
)
def test_packed_documents_are_computed_as_if_alone(config):
    model = GPT(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 90), 0, config.vocab_size)
    check_documents(model, tokens, ((0, 1, 20, 90), (0, 70, 71, 90)))

    def loss_of_second(model: GPT) -> jax.Array:
        logits = model(jnp.arange(64)[None], segments=(jnp.arange(64)[None] >= 20).astype(jnp.int32))
        return jnp.sum(logits[0, 20:, :1])

    gradient = nnx.jit(nnx.grad(loss_of_second))(model)["embed"]["embedding"][...]
    others = np.asarray(gradient)[1:20]  # tokens of the first document alone; token 0 has a logit
    assert np.all(others == 0)
    assert np.any(np.asarray(gradient)[20:] != 0)


@pytest.mark.parametrize(
    ("config", "mesh", "options"),
    [
        (replace(DELTA, layers=2, recurrent_layers=(0,)), (3, 2), {}),
        pytest.param(DELTA, (1, 1), {}, marks=pytest.mark.slow),
        pytest.param(DELTA, (2, 4), {}, marks=pytest.mark.slow),
        pytest.param(DELTA, (3, 2), {"hpz": True, "weights_delta": True}, marks=pytest.mark.slow),
        pytest.param(MIXTURE, (2, 2), {}, marks=pytest.mark.slow),
        pytest.param(SHORT, (1, 2), {"remat": "none"}, marks=pytest.mark.slow),
        pytest.param(MAMBA, (2, 4), {}, marks=pytest.mark.slow),
        pytest.param(OLMO, (2, 4), {}, marks=pytest.mark.slow),
        pytest.param(MAMBA, (3, 2), {"remat": "attention"}, marks=pytest.mark.slow),
        pytest.param(replace(OLMO, layers=4, recurrent_layers=(0, 1, 2)), (1, 2), {}, marks=pytest.mark.slow),
        # Two groups, so each is on two devices.
        (replace(MAMBA, layers=2, recurrent_layers=(0,)), (1, 4), {"sequence_parallel": 4}),
        pytest.param(NEMOTRON, (3, 2), {}, marks=pytest.mark.slow),
        pytest.param(TWO_KIMI, (2, 4), {"sequence_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(MAMBA, (1, 4), {"sequence_parallel": 4}, marks=pytest.mark.slow),
        pytest.param(KIMI, (2, 4), {"sequence_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(KIMI, (1, 1), {}, marks=pytest.mark.slow),
        pytest.param(KIMI, (2, 4), {}, marks=pytest.mark.slow),
        pytest.param(KIMI, (3, 2), {"remat": "none"}, marks=pytest.mark.slow),
        pytest.param(NEMOTRON, (1, 1), {}, marks=pytest.mark.slow),
        pytest.param(NEMOTRON, (2, 4), {"remat": "none"}, marks=pytest.mark.slow),
        pytest.param(DELTA, (2, 4), {"sequence_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(SHORT, (1, 2), {"sequence_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(DELTA, (1, 4), {"sequence_parallel": 4, "remat": "none"}, marks=pytest.mark.slow),
        pytest.param(
            *(DELTA, (1, 2), {"accumulate": 2, "accumulate_order": "breadth"}), marks=pytest.mark.slow
        ),
    ],
)
def test_a_step_is_that_of_plain_jax(config, mesh, options):
    numbers = np.sort(np.random.default_rng(1).integers(0, 3, (24, 21), dtype=np.int32), axis=1)
    tokens = np.random.default_rng(0).integers(0, 64, (24, 21), dtype=np.int32)
    check_step(config, mesh, {"tokens": tokens, "segments": numbers}, **options)


def test_what_does_not_go_with_recurrent_layers_is_refused():
    with pytest.raises(ConfigurationError, match="biases"):
        replace(DELTA, biases=True)
    with pytest.raises(ConfigurationError, match="recurrent_heads = 4 is not a multiple"):
        replace(DELTA, recurrent_key_heads=3)
    with pytest.raises(ConfigurationError, match="recurrent_key_heads = 1 is not supported"):
        replace(DELTA, recurrent="kimi_delta", recurrent_key_heads=1)
    with pytest.raises(ConfigurationError, match="different numbers from 0 to layers"):
        replace(DELTA, recurrent_layers=(4,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_layers": (0, 4)}, r"recurrent_layers and mlp_layers share layer \[0\]"),
        ({"dense_layers": (2, 4)}, r"dense_layers and mlp_layers lack layer \[2\]"),
        ({"dense_layers": (1, 4)}, "no layer has experts"),
        ({"branches": "parallel"}, "leave mlp_layers out"),
    ],
)
def test_layers_of_one_branch_are_listed_once(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        replace(NEMOTRON, **changes)
    state = zerojax.TrainState.abstract(
        lambda rngs: GPT(replace(DELTA, recurrent_heads=6), rngs=rngs),
        optax.sgd(0.5),
        lm_loss,
        mesh=zerojax.make_mesh(1, 4),
        zero=zerojax.ZeroConfig(sequence_parallel=4),
    )
    with pytest.raises(ConfigurationError, match=r"6 heads of recurrent layers do not divide among .* = 4"):
        lower_train_step(state, {"tokens": np.zeros((4, 21), np.int32)})
