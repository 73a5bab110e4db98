"""Linen modules as others write them: names with slashes, random streams, boxes, setup, nested loops."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import WIDTH, regression_batch
from flax import linen
from plain_loop import by_path, distance, masters

import zerojax
from zerojax.run.checkpoints.canonical import from_canonical, to_canonical
from zerojax.sharding.param_tree import to_tree

RATE = 0.1
SGD = optax.sgd(RATE)
BATCH = regression_batch(np.random.default_rng(3), 8)


def squared_error(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


def create(
    model: linen.Module, units: tuple[type, ...], loss: Any = squared_error, mesh: Any = (1, 2), **zero: Any
) -> zerojax.TrainState:
    return zerojax.TrainState.create(
        model,
        SGD,
        loss,
        mesh=zerojax.make_mesh(*mesh),
        zero=zerojax.ZeroConfig(compute_dtype="float32", units=units, **zero),
        sample_batch=BATCH,
    )


def variables_of(model: linen.Module, state: zerojax.TrainState) -> dict[str, Any]:
    """Copies of a state's values, where Flax has them."""
    shapes = linen.unbox(jax.eval_shape(functools.partial(model.init, jax.random.key(0)), BATCH["x"]))
    rest = {path: state.model_state["/".join(path)] for path in by_path(shapes) if path[0] != "params"}
    variables = to_tree(rest) | {"params": masters(state)}
    return jax.tree.map(lambda x: jnp.array(x, copy=True), variables)


def check_training(state: zerojax.TrainState, model: linen.Module) -> zerojax.TrainState:
    """Compare two steps with Flax's; what the module keeps must not depend on a device's rows."""
    variables = variables_of(model, state)

    @jax.jit
    def step(variables: Any) -> Any:
        def loss(params: Any) -> Any:
            box: list[Any] = [{**variables, "params": params}]

            def call(x: Any) -> Any:
                kept = [name for name in box[0] if name != "params"]
                out, changed = model.apply(box[0], x, mutable=kept, rngs={"params": jax.random.key(0)})
                box.append({**box.pop(), **changed})
                return out

            return squared_error(call, BATCH), box[-1]

        (value, after), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        return value, after | {"params": jax.tree.map(lambda w, g: w - RATE * g, variables["params"], grads)}

    for _ in range(2):
        wanted, variables = step(variables)
        state, metrics = zerojax.train_step(state, BATCH)
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    assert distance(masters(state), variables["params"]) < 1e-5
    found = by_path(variables_of(model, state))
    for path, x in by_path(variables).items():
        np.testing.assert_allclose(found[path], x, rtol=1e-5, atol=1e-6, err_msg=str(path))
    return state


class Spectral(linen.Module):
    """A unit whose names have slashes: those of its own weight, of a module, and of Flax's variables."""

    @linen.compact
    def __call__(self, x):
        gain = self.param("by/feature", linen.initializers.ones, (WIDTH,))
        dense = linen.Dense(WIDTH, name="inner/dense")
        return x + gain * linen.SpectralNorm(dense)(x, update_stats=True)


class Spectrals(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.SpectralNorm(linen.Dense(WIDTH))(x, update_stats=True)
        return linen.Dense(1)(Spectral()(x))


@pytest.mark.slow
def test_names_with_slashes_survive_steps_and_checkpoints():
    model = Spectrals()
    state = create(model, (Spectral,), precise=(("*by/feature", "float32"),))
    assert "batch_stats/Spectral_0/SpectralNorm_0/inner/dense/kernel/u" in state.model_state
    assert "Spectral_0/by/feature" in {leaf.name for leaf in state.spec.leaves}
    state = check_training(state, model)
    other = from_canonical(create(model, (Spectral,), stage=2, mesh=(2, 1)), to_canonical(state))
    assert distance(masters(other), masters(state)) == 0
    for name, x in state.model_state.items():
        np.testing.assert_array_equal(other.model_state[name], x, err_msg=name)


class Names(linen.Module):
    """Keeps variables, and weights, of these paths within it."""

    paths: tuple[tuple[str, ...], ...]
    collection: str

    @linen.compact
    def __call__(self, x):
        for path in self.paths:
            module = self if len(path) == 1 else Names((path[1:],), self.collection, name=path[0])
            if module is not self:
                module(x)
            elif self.collection == "params":
                self.param(path[0], linen.initializers.ones, ())
            else:
                self.variable(self.collection, path[0], jnp.zeros, ())
        return linen.Dense(1)(x)


@pytest.mark.parametrize("collection", ["params", "state"])
@pytest.mark.parametrize(
    "paths",
    [(("a/b",), ("a", "b")), (("a",), ("a/b",)), (("a/b", "c"), ("a", "b/d"))],
    ids=["equal", "folder", "unequal"],
)
def test_names_that_cannot_be_told_apart_are_refused(collection, paths):
    model = Names(paths, collection)
    if paths[1] == ("a", "b/d"):
        create(model, (linen.Dense,))
        return
    with pytest.raises(
        zerojax.ZeroError, match=r"\(.*'a.* have the same name .*: rename the variable or module"
    ):
        create(model, (linen.Dense,))


class WeightNormed(linen.Module):
    """A layer whose weights are normalised, made in either way that is accepted."""

    way: str

    def setup(self):
        if self.way == "attribute":
            self.dense = linen.Dense(1)
            self.norm = linen.WeightNorm(self.dense)

    @linen.compact
    def __call__(self, x):
        if self.way == "attribute":
            return self.norm(x)
        return linen.WeightNorm(linen.Dense(1))(x)


@pytest.mark.filterwarnings("ignore:no unit is named")
def test_weight_norm_has_a_way_out():
    with pytest.raises(zerojax.ZeroError, match=r"WeightNorm .* in a module's @nn\.compact method"):
        create(linen.Sequential([linen.WeightNorm(linen.Dense(1))]), ())
    for way in ("compact", "attribute"):
        check_training(create(WeightNormed(way), ()), WeightNormed(way))


class Drawing(linen.Module):
    """Sows draws of a stream of its own, and of two that Flax takes from "params"."""

    @linen.compact
    def __call__(self, x):
        for stream in ("dropout", "noise", "path"):
            self.sow("intermediates", stream, jax.random.normal(self.make_rng(stream), (2000,)))
        return linen.Dense(1)(x)


class TwoDrawing(linen.Module):
    @linen.compact
    def __call__(self, x):
        return Drawing(name="one")(x) + Drawing(name="two")(x)


@pytest.mark.parametrize("units", [(Drawing,), ()])
@pytest.mark.filterwarnings("ignore:no unit is named")
def test_every_random_stream_has_bits_of_its_own(units):
    def loss(model: Any, batch: Any) -> Any:
        out, changed = model(batch["x"], mutable=["intermediates"])
        draws = jnp.stack(jax.tree.leaves(changed))
        mixed = jnp.corrcoef(draws) - jnp.eye(6)
        return jnp.mean(out), {"largest": jnp.max(jnp.abs(mixed))}

    state = create(TwoDrawing(), units, loss)
    # Of fifteen correlations of 2000 independent draws on each of two devices.
    assert zerojax.eval_step(state, BATCH)["largest"] < 4 / np.sqrt(2000)


class Setup(linen.Module):
    """A unit that makes weights in ``setup``, and computes with one there."""

    def setup(self):
        self.inner = linen.Dense(WIDTH)
        self.gain = self.param("gain", linen.initializers.ones, (WIDTH,))
        self.scale = jnp.exp(self.param("log_scale", linen.initializers.zeros, ()))

    def __call__(self, x):
        return x + self.inner(x) * self.gain * self.scale

    @linen.nowrap
    def scaled(self, x):
        return x * self.gain


class Tied(linen.Module):
    """Embeds and attends with one unit, which makes its weights in ``setup`` as well."""

    def setup(self):
        self.embed = linen.Embed(5, WIDTH)
        self.block = Setup()

    def __call__(self, x):
        x = self.block(x + self.embed(jnp.zeros(len(x), int)))
        return self.embed.attend(self.block.inner(x))

    def attribute(self, x):
        return x @ self.embed.embedding.T

    def operand(self, x):
        return x * self.block.gain

    def function(self, x):
        return jnp.sin(self.block.gain) * x

    def unwrapped(self, x):
        return self.block.scaled(x)


def test_units_make_weights_in_setup():
    model = Tied()
    state = create(model, (Setup, linen.Embed))
    assert {group.unit for group in state.spec.groups} == {"embed", "block"}
    check_training(state, model)


@pytest.mark.parametrize("method", ["attribute", "operand", "function", "unwrapped"])
def test_weights_made_in_setup_are_not_read_outside(method):
    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean(getattr(model, method)(batch["x"])) + squared_error(model, batch)

    with pytest.raises(zerojax.ZeroError, match=r"the weight '.*(embedding|gain)' .* outside .* nn\.nowrap"):
        zerojax.lower_train_step(create(Tied(), (Setup, linen.Embed), loss), BATCH)


class Grouped(linen.Module):
    """A layer with a parameter that is a pytree."""

    @linen.compact
    def __call__(self, x):
        def init(key: jax.Array) -> Any:
            return {"a": jax.random.normal(key, (WIDTH, WIDTH)), "b": [jnp.zeros(WIDTH), (jnp.ones(WIDTH),)]}

        w: Any = self.param("w", init)
        return x + jnp.tanh(x @ w["a"] + w["b"][0]) * w["b"][1][0]


class Groups(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(Grouped()(x))


def test_a_parameter_is_a_pytree():
    def by_hand(weights: Any) -> jax.Array:
        inner, last = weights["Grouped_0"]["w"], weights["Dense_0"]
        x = BATCH["x"] + jnp.tanh(BATCH["x"] @ inner["a"] + inner["b"][0]) * inner["b"][1][0]
        return squared_error(lambda _: x @ last["kernel"] + last["bias"], BATCH)

    state = create(Groups(), (Grouped,))
    before = zerojax.gather_params(state)
    wanted, slopes = jax.jit(jax.value_and_grad(by_hand))(before)
    np.testing.assert_allclose(squared_error(zerojax.gather_model(state), BATCH), wanted, rtol=1e-5)
    moved = jax.tree.map(lambda x, slope: x - RATE * slope, before, slopes)
    first, (second,) = moved["Grouped_0"]["w"]["b"]
    moved["Grouped_0"]["w"]["b"] = {"0": first, "1": {"0": second}}  # in a state
    state, metrics = zerojax.train_step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    assert distance(masters(state), moved) < 1e-6


class Calls(linen.Module):
    """A unit that calls a module which it gets, besides its own."""

    given: linen.Module

    @linen.compact
    def __call__(self, x):
        return self.given(linen.Dense(WIDTH)(x))


class Shares(linen.Module):
    """Two units with a module in common."""

    @linen.compact
    def __call__(self, x):
        common = linen.Dense(WIDTH)
        return linen.Dense(1)(Calls(common)(Calls(common)(x)))


def test_a_unit_that_calls_modules_of_others_is_refused():
    with pytest.raises(
        zerojax.ZeroError, match=r"unit 'Calls_\d' calls the module .Dense_\d., .* outside of it\."
    ):
        create(Shares(), (Calls,))


class Boxed(linen.Module):
    """A layer as MaxText writes it."""

    @linen.compact
    def __call__(self, x, _=None):
        init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
        ones = linen.with_partitioning(linen.initializers.ones, (None,))
        hidden = linen.spmd.with_logical_constraint(linen.Dense(WIDTH, kernel_init=init)(x), ("batch", "mlp"))
        calls: Any = self.variable("counts", "calls", linen.with_partitioning(jnp.zeros, (None,)), (1,))
        calls.value += 1
        gain: Any = self.param("gain", ones, (WIDTH,))
        return x + jnp.tanh(hidden) * gain, None


class Boxes(linen.Module):
    @linen.compact
    def __call__(self, x):
        layers = linen.scan(
            linen.remat(Boxed, prevent_cse=False),
            variable_axes={"params": 0, "counts": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={linen.PARTITION_NAME: "layers"},
        )
        x, _ = layers(name="layers")(Boxed()(x)[0], None)
        return linen.Dense(1)(x)


def test_boxes_of_metadata_are_opened():
    model = Boxes()
    state = create(model, (Boxed,))
    assert {group.unit: group.stack for group in state.spec.groups if group.unit} == {
        "Boxed_0": (),
        "layers": (3,),
    }
    state = check_training(state, model)
    np.testing.assert_array_equal(state.model_state["counts/layers/calls"], np.full((3, 1), 3))


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + jnp.tanh(linen.Dense(WIDTH)(x))


class Nested(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(linen.remat_scan(Layer, lengths=(2, 3))()(x))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"stage": 2}, marks=pytest.mark.slow),
        {"accumulate": 2, "accumulate_order": "breadth"},
    ],
    ids=str,
)
def test_layers_in_nested_loops(options):
    model = Nested()
    state = create(model, (Layer,), **options)
    assert {group.stack for group in state.spec.groups} == {(), (2, 3)}
    state = check_training(state, model)
    if not options:
        other = from_canonical(
            create(model, (Layer,), mesh=(2, 1), hpz=True, weights_delta=True), to_canonical(state)
        )
        assert distance(masters(other), masters(state)) == 0
