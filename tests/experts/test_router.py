"""Routers against numpy, and what they do about experts that are used unevenly."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

import zerojax
from zerojax import RouterConfig, RouterStats
from zerojax.experts import route
from zerojax.experts.mixture import moved

TOKENS, EXPERTS, PER_TOKEN = 13, 12, 3


def logits_of(tokens: int = TOKENS, experts: int = EXPERTS) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(tokens, experts)).astype(np.float32) * 2


def softmax(x: np.ndarray) -> np.ndarray:
    exp = np.exp(x - x.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def best(scores: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-scores, axis=-1, kind="stable")[:, :count]


@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_weighs_by_probabilities_or_by_those_of_the_chosen_alone(normalise: bool):
    logits = logits_of()
    routing = route(jnp.asarray(logits), PER_TOKEN, RouterConfig(normalise=normalise, scale=1.5))
    experts = best(logits, PER_TOKEN)
    chosen = np.take_along_axis(logits, experts, -1)
    weights = softmax(chosen) if normalise else np.take_along_axis(softmax(logits), experts, -1)
    np.testing.assert_array_equal(routing.experts, experts)
    np.testing.assert_allclose(routing.weights, 1.5 * weights, rtol=1e-5)


def test_factors_weigh_but_do_not_choose():
    logits, factors = jnp.asarray(logits_of()), np.linspace(-1, 2, EXPERTS, dtype=np.float32)
    plain = route(logits, PER_TOKEN, RouterConfig())
    routing = route(logits, PER_TOKEN, RouterConfig(), factors=jnp.asarray(factors))
    np.testing.assert_array_equal(routing.experts, plain.experts)
    np.testing.assert_allclose(routing.weights, plain.weights * factors[plain.experts], rtol=1e-6)


def test_a_bias_chooses_within_the_best_groups_and_does_not_weigh():
    logits, rng = logits_of(), np.random.default_rng(4)
    bias = rng.normal(size=EXPERTS).astype(np.float32)
    config = RouterConfig("sigmoid", scale=2.5, balance_rate=0.1, groups=4, groups_per_token=2)
    routing = route(jnp.asarray(logits), PER_TOKEN, config, jnp.asarray(bias))
    scores = 1 / (1 + np.exp(-logits))
    for token, (score, experts) in enumerate(zip(scores, np.asarray(routing.experts), strict=True)):
        by_group = (score + bias).reshape(4, 3)
        groups = best(np.sort(by_group, -1)[None, :, 1:].sum(-1), 2)[0]
        inside = np.where(np.isin(np.arange(4), groups)[:, None], by_group, -np.inf).reshape(-1)
        wanted = best(inside[None], PER_TOKEN)[0]
        np.testing.assert_array_equal(experts, wanted)
        weights = 2.5 * score[wanted] / score[wanted].sum()
        np.testing.assert_allclose(routing.weights[token], weights, rtol=1e-5)


def test_a_group_can_be_as_good_as_its_best_expert():
    logits = logits_of() / 8  # two good experts then have more than a very good one
    config = RouterConfig(normalise=False, groups=4, groups_per_token=2, group_best=1)
    routing = route(jnp.asarray(logits), PER_TOKEN, config)
    best_groups = best(logits.reshape(-1, 4, 3).max(-1), 2)
    inside = (np.arange(EXPERTS)[:, None] // 3 == best_groups[:, None]).any(-1)
    wanted = best(np.where(inside, logits, -np.inf), PER_TOKEN)
    np.testing.assert_array_equal(routing.experts, wanted)
    by_two = route(jnp.asarray(logits), PER_TOKEN, dataclasses.replace(config, group_best=2))
    assert (by_two.experts != wanted).any()
    np.testing.assert_allclose(routing.weights, np.take_along_axis(softmax(logits), wanted, -1), rtol=1e-5)


def test_weights_have_the_gradients_of_the_chosen_scores():
    logits = jnp.asarray(logits_of())
    cotangent = jnp.asarray(np.random.default_rng(5).normal(size=(TOKENS, PER_TOKEN)), jnp.float32)

    def ours(logits: Array) -> Array:
        return (route(logits, PER_TOKEN, RouterConfig()).weights * cotangent).sum()

    def gathered(logits: Array) -> Array:
        experts = jax.lax.top_k(logits, PER_TOKEN)[1]
        return (jax.nn.softmax(jnp.take_along_axis(logits, experts, -1)) * cotangent).sum()

    found, wanted = jax.jit(lambda x: (jax.grad(ours)(x), jax.grad(gathered)(x)))(logits)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def numpy_balance(logits: np.ndarray) -> float:
    """As transformers computes it."""
    chosen = np.eye(logits.shape[1])[best(logits, PER_TOKEN)]  # [tokens, per_token, experts]
    return logits.shape[1] * (chosen.mean(0) * softmax(logits).mean(0)).sum()


def test_losses_are_those_of_all_layers_pooled_or_the_mean_over_layers():
    layers = [logits_of() + 3 * np.eye(1, EXPERTS), logits_of()[::-1] - 2]
    stats = [route(jnp.asarray(x, jnp.float32), PER_TOKEN, RouterConfig()).stats for x in layers]
    pooled = RouterStats.zeros(EXPERTS) + stats[0] + stats[1]
    np.testing.assert_allclose(zerojax.balance_loss(pooled), numpy_balance(np.concatenate(layers)), rtol=1e-5)
    by_layer = jax.tree.map(lambda *x: jnp.stack(x), *stats)
    wanted = np.mean([numpy_balance(x) for x in layers])
    np.testing.assert_allclose(zerojax.balance_loss(by_layer), wanted, rtol=1e-5)
    squares = [np.log(np.exp(x).sum(-1)) ** 2 for x in layers]
    np.testing.assert_allclose(zerojax.z_loss(pooled), np.mean(squares), rtol=1e-5)
    np.testing.assert_allclose(zerojax.z_loss(by_layer), np.mean(squares), rtol=1e-5)
    entropy = [-(softmax(x) * np.log(softmax(x))).sum() for x in layers]
    np.testing.assert_allclose(pooled.entropy, sum(entropy), rtol=1e-5)
    assert float(pooled.counts.sum()) == 2 * TOKENS * PER_TOKEN


def test_an_even_load_has_the_least_balance_loss():
    even = RouterStats.zeros(4) + RouterStats(*(jnp.full(4, 6.0), jnp.full(4, 3.0)), *jnp.array([0.0, 0, 12]))
    np.testing.assert_allclose(zerojax.balance_loss(even), 2)


@pytest.mark.parametrize("load", [[9, 9, 6, 0], [3, 1, 0, 1], [5, 5, 5, 5], [0, 0, 0, 0], [2**30, 1, 0, 5]])
def test_a_bias_moves_by_the_sign_of_the_mean_less_the_load(load: list[int]):
    wanted = [np.sign(sum(load) - len(load) * x) for x in load]  # Python's integers
    found = moved(jnp.zeros(4), jnp.asarray(load, jnp.int32), 1.0)
    np.testing.assert_array_equal(found, wanted)


def test_moving_biases_even_out_a_skewed_load():
    config = RouterConfig("sigmoid", balance_rate=0.01)
    init = nnx.initializers.normal(0.7)
    layer = zerojax.Experts(8, 4, 6, 2, router=config, init=init, rngs=nnx.Rngs(0))
    kernel = layer.router[...]
    layer.router[...] = kernel.at[0].set(jnp.array([3.0, 2, 0, 0, 0, 0]))
    x = jax.random.normal(jax.random.key(1), (256, 8)).at[:, 0].set(1)
    graph, weights, state = nnx.split(layer, nnx.Param, ...)

    @jax.jit
    def after_steps(state: nnx.State) -> tuple[nnx.State, Array]:
        def step(state: nnx.State, _: Array) -> tuple[nnx.State, Array]:
            layer = nnx.merge(graph, weights, state)
            _, stats = layer(x)
            return nnx.state(layer, nnx.Not(nnx.Param)), stats.counts

        return jax.lax.scan(step, state, jnp.arange(100))

    state, counts = after_steps(state)
    mean = 256 * 2 / 6
    assert counts[0].max() > 2 * mean
    assert counts[-10:].mean(0).max() < 1.1 * mean
    trained = nnx.merge(graph, weights, state)
    trained.eval()
    nnx.jit(lambda layer: layer(x))(trained)
    for name, value in nnx.to_flat_state(nnx.state(trained, nnx.Not(nnx.Param))):
        np.testing.assert_array_equal(
            value[...], dict(nnx.to_flat_state(state))[name][...], err_msg=str(name)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score": "relu"}, "score='relu' must be one of softmax, sigmoid"),
        ({"scale": 0}, "scale=0 must be above 0"),
        ({"balance_rate": -1}, "balance_rate=-1 must be at least 0"),
        ({"groups": 2, "groups_per_token": 3}, "groups_per_token=3 must be from 1 to groups=2"),
        ({"groups": 5}, "groups=5 do not divide experts=12"),
        ({"groups": 12}, "have 1 each, fewer than group_best=2"),
        ({"group_best": 0}, "group_best=0 must be at least 1"),
        ({"groups": 6}, "per_token=3 of groups_per_token=1 groups, which have 2 experts each"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict, message: str):
    with pytest.raises(zerojax.ZeroError, match=re.escape(message)):
        RouterConfig(**settings).check(EXPERTS, PER_TOKEN)
