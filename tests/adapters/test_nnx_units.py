"""What an NNX module may keep beside floating-point parameters, in a unit and outside."""

from typing import Any, cast

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


class Given(nnx.Module):
    """A layer that is given another module."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array, norm: nnx.Module) -> jax.Array:
        return x + norm(self.linear(x))


class Sharing(nnx.Module):
    """Two layers that share a norm."""

    def __init__(self, rngs: nnx.Rngs, stack: bool = False):
        axes: Any = ("node", "local")
        self.norm = nnx.BatchNorm(4, axis_name=axes, rngs=rngs)
        self.layers = zerojax.Stack(Given, 2, rngs=rngs) if stack else Given(rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers(self.layers(x, self.norm), self.norm)


def test_a_module_that_a_unit_is_given_keeps_its_state():
    found = []
    for units in ((), (Given,)):
        state = create(Sharing, lambda model, x: jnp.mean(model(x) ** 2), units)
        state, _ = zerojax.train_step(state, X)
        found.append(state.model_state["norm/mean"])
    assert np.abs(found[0]).max() > 1e-3
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_a_stack_is_given_no_module_with_state():
    state = create(lambda rngs: Sharing(rngs, stack=True), lambda model, x: jnp.mean(model(x)), ())
    with pytest.raises(zerojax.ZeroError, match="a Stack was given a BatchNorm, whose state 'mean'"):
        zerojax.train_step(state, X)


class Tied(nnx.Module):
    """Two stacks with one kernel."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = (zerojax.Stack(linear, 3, rngs=rngs) for _ in "12")
        first, second = (cast(Any, stack.block) for stack in (self.first, self.second))
        second.kernel = first.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)))


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(4, 4, rngs=rngs)


def test_stacks_that_share_a_parameter_under_delta():
    exact: Any = {"weights": "fp32", "grads": ("fp32", "fp32")}
    delta = {**exact, "hpz": True, "weights_delta": True, "grad_sync": "step"}
    state, wanted = (create(Tied, lambda m, x: jnp.mean(m(x) ** 2), (), **zero) for zero in (delta, {}))
    for _ in range(2):
        (state, ours), (wanted, theirs) = (zerojax.train_step(each, X) for each in (state, wanted))
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)


class Complexes(nnx.Module):
    """Complex state that depends on a device's rows."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros((), jnp.complex64))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean.set_value(jnp.mean(x) * (1 + 2j))
        return self.linear(x)


def test_complex_state_is_averaged_over_the_devices():
    state = create(Complexes, lambda model, x: jnp.mean(model(x) ** 2), ())
    state, _ = zerojax.train_step(state, X)
    for shard in state.model_state["mean"].addressable_shards:
        np.testing.assert_allclose(shard.data, X.mean() * (1 + 2j), rtol=1e-5)
