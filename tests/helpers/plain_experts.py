"""A mixture of experts as a loop over all of them, each on every token."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from zerojax.experts.mlp import ExpertWeights

ACTIVATIONS = {
    "swiglu": lambda gate, up: gate / (1 + jnp.exp(-gate)) * up,
    "geglu": lambda gate, up: (
        0.5 * gate * (1 + jnp.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    ),
    "swiglu_clamped": lambda gate, up: (
        (jnp.clip(up, -7, 7) + 1) * jnp.minimum(gate, 7) / (1 + jnp.exp(-1.702 * jnp.minimum(gate, 7)))
    ),
    "relu2": lambda up: jnp.maximum(up, 0) ** 2,
}


def plain_experts(x: Array, experts: Array, weights: Array, own: ExpertWeights, activation: str) -> Array:
    """See ``zerojax.experts.apply_experts``, with all experts."""
    total = jnp.zeros_like(x)
    down = cast(Array, own.down)
    for number in range(len(down)):

        def plus(products: Array, biases: Array | None, number: int = number) -> Array:
            return products if biases is None else products + biases[number]

        first = (plus(x @ cast(Array, matrix)[number], bias) for matrix, bias in own.first)
        share = jnp.where(experts == number, weights, 0).sum(1)
        out = ACTIVATIONS[activation](*first) @ down[number]
        total += share[:, None] * plus(out, own.down_bias)
    return total


def some_experts(count: int, width: int, hidden: int, *, biases: bool = False) -> ExpertWeights:
    """Random weights, fp32."""
    rng = np.random.default_rng(count)
    shapes = [(count, width, hidden), (count, width, hidden), (count, hidden, width)]
    if biases:
        shapes += [(count, hidden), (count, hidden), (count, width)]
    return ExpertWeights(*(jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float32) for shape in shapes))


def some_routing(tokens: int, count: int, per_token: int, *, skewed: bool = False) -> tuple[Array, Array]:
    """Different experts for each token, and weights; skewed, all have the first expert and none the last."""
    rng = np.random.default_rng(tokens)
    if skewed:
        others = [rng.permutation(np.arange(1, count - 1))[: per_token - 1] for _ in range(tokens)]
        experts = np.array([[*own[:1], 0, *own[1:]] for own in others])
    else:
        experts = np.array([rng.permutation(count)[:per_token] for _ in range(tokens)])
    return jnp.asarray(experts, jnp.int32), jnp.asarray(rng.uniform(size=experts.shape), jnp.float32)


def assert_close(found: object, wanted: object, *, tolerance: float = 2e-5) -> None:
    """Compare trees of arrays, relative to the largest element of each."""
    named = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, want), have in zip(named, jax.tree.leaves(found), strict=True):
        error = np.abs(np.asarray(have) - np.asarray(want)).max() / max(np.abs(want).max(), 1e-3)
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error}"
