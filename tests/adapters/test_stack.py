from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax

FACTORS = np.array([1.0, -2.0, 0.5], np.float32)


class Scaled(nnx.Module):
    """A layer that adds ``factor`` times a product, or nothing where it is off."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array, *, factor: jax.Array, on: jax.Array) -> jax.Array:
        return x + jnp.where(on, factor * jnp.tanh(self.linear(x)), 0)


def make(rngs: nnx.Rngs) -> zerojax.Stack:
    return zerojax.Stack(Scaled, 3, rngs=rngs)


def apply(model: zerojax.Stack, x: jax.Array) -> jax.Array:
    return model(x, by_layer={"factor": jnp.asarray(FACTORS), "on": jnp.array([True, False, True])})


def by_hand(model: zerojax.Stack, x: jax.Array | np.ndarray) -> jax.Array:
    block: Any = model.block
    kernels, biases = block.linear.kernel[...], block.linear.bias[...]
    for layer in (0, 2):
        x = x + FACTORS[layer] * jnp.tanh(x @ kernels[layer] + biases[layer])
    return jnp.asarray(x)


def test_each_layer_gets_its_own_part():
    model, x = make(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (5, 4))
    np.testing.assert_allclose(apply(model, x), by_hand(model, x), rtol=1e-5)


@pytest.mark.parametrize("order", ["depth", "breadth"])
def test_each_layer_gets_its_own_part_in_a_step(order):
    batch = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}

    def loss(model: zerojax.Stack, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(apply(model, batch["x"]) ** 2)

    zero = zerojax.ZeroConfig(accumulate=2, accumulate_order=order, compute_dtype="float32")
    mesh = zerojax.make_mesh(2, 2)
    state = zerojax.TrainState.create(make, optax.sgd(0.1), loss, mesh=mesh, zero=zero)
    model = zerojax.gather_model(state)
    gradients = nnx.grad(lambda model: jnp.mean(by_hand(model, batch["x"]) ** 2))(model)
    expected = jax.tree.map(lambda x, g: x - 0.1 * g, nnx.state(model, nnx.Param), gradients)
    state, _ = zerojax.train_step(state, batch)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-6),
        zerojax.gather_params(state),
        nnx.to_pure_dict(expected),
    )
