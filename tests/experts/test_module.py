"""``zerojax.Experts`` against a loop over all experts, on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array
from plain_experts import ACTIVATIONS, assert_close, plain_experts

import zerojax
from zerojax import Experts, ExpertWeights, RouterConfig
from zerojax.schedule.remat import rematerialised
from zerojax.zero_config.options import Remat

WIDTH, HIDDEN, EXPERTS, PER_TOKEN = 6, 5, 7, 3
normal = nnx.initializers.normal(0.7)


def by_loop(layer: Experts, x: Array) -> tuple[Array, Array]:
    """The outputs, and the balance loss."""
    tokens = x.reshape(-1, WIDTH)
    logits = tokens @ layer.router[...]
    logits += 0 if layer.router_bias is None else layer.router_bias[...]
    probabilities = jax.nn.softmax(logits)
    chosen, experts = jax.lax.top_k(logits, PER_TOKEN)
    if layer.mixture.router.normalise:
        weights = jax.nn.softmax(chosen)
    else:
        weights = jnp.take_along_axis(probabilities, experts, -1)
    optional = (layer.gate, layer.gate_bias, layer.up_bias, layer.down_bias)
    gate, *biases = (weight if weight is None else weight[...] for weight in optional)
    own = ExpertWeights(gate, layer.up[...], layer.down[...], *biases)
    down, up = ((lambda x: x) if one is None else one for one in (layer.latent_down, layer.latent_up))
    out = up(plain_experts(down(tokens), experts, weights, own, layer.mixture.activation))
    if (one := layer.shared) is not None:
        first = (tokens @ part.kernel[...] for part in (one.gate, one.up) if part is not None)
        shared = ACTIVATIONS[layer.mixture.activation](*first) @ one.down.kernel[...]
        out += shared if one.output_gate is None else shared * jax.nn.sigmoid(one.output_gate(tokens))
    counts = jax.nn.one_hot(experts, EXPERTS).sum(1)
    return out.reshape(x.shape), EXPERTS * (counts.mean(0) * probabilities.mean(0)).sum()


@pytest.mark.parametrize(
    "settings",
    [
        {"shared": 4},
        {"shared": 4, "activation": "relu2", "biases": True, "latent": 3},
        {"router": RouterConfig(normalise=False), "activation": "geglu", "shared": 4, "shared_gate": True},
        pytest.param(
            {"router": RouterConfig(logit_biases=True), "activation": "swiglu_clamped", "biases": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["swiglu", "no gate, latents", "qwen2", "gpt-oss"],
)
def test_values_and_gradients_equal_a_loop_over_all_experts(settings: dict):
    layer = Experts(WIDTH, HIDDEN, EXPERTS, PER_TOKEN, **settings, init=normal, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(layer)
    # Biases begin at zero, and all must count.
    weights = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), weights)
    x = jax.random.normal(jax.random.key(1), (2, 11, WIDTH))

    def loss(run, weights: nnx.State, x: Array) -> tuple[Array, Array]:
        out, balance = run(nnx.merge(graph, weights), x)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)) + 5 * balance, out

    def ours(layer: Experts, x: Array) -> tuple[Array, Array]:
        out, stats = layer(x)
        return out, zerojax.balance_loss(stats)

    @jax.jit
    def compared(weights: nnx.State, x: Array):
        return [
            jax.value_and_grad(lambda *args, run=run: loss(run, *args), (0, 1), has_aux=True)(weights, x)
            for run in (ours, by_loop)
        ]

    assert_close(*compared(weights, x))


def test_no_token_is_dropped_if_all_go_to_one_expert():
    layer = Experts(WIDTH, HIDDEN, EXPERTS, 1, init=normal, rngs=nnx.Rngs(0))
    layer.router[...] = jnp.zeros((WIDTH, EXPERTS)).at[0, 2].set(100.0)
    x = jax.random.normal(jax.random.key(1), (33, WIDTH)).at[:, 0].set(1)
    out, stats = nnx.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_array_equal(stats.counts, 33 * np.eye(EXPERTS)[2])
    assert layer.gate is not None
    gate, up, down = (np.asarray(w[...][2]) for w in (layer.gate, layer.up, layer.down))
    hidden = np.asarray(ACTIVATIONS["swiglu"](x @ gate, x @ up))
    np.testing.assert_allclose(out, hidden @ down, rtol=1e-4, atol=1e-4)


def test_no_token_at_all():
    layer = Experts(WIDTH, HIDDEN, experts=EXPERTS, per_token=PER_TOKEN, rngs=nnx.Rngs(0))
    out, stats = layer(jnp.zeros((2, 0, WIDTH)))
    assert out.shape == (2, 0, WIDTH)
    assert float(zerojax.balance_loss(stats) + zerojax.z_loss(stats)) == 0


def test_bf16_weights_give_bf16_and_statistics_in_fp32():
    layer = Experts(WIDTH, HIDDEN, EXPERTS, PER_TOKEN, shared=3, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(layer)
    half = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights))
    out, stats = jax.eval_shape(half, jnp.ones((2, 3, WIDTH), jnp.bfloat16))
    assert (out.shape, out.dtype) == ((2, 3, WIDTH), jnp.bfloat16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(stats)} == {"float32"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": 0}, "experts=0 must be at least 1"),
        ({"per_token": 8}, "per_token=8 must be from 1 to experts=7"),
        ({"activation": "silu"}, "activation='silu' must be one of gelu, gelu_exact, relu, relu2, swiglu"),
        ({"latent": -1}, "latent=-1 must be at least 0"),
        ({"shared_gate": True}, "shared=0, shared_gate=True"),
    ],
)
def test_sizes_and_settings_that_mean_nothing_are_refused(settings: dict, message: str):
    given: dict = {"width": WIDTH, "hidden": HIDDEN, "experts": EXPERTS, "per_token": PER_TOKEN} | settings
    with pytest.raises(zerojax.ZeroError, match=re.escape(message)):
        Experts(**given, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("remat", "kept"), [("none", 2), ("full", 0)])
def test_the_backward_pass_keeps_gate_and_up_alone_or_nothing(remat: Remat, kept: int):
    layer = Experts(WIDTH, HIDDEN, EXPERTS, PER_TOKEN, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(layer)
    run = rematerialised(lambda weights, x: nnx.merge(graph, weights)(x)[0], remat)
    shapes = weights, jax.ShapeDtypeStruct((11, WIDTH), jnp.float32)
    residuals = jax.tree.leaves(jax.eval_shape(lambda weights, x: jax.vjp(run, weights, x)[1], *shapes))
    rows = 11 * PER_TOKEN
    wide = [residual.shape for residual in residuals if residual.shape[:1] == (rows,) and residual.ndim > 1]
    assert wide == [(rows, HIDDEN)] * kept
