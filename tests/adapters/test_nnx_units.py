"""What an NNX module may keep beside floating-point parameters, in a unit and outside."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.train.step import trace_train_step

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


def create(
    model: Any, loss: Any, units: tuple[type, ...], make: Any = zerojax.TrainState.create, **zero: Any
) -> zerojax.TrainState:
    config = zerojax.ZeroConfig(compute_dtype="float32", units=units, **zero)
    return make(model, optax.sgd(1.0), loss, mesh=zerojax.make_mesh(2, 2), zero=config)


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
    loss, gradients = jax.jit(jax.value_and_grad(by_hand))(before, x)
    state, metrics = zerojax.train_step(state, X)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    jax.tree.map(
        lambda start, end, grad: np.testing.assert_allclose(start - end, grad, rtol=1e-4, atol=1e-5),
        before, zerojax.gather_params(state), gradients,
    )  # fmt: skip


class Loss(nnx.Variable):
    """A value of one call."""


class Losing(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.size = Loss(jnp.mean(x**2))
        return self.linear(x)


def test_a_variable_that_a_step_makes_and_leaves_in_the_model_is_refused():
    def left(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x))

    def popped(model: Any, x: jax.Array) -> jax.Array:
        return left(model, x) + sum(jax.tree.leaves(nnx.pop(model, Loss)))

    state = create(Losing, popped, (Losing,))
    kernel = zerojax.gather_params(state)["linear"]["kernel"]
    _, metrics = zerojax.train_step(state, X)
    np.testing.assert_allclose(metrics["loss"], np.mean(X @ kernel) + np.mean(X**2), rtol=1e-5)
    with pytest.raises(zerojax.ZeroError, match="'size' in a step, but not when it was created"):
        trace_train_step(create(Losing, left, (Losing,), zerojax.TrainState.abstract), X)


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
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.last: float | jax.Array = 0.0

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


class Forgetful(nnx.Module):
    """It assigns to its weight, itself or within a transformation, or is only passed through one.

    It counts its calls, and overrides a method of Flax's own, as ``nnx.bridge.ToNNX`` does.
    """

    def __init__(self, how: str, *, rngs: nnx.Rngs):
        self.linear, self.how, self.calls = nnx.Linear(4, 4, rngs=rngs), how, nnx.Variable(0)

    def _setattr(self, name: str, value: Any) -> None:
        super()._setattr(name, value)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls.set_value(self.calls.get_value() + 1)

        def call(linear: nnx.Linear, x: jax.Array) -> jax.Array:
            if self.how != "passed on":
                linear.kernel[...] = 0.9 * linear.kernel[...]
            return linear(x)

        run = call if self.how == "assigned" else nnx.remat(call)
        return run(self.linear, x)


@pytest.mark.parametrize("how", ["assigned", "assigned in remat", "passed on"])
@pytest.mark.parametrize("stack", [False, True])
def test_an_assignment_to_a_weight_that_a_unit_would_lose_is_refused(stack, how):
    def model(rngs: nnx.Rngs) -> Network:
        block = functools.partial(Forgetful, how)
        return Network(rngs, lambda rngs: zerojax.Stack(block, 2, rngs=rngs) if stack else block(rngs=rngs))

    state = create(model, lambda model, x: jnp.mean(model(x)), () if stack else (Forgetful,))
    if how == "passed on":
        trace_train_step(state, X)
        return
    with pytest.raises(zerojax.ZeroError, match="unit Forgetful assigned to the weight 'linear/kernel'"):
        zerojax.train_step(state, X)


class Normed(nnx.Module):
    """A layer whose weight another one normalises in each call."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.SpectralNorm(self.linear, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.norm(x, update_stats=True)


@pytest.mark.parametrize("units", [(), (Normed,)])
def test_a_weight_that_is_normalised_may_have_two_names(units):
    def model(rngs: nnx.Rngs) -> Network:
        return Network(rngs, Normed)

    trace_train_step(create(model, mean_square, units, zerojax.TrainState.abstract), X)


class WeightNormed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.WeightNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.norm(x))


@pytest.mark.parametrize("units", [(), (WeightNormed,)])
def test_weight_norm_differentiates_and_keeps_the_weight_before_it(units):
    """Plain NNX would overwrite the weight by the normalised one."""
    state = create(WeightNormed, mean_square, units)
    before = jax.tree.map(jnp.asarray, zerojax.gather_params(state)["norm"])

    def loss(weights: Any) -> jax.Array:
        kernel, (scale,) = weights["layer_instance"]["kernel"], jax.tree.leaves(weights["scales"])
        normalised = scale * kernel / jnp.linalg.norm(kernel, axis=0)
        return jnp.mean(jnp.tanh(X @ normalised + weights["layer_instance"]["bias"]) ** 2)

    grads = jax.tree.leaves(jax.grad(loss)(before))
    state, _ = zerojax.train_step(state, X)
    after = jax.tree.leaves(zerojax.gather_params(state)["norm"])
    for old, new, grad in zip(jax.tree.leaves(before), after, grads, strict=True):
        np.testing.assert_allclose(new, old - grad, rtol=1e-5, atol=1e-7)


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


@pytest.mark.slow
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


class Scanned(nnx.Module):
    """A block for ``nnx.vmap``, with a plain array."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.mask = nnx.Linear(4, 4, rngs=rngs), jnp.arange(4.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(x)) * self.mask


class Vmapped(nnx.Module):
    """Flax's usual stack, run in three ways."""

    def __init__(self, *, rngs: nnx.Rngs, out_axes: Any = 0):
        make = nnx.split_rngs(splits=3)(nnx.vmap(Scanned, out_axes=out_axes))
        self.layers = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        scanned = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        each = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
        x = each(self.layers, scanned(x, self.layers)).mean(0)
        graph, state = nnx.split(self.layers)
        return jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, state)[0]


def mean_square(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def assert_trains_as_flax_does(state: zerojax.TrainState) -> None:
    """One step of SGD with a rate of 1 against the gradient of the gathered model."""
    graph, params, rest = nnx.split(zerojax.gather_model(state), nnx.Param, ...)

    def loss(params: Any) -> jax.Array:
        return state.spec.loss_fn(nnx.merge(graph, params, rest, copy=True), jnp.asarray(X))

    wanted, gradients = jax.jit(jax.value_and_grad(loss))(params)
    wanted_params = jax.tree.map(lambda x, gradient: x - gradient, params, gradients)
    state, metrics = zerojax.train_step(state, X)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    after = nnx.state(zerojax.gather_model(state), nnx.Param)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), after, wanted_params)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_block_made_by_nnx_vmap_is_a_unit_of_layers(stage):
    state = create(Vmapped, mean_square, (Scanned,), stage=stage)
    assert {(leaf.stack, leaf.shape) for leaf in state.spec.leaves} == {((3,), (4, 4)), ((3,), (4,))}
    assert not hasattr(cast(Any, zerojax.gather_model(state)).layers, "_zerojax_shapes")
    assert_trains_as_flax_does(state)


def test_blocks_that_nnx_vmap_stacks_otherwise_are_refused():
    def calling_all(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.layers(x))

    with pytest.raises(zerojax.ZeroError, match=r"unit Scanned was created by nnx.vmap, as a stack of 3"):
        trace_train_step(create(Vmapped, calling_all, (Scanned,), zerojax.TrainState.abstract), X)
    for out_axes in (1, nnx.StateAxes({nnx.PathContains("bias"): None, ...: 0})):
        with pytest.raises(zerojax.ZeroError, match=r"unit 'layers' was created by nnx.vmap, and not all"):
            create(lambda rngs, axes=out_axes: Vmapped(rngs=rngs, out_axes=axes), mean_square, (Scanned,))

    def of_stacks(rngs: nnx.Rngs) -> nnx.Module:
        make = nnx.vmap(lambda rngs: zerojax.Stack(linear, 2, rngs=rngs))
        return Network(rngs, lambda rngs: nnx.split_rngs(splits=3)(make)(rngs))

    with pytest.raises(zerojax.ZeroError, match=r"the Stack 'unit' was created by nnx.vmap"):
        create(of_stacks, mean_square, ())


def test_a_stack_that_was_created_before_is_no_unit_of_layers():
    """Without a name for its class it works; what creates it elsewhere is not seen."""
    before = Vmapped(rngs=nnx.Rngs(0))
    trace_train_step(create(lambda rngs: before, mean_square, (), zerojax.TrainState.abstract), X)
    with pytest.raises(zerojax.ZeroError, match=r"at .*test_nnx_units.*must be created in model\(rngs\)"):
        trace_train_step(create(lambda rngs: before, mean_square, (Scanned,), zerojax.TrainState.abstract), X)


class Noisy(nnx.Module):
    """Keeps the rngs that it is given, not a fork of them."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.rngs = rngs

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.random.normal(self.rngs(), x.shape)


def test_a_blocks_rngs_need_no_fork_in_a_stack():
    """Each layer draws from keys of its own, those of nnx.split_rngs."""
    stack = zerojax.Stack(Noisy, 3, rngs=nnx.Rngs(7))
    keys = jax.random.split(nnx.Rngs(7)(), 3)
    wanted = sum(jax.random.normal(jax.random.fold_in(key, 0), (2, 4)) for key in keys)
    np.testing.assert_allclose(stack(jnp.zeros((2, 4))), wanted, rtol=1e-6)


class Slashes(nnx.Module):
    """Two variables of one name."""

    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Dict(b=nnx.Variable(jnp.zeros(2)))
        self.c = nnx.Dict({"b/d": nnx.Variable(jnp.ones(2)), "b": nnx.Dict(d=nnx.Variable(jnp.zeros(2)))})
        self.linear = nnx.Linear(4, 4, rngs=rngs)


def test_variables_of_one_name_are_refused():
    with pytest.raises(zerojax.ZeroError, match=r"'c', 'b'.*rename the variable or module that has a \"/\""):
        create(Slashes, mean_square, (), zerojax.TrainState.abstract)


class Holding(nnx.Module):
    """A layer whose variables hold pytrees and numbers, and that returns more than arrays."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear, self.mask = nnx.Linear(4, 4, rngs=rngs), jnp.arange(4.0)
        self.gains = nnx.Param({"of": (jnp.ones(4), 0.5)})
        self.seen = nnx.Variable({"calls": 0, "more": (jnp.zeros(4), None)})

    def __call__(self, x: jax.Array) -> Any:
        (gain, scale), seen = self.gains.get_value()["of"], cast(Any, self.seen.get_value())
        self.seen.set_value({"calls": seen["calls"] + 1, "more": (seen["more"][0] + 2, None)})
        return x + self._scaled(jnp.tanh(self.linear(x)) * gain) * scale, "name", True, {"shift": 0.25}

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x * self.mask


class Holder(nnx.Module):
    """Uses what is not an array as Python does, and a method that begins with "_"."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.unit = Holding(rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y, name, flag, rest = self.unit(x)
        return self.unit._scaled(y) if flag and name == "name" and rest["shift"] == 0.25 else x


@pytest.mark.parametrize("units", [(), (Holding,)])
def test_variables_hold_pytrees_and_units_return_more_than_arrays(units):
    state = create(Holder, mean_square, units)
    assert_trains_as_flax_does(state)
    state, _ = zerojax.train_step(create(Holder, mean_square, units), X)
    seen = cast(Any, zerojax.gather_model(state)).unit.seen.get_value()
    assert seen["calls"] == 1
    assert seen["more"][1] is None
    np.testing.assert_array_equal(seen["more"][0], 2)


class Compiled(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    @nnx.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(x))


def test_a_unit_may_compile_its_method():
    assert_trains_as_flax_does(create(lambda rngs: Network(rngs, Compiled), mean_square, (Compiled,)))


class Reading(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, how: str):
        self.linear, self.how = nnx.Linear(4, 4, rngs=rngs), how
        if how == "float":
            self.largest = float(self.linear.kernel[...].max())
        elif how == "if" and self.linear.kernel[0, 0] > 0:
            self.positive = True
        elif how == "list":
            self.tables = nnx.data([jnp.ones(2)])
        self.name = nnx.Variable("name" if how == "str" else 0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("float", r"reads the value of an array at .*test_nnx_units.py:\d+, .*jnp.where"),
        ("if", r"reads the value of an array at .*test_nnx_units.py"),
        ("str", "the variable 'name' holds a str, .*plain attribute"),
        ("list", "the attribute 'tables' of Reading is a list of arrays.*make it an nnx.List"),
    ],
)
def test_a_factory_that_cannot_be_traced(how, message):
    with pytest.raises(zerojax.ZeroError, match=message):
        create(lambda rngs: Reading(rngs, how), mean_square, ())
