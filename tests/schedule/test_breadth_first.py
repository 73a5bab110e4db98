"""Micro-batches in breadth: what ``map_microbatches`` computes, and models that make it hard."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import WIDTH, Block, Case, LinenBlock, regression_batch, squared_error
from flax import linen, nnx

import zerojax
from zerojax.errors import ZeroError
from zerojax.schedule.breadth_first import map_microbatches
from zerojax.schedule.unit import refuse_mapped

MICRO = 3
BREADTH: dict[str, Any] = {"accumulate": MICRO, "accumulate_order": "breadth"}


def body(weights: Any, x: jax.Array, shared: Any) -> tuple[jax.Array, jax.Array]:
    """Integers go in and out, and an argument that all micro-batches share gets a gradient."""
    scale, shift = shared
    y = jnp.tanh(x @ weights["w"]) * scale + weights["b"]
    return y, jnp.argmax(y, axis=-1) + shift


def body_arguments() -> tuple[Any, jax.Array, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {"w": jax.random.normal(keys[0], (5, 4)), "b": jax.random.normal(keys[1], (4,))}
    return weights, jax.random.normal(keys[2], (MICRO, 2, 5)), (jnp.float32(1.5), jnp.int32(7))


def test_one_after_another_is_a_map_with_summed_gradients():
    args = body_arguments()
    run = map_microbatches(jax.checkpoint(body), (True, (False, False)))
    plain = jax.vmap(body, in_axes=(None, 0, None))
    for found, wanted in zip(jax.jit(run)(*args), jax.jit(plain)(*args), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)

    def loss(run: Any, weights: Any, x: jax.Array, scale: jax.Array) -> jax.Array:
        y, index = run(weights, x, (scale, args[2][1]))
        return jnp.sum(jnp.sin(y) * index[..., None])

    weights, x, (scale, _) = args
    found, wanted = (
        jax.jit(jax.grad(functools.partial(loss, one), argnums=(0, 1, 2)))(weights, x, scale)
        for one in (run, plain)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


def test_gradients_of_weights_are_summed_in_fp32():
    """1,000 times 1/1000 on top of 1 is 2; in bf16 it stays 1."""
    given = jnp.concatenate([jnp.ones(1), jnp.full(1000, 1e-3)]).astype(jnp.bfloat16)
    run = map_microbatches(lambda w, x: w * x, (True,))
    found = jax.grad(lambda w: jnp.sum(run(w, given)))(jnp.bfloat16(1))
    assert found.dtype == jnp.bfloat16
    assert float(found) == pytest.approx(2, rel=0.01)


class Counting(nnx.Module):
    """A residual layer that keeps a running mean of what it saw, and how often it was called."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH))
        self.calls = nnx.BatchStat(jnp.int32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * x.mean(0)
        self.calls[...] = self.calls[...] + 1
        return x + jnp.tanh(self.linear(x))


class Dropping(nnx.Module):
    """A layer with dropout and nothing else but a bias."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.bias = nnx.Param(jnp.ones(WIDTH))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(x + self.bias[...])


class Constant(nnx.Module):
    """A unit that is given nothing of the batch."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,)))

    def __call__(self, scale: jax.Array) -> jax.Array:
        return self.table[...] * scale


class Model(nnx.Module):
    """Something between a layer of no unit and a mean."""

    def __init__(self, run: Any, layer: Any, *, rngs: nnx.Rngs):
        self.run = run
        self.inner = layer(rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.run(self.inner, x))


def stack(layer: Any, *, rngs: nnx.Rngs) -> zerojax.Stack:
    return zerojax.Stack(layer, 2, rngs=rngs)


def case(layer: Any, run: Any = lambda inner, x: inner(x), units: tuple[type, ...] = ()) -> Case:
    def make(rngs: nnx.Rngs) -> Model:
        return Model(run, layer, rngs=rngs)

    return Case(make, squared_error, units, regression_batch)


@pytest.mark.parametrize(
    ("layer", "units"),
    [
        pytest.param(Counting, (Counting,), marks=pytest.mark.slow),
        (functools.partial(stack, Counting), ()),
    ],
    ids=["unit", "stack"],
)
def test_state_is_the_mean_over_micro_batches_as_it_is_over_devices(layer, units):
    made = case(layer, units=units)
    batch = made.batches(2 * MICRO, 1)[0]
    state = made.create(optax.sgd(0.0), nodes=2, local=1, **BREADTH)
    state, _ = zerojax.train_step(state, batch)
    one = made.create(optax.sgd(0.0), nodes=2, local=1)
    one, _ = zerojax.train_step(one, batch)
    assert state.model_state.keys() == one.model_state.keys()
    for name, value in state.model_state.items():
        np.testing.assert_allclose(value, one.model_state[name], rtol=1e-5, err_msg=name)


def test_every_micro_batch_draws_its_own_random_bits():
    """The rows are equal, and with equal masks the sums would be, too."""

    def loss(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        total = jnp.sum(model.inner(batch["x"]))
        return total, {"square": total**2}

    made = Case(case(functools.partial(stack, Dropping)).model, loss, (), regression_batch)
    state = made.create(optax.sgd(0.0), nodes=1, local=1, **BREADTH)
    rows = {"x": np.ones((MICRO, WIDTH), np.float32), "y": np.zeros(MICRO, np.float32)}
    _, metrics = zerojax.train_step(state, rows)
    assert metrics["square"] > 1.001 * metrics["loss"] ** 2


def in_checkpoint(inner: Any, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda x: inner(x))(x)


def of_a_constant(inner: Any, x: jax.Array) -> jax.Array:
    return x + inner(jnp.ones((1, WIDTH)))


@pytest.mark.parametrize(
    ("layer", "run", "units"),
    [
        pytest.param(functools.partial(stack, Block), in_checkpoint, (), marks=pytest.mark.slow),
        pytest.param(functools.partial(stack, Counting), of_a_constant, (), marks=pytest.mark.slow),
        (Constant, lambda inner, x: x + inner(jnp.float32(2)), (Constant,)),
    ],
    ids=["checkpoint", "stack of a constant", "unit of a constant"],
)
def test_it_learns_what_one_micro_batch_would(layer, run, units):
    made = case(layer, run, units)
    states = [made.create(optax.sgd(0.1), nodes=2, local=2, **options) for options in (BREADTH, {})]
    for batch in made.batches(4 * MICRO, 3):
        steps = [zerojax.train_step(state, batch) for state in states]
        states = [state for state, _ in steps]
        np.testing.assert_allclose(steps[0][1]["loss"], steps[1][1]["loss"], rtol=1e-5)
    assert states[0].spec.zero.passes == 1


class Mapped(linen.Module):
    """Two units side by side, as one that is mapped over its weights."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axes: Any = {"in_axes": None, "variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        both = linen.vmap(LinenBlock, axis_size=2, **axes)()
        return linen.Dense(1)(both(x).sum(0))


def test_a_unit_mapped_over_its_own_weights_is_refused():
    refuse_mapped([{"w": False}, (False,)])
    made = Case(Mapped(), squared_error, (LinenBlock,), regression_batch, linen=True)
    state = made.create(optax.sgd(0.1), nodes=2, local=1, **BREADTH)
    with pytest.raises(ZeroError, match=r'over its own weights.*set accumulate_order="depth"'):
        zerojax.train_step(state, made.batches(2 * MICRO, 1)[0])
