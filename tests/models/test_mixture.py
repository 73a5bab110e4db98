"""Decoders whose blocks have experts: what their routers report, and the losses that train these."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_loop import distance

import zerojax
from zerojax import Experts
from zerojax.adapters.nnx_units import Stack
from zerojax.errors import ZeroError
from zerojax.models import GPT, Block, GPTConfig, lm_loss

CONFIG = GPTConfig(
    layers=3, dense_layers=(1,), dense_ffn=10,
    vocab_size=37, d_model=24, heads=2, max_seq_len=16, norm="rms", positions="rope", mlp="swiglu",
    biases=False, ffn=8, experts=5, experts_per_token=2, shared_ffn=6, balance_loss=0.3, z_loss=0.2,
    init_std=0.3, scan=False, attention_sinks=True,
)  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(0), (2, 9), 0, 37)


@pytest.fixture(scope="module")
def listed() -> GPT:
    return GPT(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def scanned(listed: GPT) -> GPT:
    """The same weights in a stack."""
    model = GPT(replace(CONFIG, scan=True), rngs=nnx.Rngs(1))
    layers = [nnx.state(block, nnx.Param) for block in blocks_of(listed)]
    assert isinstance(model.blocks, Stack)
    for kind, blocks in enumerate(model.blocks.stacked.values()):
        own = [layer for layer, other in zip(layers, CONFIG.order, strict=True) if other == kind]
        nnx.update(blocks, jax.tree.map(lambda *x: jnp.stack(x), *own))
    for name in ("embed", "norm"):
        nnx.update(getattr(model, name), nnx.state(getattr(listed, name), nnx.Param))
    return model


def blocks_of(model: GPT) -> list[Block]:
    assert isinstance(model.blocks, nnx.List)
    return list(model.blocks)


@nnx.jit
def router_inputs(model: GPT, tokens: jax.Array) -> list[jax.Array]:
    """What the router of each mixture reads."""
    c, found = model.config, []
    x, rope = model.embed_tokens(tokens, jnp.arange(tokens.shape[1]), tokens.shape[1])
    assert not isinstance(rope, list)
    for block in blocks_of(model):
        if isinstance(block.mlp, Experts):
            attention = block.attention
            middle = x + attention.join(attention.mix(attention.project(block.norm_attention(x), rope)))
            found.append(block.norm_mlp(middle).reshape(-1, c.d_model))
        x = block(x, rope)
        assert not isinstance(x, tuple)
    return found


def by_hand(model: GPT, tokens: jax.Array) -> dict[str, float]:
    """The metrics, from each layer's logits in fp64."""
    c, found = model.config, []
    mixtures = [block.mlp for block in blocks_of(model) if isinstance(block.mlp, Experts)]
    for experts, routed in zip(mixtures, router_inputs(model, tokens), strict=True):
        logits = np.asarray(routed, np.float64) @ np.asarray(experts.router[...], np.float64)
        sums = np.exp(logits).sum(1)
        p = np.exp(logits) / sums[:, None]
        chosen = np.argsort(-logits, axis=1)[:, : c.experts_per_token]
        counts = np.bincount(chosen.reshape(-1), minlength=c.experts)
        found.append(
            {
                "balance_loss": c.experts * np.sum(counts / len(p) * p.mean(0)),
                "z_loss": np.mean(np.log(sums) ** 2),
                "expert_load": counts.max() / counts.mean(),
                "router_entropy": -np.mean(np.sum(p * np.log(p), axis=1)),
            }
        )
    return {
        name: (np.max if name == "expert_load" else np.mean)([one[name] for one in found])
        for name in found[0]
    }


def test_training_adds_the_losses_of_routers_and_reports_them(listed: GPT, scanned: GPT):
    listed.eval()
    language, aux = nnx.jit(lm_loss)(listed, {"tokens": TOKENS})
    assert aux.keys() == {"tokens"}
    wanted = by_hand(listed, TOKENS[:, :-1])
    for model in (listed, scanned):
        model.train()
        loss, aux = nnx.jit(lm_loss)(model, {"tokens": TOKENS})
        assert aux.pop("tokens") == 16
        assert aux.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(aux[name], value, rtol=1e-5, err_msg=name)
        auxiliary = 0.3 * wanted["balance_loss"] + 0.2 * wanted["z_loss"]
        np.testing.assert_allclose(loss, language + auxiliary, rtol=1e-5)
    assert wanted["expert_load"] > 1.2  # so that a mean would differ


@pytest.mark.slow
def test_stats_are_in_the_order_of_layers(listed: GPT, scanned: GPT):
    hidden, stats = listed.routed(TOKENS)
    assert stats.counts.shape == (2, 5)
    np.testing.assert_array_equal(stats.counts.sum(1), [18 * 2] * 2)
    first = nnx.clone(listed)
    first.blocks = nnx.List(blocks_of(first)[:1])
    first.config = replace(CONFIG, layers=1, dense_layers=(), dense_ffn=None)
    np.testing.assert_array_equal(first.routed(TOKENS)[1].counts[0], stats.counts[0])
    again, its_stats = scanned.routed(TOKENS)
    np.testing.assert_allclose(again, hidden, atol=1e-5)
    np.testing.assert_array_equal(its_stats.counts, stats.counts)


@pytest.mark.slow
def test_decoding_routes_as_the_whole_text_does(scanned: GPT):
    wanted = scanned.hidden(TOKENS)
    cache = scanned.init_cache(2, 16, jnp.float32)
    zero = jnp.zeros(2, jnp.int32)
    found = []
    for start, end in ((0, 8), (8, 9)):
        hidden, cache = scanned.decode(TOKENS[:, start:end], zero + start, zero + end, cache)
        found.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(found, 1), wanted, atol=1e-5)


def test_a_dense_model_has_no_routers():
    with pytest.raises(ZeroError, match="experts = 0: the model has no routers"):
        GPT(replace(CONFIG, experts=0, dense_layers=(), dense_ffn=None), rngs=nnx.Rngs(0)).routed(TOKENS)


@pytest.mark.slow
def test_a_sharded_step_equals_a_step_on_the_whole_batch():
    """With other numbers of tokens that count on each device, and experts spread over two."""
    config = replace(CONFIG, scan=True, experts=6)
    rows = np.array(jax.random.randint(jax.random.key(1), (8, 9), 0, 37))
    rows[3:, 4:] = -1
    batch = {"tokens": rows.astype(np.int32)}
    state = zerojax.TrainState.create(
        lambda rngs: GPT(config, rngs=rngs),
        optax.sgd(1.0),
        lm_loss,
        mesh=zerojax.make_mesh(2, 2),
        zero=zerojax.ZeroConfig(compute_dtype="float32", grads=("fp32", "fp32")),
    )
    plain: Any = zerojax.gather_model(state)
    plain.train()
    start = zerojax.gather_params(state)
    (loss, aux), grads = nnx.jit(nnx.value_and_grad(lm_loss, has_aux=True))(plain, batch)
    state, metrics = zerojax.train_step(state, batch)
    for name, value in (aux | {"loss": loss}).items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    wanted = jax.tree.map(lambda x, g: x - g, start, nnx.to_pure_dict(grads))
    assert distance(zerojax.gather_params(state), wanted) < 1e-5
