"""Random bits: every micro-batch, step and layer draws its own."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import WIDTH, Case, SlopeLayer, regression_batch, slope_case, slope_loss
from flax import nnx

import zerojax
from zerojax.train.step import gradients

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


def test_micro_batches_have_dropout_masks_of_their_own():
    """All rows are equal: with equal masks so are the micro-batches' sums."""
    case = Case(Dropping, total_and_square, (), regression_batch)
    state = case.create(optax.sgd(0.0), nodes=1, local=1, stage=0, accumulate=MICRO)
    rows = {"x": np.ones((MICRO * 8, WIDTH), np.float32), "y": np.zeros(MICRO * 8, np.float32)}
    _, metrics = zerojax.train_step(state, rows)
    assert metrics["square"] > 1.0001 * metrics["loss"] ** 2


def test_a_loss_may_take_rngs_by_name_alone():
    def noisy(model: Any, batch: Any, *, rngs: nnx.Rngs) -> jax.Array:
        return jnp.mean(model(batch["x"]) * jax.random.normal(rngs.noise()))

    state = Case(Dropping, noisy, (), regression_batch).create(optax.sgd(0.0), nodes=1, local=1, stage=0)
    zerojax.lower_train_step(state, {"x": np.ones((8, WIDTH), np.float32)})


def test_micro_batches_are_rounded_with_bits_of_their_own():
    """fp8 rounds magnitudes: with the same bits, equal and opposite gradients would cancel exactly."""
    zero = {"grads": ("fp8", "fp8"), "rounding": "stochastic", "block_size": 64, "accumulate": MICRO}
    state = slope_case(SIZE).create(optax.sgd(0.0), nodes=1, local=2, **zero)
    slope = np.random.default_rng(0).standard_normal((2, 1, SIZE)).astype(np.float32)
    # Each device has one row and its negative, one in each micro-batch.
    rows = np.concatenate([slope, -slope], axis=1).reshape(2 * MICRO, SIZE)
    (gradient,) = jax.tree.leaves(gradients(state, {"slope": rows}))
    left = np.abs(np.asarray(gradient))
    assert 0 < left.max() < 0.2 * np.abs(slope).max()


@pytest.mark.filterwarnings("ignore:no unit is named")
@pytest.mark.parametrize(
    ("units", "options"),
    [((), {}), ((), {"stage": 1}), ((SlopeLayer,), {"grad_sync": "step", "error_feedback": True})],
    ids=["no unit", "stage 1", "once per step"],
)
def test_steps_are_rounded_with_bits_of_their_own(units, options):
    """Wherever gradients are encoded; test_quantized_step.py has those of units."""
    zero: dict[str, Any] = {"grads": ("int4", "int4"), "rounding": "stochastic", "block_size": 64, **options}
    state = slope_case(SIZE).create(optax.sgd(0.0), nodes=2, local=1, units=units, **zero)
    slope = np.random.default_rng(0).standard_normal((2, SIZE)).astype(np.float32)
    found = [
        np.asarray(*jax.tree.leaves(gradients(state.replace(step=step), {"slope": slope})))
        for step in np.arange(2, dtype=np.int32)
    ]
    assert (found[0] != found[1]).any()
    np.testing.assert_allclose(np.mean(found, 0).reshape(-1), slope.mean(0), atol=np.abs(slope).max() / 5)


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.stack = zerojax.Stack(partial(SlopeLayer, SIZE), 3, rngs=rngs)

    def __call__(self, slope: jax.Array) -> jax.Array:
        return self.stack(jnp.zeros(len(slope)), slope)


def test_layers_are_rounded_with_bits_of_their_own_where_the_node_hop_is_taken_once_per_step():
    case = Case(Layers, slope_loss, (), regression_batch)
    zero = {"grads": ("fp32", "int4"), "rounding": "stochastic", "block_size": 64}
    state = case.create(optax.sgd(0.0), nodes=2, local=1, **zero, grad_sync="step", accumulate=MICRO)
    slope = np.random.default_rng(0).standard_normal((2 * MICRO, SIZE)).astype(np.float32)
    (found,) = jax.tree.leaves(gradients(state, {"slope": slope}))
    assert found.shape[0] == len(np.unique(np.asarray(found).reshape(3, -1), axis=0)) == 3
