"""Micro-batches in depth: each draws random bits of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from core_models import WIDTH, Case, regression_batch
from flax import nnx

import zerojax
from zerojax.step import gradients

MICRO, SIZE = 2, 128


class Dropping(nnx.Module):
    """Dropout of a sum, so that nothing but the mask changes it."""

    def __init__(self, rngs: nnx.Rngs):
        self.bias = nnx.Param(jnp.ones(WIDTH))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(x + self.bias[...])


def total_and_square(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    total = jnp.sum(model(batch["x"]))
    return total, {"square": total**2}


def test_dropout_masks_differ():
    """All rows are equal: with equal masks so are the micro-batches' sums."""
    case = Case(Dropping, total_and_square, (), regression_batch)
    state = case.create(optax.sgd(0.0), nodes=1, local=1, stage=0, accumulate=MICRO)
    rows = {"x": np.ones((MICRO * 8, WIDTH), np.float32), "y": np.zeros(MICRO * 8, np.float32)}
    _, metrics = zerojax.train_step(state, rows)
    assert metrics["square"] > 1.0001 * metrics["loss"] ** 2


class Slope(nnx.Module):
    """A unit whose gradient is a given vector."""

    def __init__(self, rngs: nnx.Rngs):
        del rngs
        self.w = nnx.Param(jnp.zeros((1, SIZE)))

    def __call__(self, slope: jax.Array) -> jax.Array:
        return slope @ self.w[0]


def test_stochastic_rounding_differs():
    """fp8 rounds magnitudes: with the same bits, equal and opposite gradients would cancel exactly."""
    case = Case(Slope, lambda model, batch: model(batch["slope"]).mean(), (Slope,), regression_batch)
    zero = {"grads": ("fp8", "fp8"), "rounding": "stochastic", "block_size": 64, "accumulate": MICRO}
    state = case.create(optax.sgd(0.0), nodes=1, local=2, **zero)
    slope = np.random.default_rng(0).standard_normal((2, 1, SIZE)).astype(np.float32)
    # Each device has one row and its negative, one in each micro-batch.
    rows = np.concatenate([slope, -slope], axis=1).reshape(2 * MICRO, SIZE)
    (gradient,) = jax.tree.leaves(gradients(state, {"slope": rows}))
    left = np.abs(np.asarray(gradient))
    assert 0 < left.max() < 0.2 * np.abs(slope).max()
