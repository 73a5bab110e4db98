"""A unit's weights read outside its calls: refused in words, whichever way a Flax user reads them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import WIDTH, Block
from flax import linen, nnx

import zerojax
from zerojax.train.step import trace_train_step

X = np.ones((16, WIDTH), np.float32)
SGD = optax.sgd(0.1)  # one for all, which is checked once with each model


class Model(nnx.Module):
    """A unit and a stack."""

    def __init__(self, rngs: nnx.Rngs):
        self.unit = Block(rngs=rngs)
        self.stack = zerojax.Stack(Block, 2, rngs=rngs)

    def __call__(self, x):
        return self.stack(self.unit(x))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(WIDTH)(x)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        return LinenBlock()(x)


def params(model):
    return nnx.state(model, nnx.Param)


def leaves(model):
    return jax.tree.leaves(params(model))


def traced(loss, stage: Any = 3, model: Any = Model, units=(Block,), **arguments):
    """Trace a step, as its first call does; nothing is compiled."""
    zero = zerojax.ZeroConfig(stage=stage, units=units)
    mesh = zerojax.make_mesh(2, 4)
    state = zerojax.TrainState.abstract(model, SGD, loss, mesh=mesh, zero=zero, **arguments)
    return trace_train_step(state, X)


def mean_square(model, batch):
    return jnp.mean(model(batch) ** 2)


READS = {
    "norm of the tree": lambda m, x: optax.tree.norm(params(m)),
    "leaves of the module": lambda m, x: sum(jnp.sum(p**2) for p in jax.tree.leaves(m) if p.ndim > 1),
    "only the first leaf": lambda m, x: leaves(m)[0].sum(),
    "only floats": lambda m, x: sum(p.sum() for p in leaves(m) if jnp.issubdtype(p.dtype, jnp.floating)),
    "in a scan": lambda m, x: jax.lax.scan(lambda c, p: (c + optax.tree.norm(p), None), 0.0, params(m.stack))[
        0
    ],
    "carried by a scan": lambda m, x: jax.lax.scan(
        lambda c, _: ((c[1], c[1]), c[0].sum()), (leaves(m)[0], leaves(m)[0]), None, length=2
    )[1].sum(),
    "in a loop": lambda m, x: jax.lax.fori_loop(0, 2, lambda i, c: c + leaves(m)[0].sum(), 0.0),
    "in jit": lambda m, x: jax.jit(optax.tree.norm)(params(m)),
    "in a branch": lambda m, x: jax.lax.cond(True, optax.tree.norm, lambda p: 0.0, params(m)),
    "in remat": lambda m, x: jax.checkpoint(optax.tree.norm)(params(m)),
    "index": lambda m, x: jnp.sum(m.unit.up.kernel[...]),
    "value": lambda m, x: jnp.sum(m.unit.up.kernel.get_value() ** 2),
    "operator": lambda m, x: jnp.sum(m.unit.up.kernel**2),
    "function": lambda m, x: jnp.sum(m.unit.up.kernel),
    "matmul": lambda m, x: jnp.sum(x @ m.unit.up.kernel),
    "numpy": lambda m, x: jnp.sum(np.asarray(m.unit.up.kernel)),
    "a part of a unit": lambda m, x: jnp.sum(m.unit.up(x)),
    "a merged copy": lambda m, x: jnp.sum(nnx.merge(*nnx.split(m.unit.up))(x)),
    "gradient": lambda m, x: optax.tree.norm(nnx.grad(lambda m: mean_square(m, x))(m)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_is_refused_by_name(read):
    def loss(model, batch):
        return read(model, batch) + mean_square(model, batch)

    with pytest.raises(zerojax.ZeroError, match="sharded"):
        traced(loss)


@pytest.mark.parametrize("stage", [1, 2])
def test_it_is_refused_at_every_stage_with_units(stage):
    with pytest.raises(zerojax.ZeroError, match=r"'stack/block/.* is sharded .* read by .*test_weight_reads"):
        traced(lambda m, x: mean_square(m, x) + sum(jnp.sum(p**2) for p in leaves(m)), stage)


def halved(model, x):
    loss = mean_square(model, x)
    nnx.update(model.head, jax.tree.map(lambda w: 0.5 * w, nnx.state(model.head, nnx.Param)))
    return loss


def exchanged(model, x):
    model.norm.scale[...] = model.norm.bias[...]
    return mean_square(model, x)


def reset(model, x):
    model.unit.up.bias.set_value(jnp.zeros(()))
    return mean_square(model, x)


def element(model, x):
    model.unit.up.bias[0] = 1.0
    return mean_square(model, x)


def rematerialised(model, x):
    return jnp.mean(nnx.remat(lambda model, x: model(x))(model, x) ** 2)


def looped(model, x):
    def body(carry):
        return carry[0] + 1, carry[1], jax.lax.stop_gradient(carry[1](carry[2]))

    last = nnx.while_loop(lambda carry: carry[0] < 2, body, (0, model.norm, jax.lax.stop_gradient(x)))[2]
    return mean_square(model, x) + jnp.mean(jax.lax.stop_gradient(last))


def mapped(model, x):
    way = nnx.cond(x.sum() > 0, lambda layer, x: layer(x), lambda layer, x: -layer(x), model.head, model(x))
    return jnp.mean(nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(model.layers, way) ** 2)


def normalised(model, x):
    return jnp.mean(model.spectral(model(x)))


def copied(model, x):
    faster = nnx.clone(model.head)
    faster.kernel[...] = 2 * faster.kernel[...]
    return jnp.mean(faster(model(x)) ** 2)


class WithHead(Model):
    """Weights outside units, too, some of them of several layers."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.head, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.spectral = nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))(rngs.split(2))


@pytest.mark.parametrize(
    ("loss", "weight"),
    [(halved, "head/bias"), (exchanged, "norm/scale"), (reset, "unit/up/bias"), (element, "unit/up/bias")],
)
def test_an_assignment_to_a_weight_is_refused(loss, weight):
    """In plain Flax the model would keep it; here it was lost."""
    with pytest.raises(zerojax.ZeroError, match=f"'{weight}'"):
        traced(loss, model=WithHead)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible")  # in SpectralNorm itself
@pytest.mark.parametrize("loss", [rematerialised, looped, mapped, normalised, copied])
def test_transformations_that_return_the_weights_are_no_assignments(loss):
    traced(loss, model=WithHead)


def test_a_logged_norm_is_refused():
    with pytest.raises(zerojax.ZeroError, match="weight_sum"):
        traced(lambda m, x: (mean_square(m, x), {"norm": optax.tree.norm(params(m))}))


def test_a_weight_cannot_be_returned():
    def scalar(model):
        return next(x for x in leaves(model) if x.ndim == 0)

    with pytest.raises(zerojax.ZeroError, match="returned by the loss"):
        traced(lambda m, x: (mean_square(m, x), {"odd": scalar(m)}))


def test_evaluation_refuses_too():
    def loss(model, batch):
        return mean_square(model, batch) + optax.tree.norm(params(model))

    zero = zerojax.ZeroConfig(units=(Block,))
    mesh = zerojax.make_mesh(2, 4)
    state = zerojax.TrainState.create(Model, SGD, loss, mesh=mesh, zero=zero)
    with pytest.raises(zerojax.ZeroError, match="sharded"):
        zerojax.eval_step(state, X)


def test_linen_variables_are_refused():
    def loss(model, batch):
        return mean_square(model, batch) + optax.tree.norm(model.variables["params"])

    with pytest.raises(zerojax.ZeroError, match=r"'LinenBlock_0/Dense_0/.* is sharded"):
        traced(loss, model=LinenModel(), units=(LinenBlock,), sample_batch=X)


CALLS = {
    "checkpoint": lambda m, x: jax.checkpoint(lambda x: m(x))(x),
    "jit": lambda m, x: jax.jit(lambda x: m(x))(x),
    "nnx.remat": lambda m, x: nnx.remat(lambda m, x: m(x))(m, x),
    "nnx.jit": lambda m, x: nnx.jit(lambda m, x: m(x))(m, x),
    "nnx.cond": lambda m, x: nnx.cond(True, lambda m, x: m(x), lambda m, x: x, m, x),
    "nnx.vmap": lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x),
    "scan": lambda m, x: jax.lax.scan(lambda x, _: (m(x), None), x, None, length=2)[0],
    "merged": lambda m, x: nnx.merge(*nnx.split(m))(x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_transformed_calls_are_not_reads(call, stage):
    traced(lambda m, x: jnp.mean(call(m, x) ** 2), stage)


def test_what_belongs_to_no_unit_is_read_as_ever():
    """Weights outside units are whole while the loss runs."""

    class Both(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.unit, self.last = Block(rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, x):
            return self.last(self.unit(x))

    traced(lambda m, x: mean_square(m, x) + optax.tree.norm(params(m.last)), model=Both)


def tangent(model, batch):
    return jax.jvp(lambda x: mean_square(model, x), (batch,), (batch,))[1]


def curvature(model, batch):
    return jnp.sum(jax.hessian(lambda x: mean_square(model, x))(batch[:1]))


@pytest.mark.parametrize("loss", [tangent, curvature])
@pytest.mark.parametrize("model", [Model, lambda rngs: zerojax.Stack(Block, 2, rngs=rngs)])
def test_forward_mode_is_refused(loss, model):
    with pytest.raises(zerojax.ZeroError, match="use reverse mode"):
        traced(loss, model=model, units=() if model is not Model else (Block,))


def test_forward_mode_through_a_rule_of_the_users_is_left_to_jax():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (double(x), None), lambda _, grad: (2 * grad,))

    def loss(model, batch):
        return mean_square(model, batch) + jnp.sum(jax.jvp(double, (batch,), (batch,))[1])

    with pytest.raises(TypeError, match="forward-mode") as raised:
        traced(loss).lower()
    assert not isinstance(raised.value, zerojax.ZeroError)


def test_what_a_loss_does_with_its_weights_is_refused_with_a_way_out():
    def average(model, x):
        first, second = (nnx.state(layer, nnx.Param) for layer in (model.first, model.second))
        nnx.update(model.second, jax.tree.map(lambda a, b: 0.1 * a + 0.9 * b, first, second))
        return mean_square(model.second, x)

    def inner_step(model, x):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def inner(params):
            return mean_square(nnx.merge(graph, params, rest, copy=True).first, x)

        moved = jax.tree.map(lambda a, gradient: a - 0.1 * gradient, params, jax.grad(inner)(params))
        return inner(moved)

    class Two(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.first, self.second = Block(rngs=rngs), Block(rngs=rngs)

    combined = "combined the sharded weights.* classes of these units out of ZeroConfig.units"
    inner = "nnx.grad, MAML.* leave their classes out of ZeroConfig.units"
    for loss, message in ((average, combined), (inner_step, inner)):
        with pytest.raises(zerojax.ZeroError, match=message):
            traced(loss, model=Two)
    with pytest.warns(UserWarning, match="no unit is named"):
        traced(inner_step, model=Two, units=())


@pytest.mark.parametrize(
    "text", ["but got uint32", "Sharded('unit/up/kernel') of zerojax.schedule.unit.Sharded"]
)
def test_an_error_of_the_loss_function_itself_is_not_replaced(text):
    def loss(model, batch):
        mean_square(model, batch)
        raise ValueError(text)

    with pytest.raises(ValueError, match="^" + re.escape(text)) as raised:
        traced(loss)
    assert not isinstance(raised.value, zerojax.ZeroError)
