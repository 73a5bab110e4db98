"""What an NNX module may keep beside floating-point parameters, in a unit and outside."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
ORDER = [2, 0, 3, 1]

pytestmark = pytest.mark.filterwarnings("ignore:no unit is named")


class Positive(nnx.Param):
    """A parameter that is read through a function."""

    def get_value(self, **options: Any) -> Any:
        return jax.nn.softplus(super().get_value(**options))


class Keeping(nnx.Module):
    """A layer with an integer parameter, a plain array, a ``Positive`` parameter, and what it sows."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.order = nnx.Param(jnp.array(ORDER))
        self.offset = nnx.data(jnp.linspace(-1.0, 1.0, 4))
        self.gain = Positive(jnp.linspace(-1.0, 2.0, 4))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.tanh(self.linear(x))[:, self.order[...]] * self.gain.get_value() + self.offset
        self.sow(nnx.Intermediate, "square", jnp.mean(y**2))
        return x + y


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, unit: Any = Keeping):
        self.unit = unit(rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.unit(self.unit(x))


def create(model: Any, loss: Any, units: tuple[type, ...], **zero: Any) -> zerojax.TrainState:
    config = zerojax.ZeroConfig(compute_dtype="float32", units=units, **zero)
    return zerojax.TrainState.create(model, optax.sgd(1.0), loss, mesh=zerojax.make_mesh(2, 2), zero=config)


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    y, sown = nnx.capture(model, nnx.Intermediate)(x)
    return jnp.mean(y**2) + jnp.sum(jnp.stack(jax.tree.leaves(sown)))


def by_hand(weights: Any, x: jax.Array) -> jax.Array:
    linear, total = weights["unit"]["linear"], jnp.zeros(())
    for _ in range(2):
        y = jnp.tanh(x @ linear["kernel"] + linear["bias"])[:, jnp.array(ORDER)]
        y = y * jax.nn.softplus(weights["unit"]["gain"]) + jnp.linspace(-1.0, 1.0, 4)
        x, total = x + y, total + jnp.mean(y**2)
    return jnp.mean(x**2) + total


@pytest.mark.parametrize(("units", "zero"), [((), {}), ((Keeping,), {}), ((Keeping,), {"accumulate": 2})])
def test_what_a_module_keeps_and_sows(units, zero):
    state, x = create(Network, loss_fn, units, **zero), jnp.asarray(X)
    np.testing.assert_allclose(zerojax.gather_params(state)["unit"]["gain"], np.linspace(-1, 2, 4), atol=1e-6)
    state, _ = zerojax.train_step(state, X)  # what it keeps fits the next
    before = zerojax.gather_params(state)
    np.testing.assert_allclose(loss_fn(zerojax.gather_model(state), x), by_hand(before, x), rtol=1e-5)
    loss, gradients = jax.value_and_grad(by_hand)(before, x)
    state, metrics = zerojax.train_step(state, X)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    jax.tree.map(
        lambda start, end, grad: np.testing.assert_allclose(start - end, grad, rtol=1e-4, atol=1e-5),
        before, zerojax.gather_params(state), gradients,
    )  # fmt: skip


class Complex(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear, self.phase = nnx.Linear(4, 4, rngs=rngs), nnx.Param(jnp.ones(4, jnp.complex64))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.abs(self.linear(x) * self.phase[...])


def test_a_complex_parameter_is_refused():
    with pytest.raises(zerojax.ZeroError, match="'unit/phase' is complex"):
        create(lambda rngs: Network(rngs, Complex), lambda model, x: jnp.mean(model(x)), ())


class Assigning(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear, self.last = nnx.Linear(4, 4, rngs=rngs), 0.0

    def __call__(self, x: jax.Array) -> jax.Array:
        self.last = jnp.mean(x**2)
        return self.linear(x)


@pytest.mark.parametrize("stack", [False, True])
def test_an_array_that_a_unit_would_lose_is_refused(stack):
    def model(rngs: nnx.Rngs) -> Network:
        return Network(
            rngs, lambda rngs: zerojax.Stack(Assigning, 2, rngs=rngs) if stack else Assigning(rngs=rngs)
        )

    state = create(model, lambda model, x: jnp.mean(model(x)), () if stack else (Assigning,))
    with pytest.raises(zerojax.ZeroError, match="unit Assigning assigned an array to its attribute 'last'"):
        zerojax.train_step(state, X)
