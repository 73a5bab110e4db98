"""Branches and loops around units: right where devices go the same way, refused where they may not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import WIDTH, Block
from flax import linen, nnx
from jax import lax

import zerojax
from zerojax.train.step import trace_train_step

X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
BATCH = {"x": X, "deep": zerojax.Replicated(np.int32(1))}
AXES = ("node", "local")
SGD = optax.sgd(0.1)


class Deep(nnx.Module):
    """A unit and a stack, a statistic of the data, and random bits."""

    def __init__(self, rngs: nnx.Rngs):
        self.unit, self.stack = Block(rngs=rngs), zerojax.Stack(Block, 2, rngs=rngs)
        self.gate, self.mean = nnx.Param(jnp.ones(())), nnx.BatchStat(jnp.zeros(()))
        self.rngs = rngs.fork()


class LinenUnit(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(WIDTH)(x)


class LinenDeep(linen.Module):
    mine: bool

    @linen.compact
    def __call__(self, x, deep):
        unit = LinenUnit()
        if self.is_initializing():
            return unit(x)
        deep = x.sum() > 0 if self.mine else deep > 0
        return linen.cond(deep, lambda m, x: unit(x), lambda m, x: x, self, x)


def created(loss: Any, make: Any = zerojax.TrainState.abstract, model: Any = Deep, **zero: Any) -> Any:
    units = (Block,) if model is Deep else (LinenUnit,)
    config = zerojax.ZeroConfig(compute_dtype="float32", units=units, **zero)
    sample = None if model is Deep else BATCH
    return make(model, SGD, loss, mesh=zerojax.make_mesh(2, 4), zero=config, sample_batch=sample)


def traced(run: Any, **zero: Any) -> None:
    """Trace a step whose loss is of ``run(model, x, deep)``; nothing is compiled."""
    trace_train_step(created(lambda m, b: jnp.mean(run(m, b["x"], b["deep"]) ** 2), **zero), BATCH)


def random(m):
    return jax.random.bernoulli(m.rngs(), 0.5)


def same(x):
    return x


REFUSED = {
    "rows": lambda m, x, deep: lax.cond(x.sum() > 0, m.unit, same, x),
    "random bits": lambda m, x, deep: lax.cond(random(m), m.unit, same, x),
    "nnx.cond": lambda m, x, deep: nnx.cond(x[0, 0] > 0, lambda m, x: m(x), lambda m, x: x, m.unit, x),
    "switch": lambda m, x, deep: lax.switch(jnp.argmax(x[0]), [same, m.stack, m.unit], x),
    "in a scan": lambda m, x, deep: lax.scan(
        lambda c, x: (lax.cond(c.sum() > 0, m.unit, same, c) + x, None), jnp.zeros_like(x), x[None]
    )[0],
    "a sum over a node": lambda m, x, deep: lax.cond(lax.psum(x, "local").sum() > 0, m.unit, same, x),
    "own collective": lambda m, x, deep: lax.cond(x.sum() > 0, lambda x: lax.pmean(x, AXES), same, m.unit(x)),
    "jit": lambda m, x, deep: jax.jit(lambda x: lax.cond(x.sum() > 0, m.unit, same, x))(x),
    "in a solver": lambda m, x, deep: lax.custom_linear_solve(
        lambda x: x, m.unit(x), lambda _, b: lax.cond(x.sum() > 0, lambda b: lax.pmean(b, AXES), same, b)
    ),
    "own number": lambda m, x, deep: lax.cond(lax.axis_index("node") == 0, m.unit, same, x),
}
ACCEPTED = {
    "static": lambda m, x, deep: m.unit(x) if x.shape[0] == 2 else x,
    "a scalar of the batch": lambda m, x, deep: lax.cond(deep > 0, m.unit, same, x),
    "a weight": lambda m, x, deep: lax.cond(m.gate[...] > 0, m.unit, same, x),
    "state": lambda m, x, deep: lax.cond(m.mean[...] > 0, m.unit, same, x),
    "largest": lambda m, x, deep: lax.cond(lax.pmax(x.sum(), AXES) > 0, m.unit, same, x),
    "all rows": lambda m, x, deep: lax.cond(lax.all_gather(x, AXES).sum() > 0, m.unit, same, x),
    "scan": lambda m, x, deep: lax.scan(lambda c, _: (m.unit(c), None), x, None, 3)[0],
    "fori_loop": lambda m, x, deep: lax.fori_loop(0, 3, lambda i, c: m.unit(c), x),
    "without a unit": lambda m, x, deep: m.unit(lax.cond(x.sum() > 0, jnp.tanh, same, x)),
    "where": lambda m, x, deep: jnp.where(x.sum() > 0, m.unit(x), x),
}


@pytest.mark.parametrize("run", REFUSED.values(), ids=REFUSED)
def test_a_condition_of_a_devices_own_is_refused(run):
    with pytest.raises(zerojax.ZeroError, match=r"test_branches.py:\d+ has a unit or a collective in it"):
        traced(run)


@pytest.mark.parametrize("run", ACCEPTED.values(), ids=ACCEPTED)
def test_a_condition_that_is_equal_everywhere_is_not(run):
    traced(run)


def test_units_that_do_not_communicate_may_branch():
    traced(REFUSED["rows"], stage=1)
    with pytest.raises(zerojax.ZeroError, match="has a unit"):
        traced(REFUSED["rows"], stage=2)  # the backward pass does


def test_state_differs_from_the_second_micro_batch_on():
    def run(m, x, deep):
        y = ACCEPTED["state"](m, x, deep)
        m.mean.set_value(jnp.mean(x))
        return y

    traced(run)
    with pytest.raises(zerojax.ZeroError, match="has a unit"):
        traced(run, accumulate=2)


@pytest.mark.parametrize("mine", [False, True])
def test_linen(mine):
    def loss(model, batch):
        return jnp.mean(model(batch["x"], batch["deep"]) ** 2)

    state = created(loss, model=LinenDeep(mine))
    if mine:
        with pytest.raises(zerojax.ZeroError, match=r"cond or switch at .*test_branches.py"):
            trace_train_step(state, BATCH)
    else:
        trace_train_step(state, BATCH)


def test_a_loop_as_long_as_any_device_needs_it():
    def deep(model, x, longest):
        def more(carry):
            return longest(jnp.max(carry)) < 4.0

        return jnp.mean(lax.while_loop(more, lambda x: model.unit(x) + 0.5, x))

    state = created(lambda m, b: deep(m, b["x"], lambda x: lax.pmax(x, AXES)), zerojax.TrainState.create)
    wanted = deep(zerojax.gather_model(state), X, same)
    np.testing.assert_allclose(zerojax.eval_step(state, BATCH)["loss"], wanted, rtol=1e-5)
    with pytest.raises(zerojax.ZeroError, match=r"jax.lax.while_loop at .*test_branches.py"):
        zerojax.eval_step(state, BATCH, lambda m, b: deep(m, b["x"], same))


@pytest.mark.parametrize("chosen", [0, 1])
def test_a_layer_that_all_devices_drop_or_none(chosen):
    def loss(model, batch):
        return jnp.mean(lax.cond(batch["deep"] > 0, model.unit, same, batch["x"]) ** 2)

    state = created(loss, zerojax.TrainState.create)
    model = zerojax.gather_model(state)
    wanted = jnp.mean((model.unit(X) if chosen else X) ** 2)
    _, metrics = zerojax.train_step(state, BATCH | {"deep": np.int32(chosen)})
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    assert (metrics["grad_norm"] > 0) == bool(chosen)
