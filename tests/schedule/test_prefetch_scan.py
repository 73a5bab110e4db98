"""Stacks deep enough that both loops of the schedule repeat, against optax on one device.

With up to four layers the backward loop runs once at most: in the wrong order, or with the weights of another
layer, it would pass.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from core_models import WIDTH, Case, regression_batch, squared_error
from flax import nnx
from plain_loop import Plain, Tree, distance, masters, plain_loop

import zerojax

LAYERS, ROWS, STEPS = 6, 8, 2


class Layer(nnx.Module):
    """A residual layer of one matrix and one vector, with an argument that all layers share."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, gain: jax.Array) -> jax.Array:
        return x + gain * jax.nn.tanh(self.linear(x))


class Deep(nnx.Module):
    """A stack whose shared argument is a parameter, and a head."""

    def __init__(self, rngs: nnx.Rngs):
        self.gain = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,)))
        self.stack = zerojax.Stack(Layer, LAYERS, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.stack(x, self.gain[...]))


CASE = Case(Deep, squared_error, (), regression_batch)


def slope_descent() -> optax.GradientTransformation:
    return optax.sgd(0.1)


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain(CASE)


@pytest.fixture(scope="module")
def wanted(plain: Plain) -> tuple[list[float], Tree]:
    losses, weights = plain_loop(plain, slope_descent(), CASE.batches(ROWS, STEPS))
    return losses, change(weights, plain)


def change(weights: Tree, plain: Plain) -> Tree:
    return jax.tree.map(lambda after, before: np.asarray(after) - np.asarray(before), weights, plain.weights)


def zero_plus_plus(fmt: str) -> dict[str, Any]:
    return {"hpz": True, "weights": fmt, "grads": (fmt, fmt), "block_size": 64}


@pytest.mark.parametrize(
    ("mesh", "options", "within"),
    [
        ((2, 2), {}, 1e-5),
        pytest.param((2, 2), {"hpz": True}, 1e-5, marks=pytest.mark.slow),
        ((2, 2), {"hpz": True, "weights_delta": True}, 1e-5),
        pytest.param(
            (2, 2), {"hpz": True, "grad_sync": "step", "accumulate": 2}, 1e-5, marks=pytest.mark.slow
        ),
        ((2, 1), {}, 1e-5),
        ((1, 2), {}, 1e-5),
        pytest.param((2, 2), zero_plus_plus("int8"), 0.03, marks=pytest.mark.slow),
        pytest.param(
            (2, 2),
            {**zero_plus_plus("int8"), "weights_delta": True, "local_weights": "bf16"},
            0.03,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["zero3", "hpZ", "delta", "node hop once", "one hop", "one node", "zero++", "lossy delta"],
)
def test_six_layers_learn_what_one_device_does(mesh, options, within, plain, wanted):
    """With every way of weights and gradients through the loops; a wrong layer changes all of the update."""
    state = CASE.start(slope_descent(), plain.weights, nodes=mesh[0], local=mesh[1], **options)
    losses = []
    for batch in CASE.batches(ROWS, STEPS):
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    wanted_losses, wanted_change = wanted
    np.testing.assert_allclose(losses, wanted_losses, rtol=within)
    assert distance(change(masters(state), plain), wanted_change) < within
