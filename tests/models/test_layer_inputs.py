"""Decoders with an input for each layer, and keys and values that later layers share (Gemma 4 E2B)."""

import functools
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
from plain_step import begin

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.models import GPT, GPTConfig, lm_loss, units_of
from zerojax.models.kv_cache import KVCache
from zerojax.models.size import flops_per_token, parameter_count

E2B = replace(
    GEMMA4,
    layers=8,
    kv_heads=1,
    ffn=12,
    norm_eps=0.01,
    layer_inputs=4,
    kv_shared_layers=4,
    kv_shared_ffn=24,
    embedding_scale=4.0,
    init_std=0.2,
)
HALF = replace(E2B, layers=4, kv_shared_layers=2)
"""A layer of each kind, for half of the compiling."""
Weights = dict[str, Any]


def normed(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + E2B.norm_eps) * scale


def rotated(x: jax.Array, theta: float, pairs: int) -> jax.Array:
    """Rotate the first ``pairs`` of each head's pairs (i, i + half)."""
    half = x.shape[-1] // 2
    speeds = jnp.where(jnp.arange(half) < pairs, theta ** (-jnp.arange(half) / half), 0.0)
    angles = (jnp.arange(x.shape[1])[:, None] * speeds)[:, None]
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [low * jnp.cos(angles) - high * jnp.sin(angles), high * jnp.cos(angles) + low * jnp.sin(angles)], -1
    )


def plain_logits(config: GPTConfig, weights: Weights, tokens: np.ndarray) -> jax.Array:
    """The logits, layer by layer, in plain JAX: as in transformers' modeling_gemma4."""
    table, inputs = weights["embed"]["embedding"], weights["layer_inputs"]
    x = embedded = table[tokens] * 4.0
    shape = (*tokens.shape, config.layers, config.layer_inputs)
    sharing = config.layers - config.kv_shared_layers
    projected = normed(
        (embedded @ inputs["projection"]["kernel"] / 4.0).reshape(shape), inputs["norm"]["scale"]
    )
    own = (projected + inputs["embed"]["embedding"][tokens].reshape(shape) * 2.0) / np.sqrt(2)
    distances = jnp.arange(tokens.shape[1])[:, None] - jnp.arange(tokens.shape[1])
    keys: dict[bool, tuple[jax.Array, jax.Array]] = {}
    for layer in range(config.layers):
        full, shares = layer % 2 == 1, layer >= sharing
        # The stack of a kind is named by its first layer.
        first = sharing * shares + full
        w = jax.tree.map(lambda x, i=(layer - first) // 2: x[i], weights["blocks"][str(first)]["block"])
        width = 8 if full else 4
        heads = normed(x, w["norm_attention"]["scale"]) @ w["attention"]["qkv"]["kernel"]
        heads = heads.reshape(*tokens.shape, -1, width)
        theta = 10000.0 if full else 100.0
        query = rotated(normed(heads[:, :, :4], w["attention"]["query_norm"]["scale"]), theta=theta, pairs=2)
        if not shares:
            key = rotated(normed(heads[:, :, 4:5], w["attention"]["key_norm"]["scale"]), theta=theta, pairs=2)
            keys[full] = key, normed(heads[:, :, 5:])
        key, value = keys[full]
        seen = (distances >= 0) & (full | (distances < 6))
        scores = jnp.einsum("bqhd,bkd->bhqk", query, key[:, :, 0])
        attended = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) @ value[:, None, :, 0]
        joined = attended.swapaxes(1, 2).reshape(*tokens.shape, -1) @ w["attention"]["out"]["kernel"]
        x = x + normed(joined, w["post_norm_attention"]["scale"])
        before, mlp = normed(x, w["norm_mlp"]["scale"]), {name: x["kernel"] for name, x in w["mlp"].items()}
        out = (jax.nn.gelu(before @ mlp["gate"]) * (before @ mlp["up"])) @ mlp["down"]
        x = x + normed(out, w["post_norm_mlp"]["scale"])
        gate = jax.nn.gelu(x @ w["input"]["gate"]["kernel"]) * own[:, :, layer]
        x = x + normed(gate @ w["input"]["out"]["kernel"], w["input"]["norm"]["scale"])
    return normed(x, weights["norm"]["scale"]) @ table.T


def plain_loss(config: GPTConfig, weights: Weights, tokens: np.ndarray) -> jax.Array:
    logits = plain_logits(config, weights, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def test_kinds_are_layers_with_and_without_keys():
    assert E2B.order == (0, 1, 0, 1, 2, 3, 2, 3)
    assert E2B.key_layers == (0, 1, 2, 3, 2, 3, 2, 3)
    assert [(kind.qkv_width, kind.ffn_width, count) for kind, count in E2B.kinds] == [
        (16 + 8, 12, 2), (32 + 16, 12, 2), (16, 24, 2), (32, 24, 2),
    ]  # fmt: skip


def test_parameters_and_flops_are_counted():
    model = nnx.eval_shape(lambda: GPT(E2B, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert parameter_count(E2B) == sum(leaf.size for leaf in leaves)
    narrow = replace(E2B, layer_inputs=0)
    more = 8 * (16 * 4 + 16 * 4 + 4 * 16)  # the projection, and each layer's gate and projection
    assert flops_per_token(E2B, 32) - flops_per_token(narrow, 32) == 6 * more


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_packed_documents_and_cached_tokens_are_computed_as_if_alone(scan: bool):
    model = GPT(replace(E2B, scan=scan), rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 40), 0, 64)
    whole = check_documents(model, tokens, ((0, 20, 40), (0, 20, 40)))
    cache = check_decoding(model, tokens, whole)
    assert [own.keys.shape[0] for own in cache if isinstance(own, KVCache)] == [2, 2]


@pytest.mark.parametrize(
    ("config", "mesh", "options"),
    [
        (HALF, (2, 4), {}),
        pytest.param(E2B, (2, 4), {}, marks=pytest.mark.slow),
        pytest.param(E2B, (1, 1), {}, marks=pytest.mark.slow),
        pytest.param(E2B, (3, 2), {"hpz": True, "weights_delta": True}, marks=pytest.mark.slow),
        pytest.param(E2B, (3, 2), {"remat": "none"}, marks=pytest.mark.slow),
        pytest.param(E2B, (2, 2), {"remat": "full"}, marks=pytest.mark.slow),
        pytest.param(E2B, (1, 4), {"sequence_parallel": 4}, marks=pytest.mark.slow),
        pytest.param(E2B, (1, 2), {"accumulate": 3, "accumulate_order": "breadth"}, marks=pytest.mark.slow),
        pytest.param(E2B, (2, 2), {"accumulate": 3}, marks=pytest.mark.slow),
        pytest.param(
            E2B, (2, 2), {"host": ("optimizer",), "update_in_backward": True}, marks=pytest.mark.slow
        ),
        pytest.param(E2B, (2, 2), {"host": ("activations",), "remat": "full"}, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_that_of_plain_jax(config: GPTConfig, mesh: tuple[int, int], options: dict[str, Any]):
    tx = optax.adamw(0.01, eps=1e-3)  # does not divide rounding errors by gradients near zero
    state = begin(config, mesh, tx, units=units_of(config), **options)
    before = zerojax.gather_params(state)
    tokens = np.random.default_rng(0).integers(0, 64, (24, 21), dtype=np.int32)
    loss, gradients = jax.jit(jax.value_and_grad(functools.partial(plain_loss, config)))(before, tokens)
    state, metrics = zerojax.train_step(state, {"tokens": tokens})
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    updates: Any = jax.jit(lambda grads, before: tx.update(grads, tx.init(before), before)[0])(
        gradients, before
    )
    after = zerojax.gather_params(state)
    # Plain JAX in fp32 is as far from fp64: 3e-5.
    assert distance(jax.tree.map(lambda x, y: y - x, before, after), updates) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero++", "delta"])
def test_quantized_presets_learn(preset: Literal["zero++", "delta"]):
    zero = zerojax.ZeroConfig.preset(preset, compute_dtype="float32", units=units_of(E2B))
    state = zerojax.TrainState.create(
        lambda rngs: GPT(E2B, rngs=rngs), optax.adam(3e-3), lm_loss, mesh=zerojax.make_mesh(2, 4), zero=zero
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
        ({"kv_shared_layers": 7}, "no earlier layer has the window"),
        ({"kv_shared_layers": 9}, "must be below layers = 8"),
        ({"kv_shared_layers": 0}, "kv_shared_ffn = 24 needs kv_shared_layers"),
        ({"mlp": "gelu"}, "layer_inputs = 4 needs a gated mlp"),
        ({"recurrent_layers": (0,)}, "kv_shared_layers = 4 needs attention and an MLP in all layers"),
        ({"no_rope_layers": (1,)}, "no_rope_layers is not supported with kv_shared_layers"),
    ],
)
def test_contradictions_are_refused(keys: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        replace(E2B, **keys)


def test_a_model_needs_a_layer_with_keys():
    with pytest.raises(ConfigurationError, match="kv_shared_layers = 8 must be below layers = 8"):
        GPT(replace(E2B, kv_shared_layers=8), rngs=nnx.Rngs(0))
