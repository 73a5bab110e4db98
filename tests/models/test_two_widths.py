"""Decoders whose layers without the window have wider heads and take values from keys (Gemma 4)."""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from documents import check_documents
from flax import nnx
from gemma4 import GEMMA4, check_decoding
from plain_loop import distance

import zerojax
from zerojax.analysis.plan.work import decoder_work
from zerojax.errors import ConfigurationError
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.models.block import LayerScale
from zerojax.models.size import flops_per_token, pair_flops, parameter_count

WIDE = replace(GEMMA4, full_kv_heads=1, keys_as_values=True)
NARROW = replace(WIDE, full_head_width=None, full_kv_heads=None)


def scaled(model: GPT) -> GPT:
    """The model with another scale in each layer."""
    for _, scale in nnx.iter_graph(model):
        if isinstance(scale, LayerScale):
            scale[...] = 1 + 0.2 * jnp.cos(jnp.arange(scale[...].size, dtype=jnp.float32)).reshape(
                scale.shape
            )
    return model


@pytest.mark.parametrize("config", [WIDE, NARROW])
def test_parameters_are_counted(config):
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert parameter_count(config) == sum(leaf.size for leaf in leaves)


def test_kinds_have_the_widths_of_their_layers():
    (local, two), (full, others) = WIDE.kinds
    assert WIDE.order == (0, 1, 0, 1)
    assert (local.head_dim, local.key_value_heads, local.sliding_window, two) == (4, 2, 6, 2)
    assert (full.head_dim, full.key_value_heads, full.sliding_window, others) == (8, 1, None, 2)
    assert (local.qkv_width, full.qkv_width) == (4 * 4 + 2 * 2 * 4, 4 * 8 + 8)
    assert (set(local.rotations), set(full.rotations)) == ({"local"}, {"full"})


def test_flops_of_attention_are_those_of_each_layer():
    growth = flops_per_token(WIDE, 128) - flops_per_token(WIDE, 64)
    (local, _), (full, _) = WIDE.kinds
    windows = 2 * pair_flops(local) * (36 / 128 - 36 / 256)
    assert growth == pytest.approx(2 * pair_flops(full) * 32 + windows, abs=1)
    work = decoder_work(WIDE, remat="full", dtype="bfloat16", sequences=1, length=128)
    assert work.model_flops == 128 * flops_per_token(WIDE, 128)


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_packed_documents_and_cached_tokens_are_computed_as_if_alone(scan: bool):
    model = scaled(GPT(replace(WIDE, scan=scan), rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (2, 40), 0, 64)
    whole = check_documents(model, tokens, ((0, 1, 20, 40), (0, 20, 21, 40)))
    check_decoding(model, tokens, whole)


@pytest.mark.parametrize(
    ("config", "mesh", "options"),
    [
        pytest.param(WIDE, (1, 1), {}, marks=pytest.mark.slow),
        pytest.param(WIDE, (2, 4), {}, marks=pytest.mark.slow),
        pytest.param(WIDE, (3, 2), {"hpz": True, "weights_delta": True}, marks=pytest.mark.slow),
        pytest.param(NARROW, (3, 2), {"remat": "none"}, marks=pytest.mark.slow),
        pytest.param(WIDE, (1, 4), {"sequence_parallel": 4}, marks=pytest.mark.slow),
        pytest.param(WIDE, (1, 2), {"accumulate": 2, "accumulate_order": "breadth"}, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_that_of_plain_jax(config: GPTConfig, mesh: tuple[int, int], options: dict[str, Any]):
    zero = zerojax.ZeroConfig(compute_dtype="float32", **options)
    state = zerojax.TrainState.create(
        lambda rngs: GPT(config, rngs=rngs),
        optax.sgd(0.5),
        lm_loss,
        mesh=zerojax.make_mesh(*mesh),
        zero=zero,
    )
    state = state.replace(model_state=jax.tree.map(lambda x: x * 0.8, state.model_state))
    numbers = np.sort(np.random.default_rng(1).integers(0, 3, (24, 21), dtype=np.int32), axis=1)
    batch = {
        "tokens": np.random.default_rng(0).integers(0, 64, (24, 21), dtype=np.int32),
        "segments": numbers,
    }
    model = zerojax.gather_model(state)
    model.train()
    before, scales = zerojax.gather_params(state), jax.device_get(state.model_state)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: nnx.State) -> jax.Array:
        return lm_loss(nnx.merge(graph, params, rest, copy=True), jax.tree.map(jnp.asarray, batch))[0]

    gradients = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params))
    state, _ = zerojax.train_step(state, batch)
    change = jax.tree.map(lambda x, y: (y - x) / -0.5, before, zerojax.gather_params(state))
    assert distance(change, gradients) < 2e-5
    jax.tree.map(np.testing.assert_array_equal, scales, jax.device_get(state.model_state))


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero++", "delta"])
def test_quantized_presets_learn(preset: Literal["zero++", "delta"]):
    state = zerojax.TrainState.create(
        lambda rngs: GPT(WIDE, rngs=rngs),
        optax.adam(3e-3),
        lm_loss,
        mesh=zerojax.make_mesh(2, 4),
        zero=zerojax.ZeroConfig.preset(preset, compute_dtype="float32"),
    )
    batch = {"tokens": np.random.default_rng(0).integers(0, 8, (8, 21), dtype=np.int32)}
    losses = []
    for _ in range(40):
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sliding_window": None, "sliding_window_pattern": None}, r"(rope_local_theta|full_head_width) = "),
        ({"no_rope_layers": (1,)}, "no_rope_layers is not supported with kv_shared_layers"),
        ({"full_head_width": 5}, "rotates pairs, but a head is 5 wide"),
        ({"full_kv_heads": 3}, "heads = 4 is not a multiple of kv_heads = 3"),
    ],
)
def test_contradictions_are_refused(keys: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        replace(WIDE, **keys)
