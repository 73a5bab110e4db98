import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.errors import ConfigurationError

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


@pytest.mark.parametrize("order", [pytest.param("depth", marks=pytest.mark.slow), "breadth"])
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


class Load(nnx.Variable):
    """What a layer says of its load, as a router does."""


class Loaded(nnx.Module):
    """A layer whose loss has parts beside its activations: a variable that it updates, and what it sows."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.load = Load(jnp.zeros(()))

    def __call__(self, x: jax.Array, *, factor: jax.Array) -> jax.Array:
        y = jnp.tanh(self.linear(x))
        self.load.set_value(self.load.get_value() ** 2 / len(x) + factor * jnp.sum(y**2))
        self.sow(nnx.Intermediate, "fourth", jnp.sum(factor * y**4))
        return x + y


class TwiceLoaded(nnx.Module):
    """A stack that is called twice: the second call reads the state that the first leaves."""

    def __init__(self, rngs: nnx.Rngs):
        self.stack = zerojax.Stack(Loaded, 4, rngs=rngs)
        self.factors = nnx.Param(jnp.array([1.0, -0.5, 2.0, 0.3]))

    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = self.stack(x, by_layer={"factor": self.factors[...]})
        return x


def total(model: TwiceLoaded, x: jax.Array) -> jax.Array:
    """A sum over activations, variables and what is sown, of a copy: its state changes within a ``vmap``."""
    graph, state = nnx.split(model)
    model = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
    x, sown = nnx.capture(model, nnx.Intermediate)(x)
    parts = [*jax.tree.leaves(sown), *jax.tree.leaves(nnx.state(model, Load))]
    return jnp.sum(x**2) + jnp.sum(jnp.stack([jnp.sum(part) for part in parts]))


def total_by_hand(weights: Any, x: jax.Array) -> jax.Array:
    """The same, layer by layer."""
    linear, factors = weights["stack"]["block"]["linear"], weights["factors"]
    loads, fourth = [jnp.zeros(()) for _ in factors], jnp.zeros(())
    for _ in range(2):
        for i, factor in enumerate(factors):
            y = jnp.tanh(x @ linear["kernel"][i] + linear["bias"][i])
            loads[i] = loads[i] ** 2 / len(x) + factor * jnp.sum(y**2)
            fourth += jnp.sum(factor * y**4)
            x = x + y
    return jnp.sum(x**2) + fourth + jnp.sum(jnp.stack(loads))


def value_of(total: Any, model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(lambda row: total(model, row[None]))(x))


def slope_of(total: Any, model: Any, x: jax.Array) -> jax.Array:
    """The mean square of a gradient with respect to the rows, each taken by itself."""
    return jnp.mean(jax.vmap(lambda row: jnp.sum(jax.grad(total, 1)(model, row[None]) ** 2))(x))


@pytest.mark.parametrize(
    ("loss", "zero"),
    [
        pytest.param(value_of, {}, marks=pytest.mark.slow),
        (value_of, {"hpz": True, "remat": "none", "accumulate": 2}),
        pytest.param(value_of, {"accumulate": 2, "accumulate_order": "breadth"}, marks=pytest.mark.slow),
        pytest.param(slope_of, {}, marks=pytest.mark.slow),
    ],
)
def test_gradients_flow_through_state_and_what_differs_by_layer(loss, zero):
    """Through a variable that the layers update, through what they sow, and into ``by_layer``."""
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    state = zerojax.TrainState.create(
        TwiceLoaded,
        optax.sgd(1.0),
        lambda model, x: loss(total, model, x),
        mesh=zerojax.make_mesh(2, 2),
        zero=zerojax.ZeroConfig(compute_dtype="float32", **zero),
    )
    weights = zerojax.gather_params(state)
    by_hand = jax.jit(jax.value_and_grad(lambda weights: loss(total_by_hand, weights, x)))
    expected, gradients = by_hand(weights)
    state, metrics = zerojax.train_step(state, x)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    found = jax.tree.map(jnp.subtract, weights, zerojax.gather_params(state))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
        assert jnp.linalg.norm(ours - theirs) < 1e-4 * jnp.linalg.norm(theirs)


class Giving(nnx.Module):
    """A layer whose product later layers read."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        made = self.linear(x[0])
        return x[0] + jnp.tanh(made), made


class Reading(nnx.Module):
    """A layer that reads an earlier layer's product, in place of one of its own."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (4,)))

    def __call__(self, x: jax.Array, read: jax.Array) -> jax.Array:
        return x + jnp.sin(self.scale[...] * read * x)


class InTwoParts(nnx.Module):
    """The last three layers read the product of the second."""

    def __init__(self, rngs: nnx.Rngs):
        blocks = [Giving, Giving, Reading, Reading, Reading]
        self.stack = zerojax.Stack(blocks, 5, rngs=rngs, parts=[2, 3])

    def __call__(self, x: jax.Array) -> jax.Array:
        x, read = self.stack((x, jnp.zeros_like(x)), part=0)
        return self.stack(x, read, part=1)


def in_two_parts_by_hand(weights: Any, x: jax.Array) -> jax.Array:
    giving, reading = (weights["stack"][name]["block"] for name in "02")
    made = x
    for kernel, bias in zip(giving["linear"]["kernel"], giving["linear"]["bias"], strict=True):
        made = x @ kernel + bias
        x = x + jnp.tanh(made)
    for scale in reading["scale"]:
        x = x + jnp.sin(scale * made * x)
    return x


@pytest.mark.parametrize(
    "zero",
    [
        {},
        pytest.param(
            {"remat": "none", "accumulate": 2, "accumulate_order": "breadth"}, marks=pytest.mark.slow
        ),
        pytest.param({"host": ("optimizer",), "update_in_backward": True}, marks=pytest.mark.slow),
    ],
)
def test_results_of_some_layers_are_arguments_of_later_ones(zero: dict[str, Any]):
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    tx = optax.adam(0.1)
    state = zerojax.TrainState.create(
        InTwoParts,
        tx,
        lambda model, x: jnp.mean(model(x) ** 2),
        mesh=zerojax.make_mesh(2, 2),
        zero=zerojax.ZeroConfig(compute_dtype="float32", **zero),
    )
    before = zerojax.gather_params(state)
    loss = jax.value_and_grad(lambda weights: jnp.mean(in_two_parts_by_hand(weights, jnp.asarray(x)) ** 2))

    @jax.jit
    def step(weights: Any) -> Any:
        expected, gradients = loss(weights)
        updates, _ = tx.update(gradients, tx.init(weights), weights)
        return expected, optax.apply_updates(weights, updates)

    expected, wanted = step(before)
    state, metrics = zerojax.train_step(state, x)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, atol=2e-4)
    jax.tree.map(close, zerojax.gather_params(state), wanted)


@pytest.mark.parametrize("parts", [[1, 4], [2, 2], [2, 0, 3], []])
def test_parts_of_a_stack_have_all_layers_of_their_kinds(parts: list[int]):
    with pytest.raises(ConfigurationError, match=r"layers of the kinds \(0, 0, 1, 1, 1\): give numbers"):
        zerojax.Stack([Giving, Giving, Reading, Reading, Reading], 5, rngs=nnx.Rngs(0), parts=parts)


def test_all_parts_run_one_after_the_other():
    one, other = functools.partial(Scaled), functools.partial(Scaled)
    stack = zerojax.Stack([one, one, other], 3, rngs=nnx.Rngs(0), parts=[2, 1])
    x, by_layer = jnp.ones((2, 4)), {"factor": jnp.asarray(FACTORS), "on": jnp.ones(3, bool)}
    alone = stack(stack(x, by_layer=by_layer, part=0), by_layer=by_layer, part=1)
    np.testing.assert_array_equal(stack(x, by_layer=by_layer), alone)
