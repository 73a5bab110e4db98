"""What a loss may do with a Linen model: everything that it would do with the module itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import WIDTH, regression_batch
from flax import linen
from flax.core import DenyList
from plain_loop import distance, masters

import zerojax

RATE = 0.1
SGD = optax.sgd(RATE)  # one for all, which is checked once with each model
BATCH = regression_batch(np.random.default_rng(3), 8)


class Coder(linen.Module):
    """A unit with methods, state, and something sown."""

    def setup(self):
        self.inner = linen.Dense(WIDTH)
        self.norm = linen.BatchNorm(use_running_average=False, momentum=0.5)
        self.outer = linen.Dense(WIDTH)

    def encode(self, x):
        x = self.norm(self.inner(x))
        self.sow("intermediates", "code", jnp.mean(x**2))
        return jnp.tanh(x)

    def decode(self, x, *, scale: float = 1.0):
        return self.outer(x) * scale

    def __call__(self, x):
        return self.decode(self.encode(x))


class Model(linen.Module):
    """Two units, whose methods are called one by one, and a head of no unit."""

    width: int = WIDTH

    def setup(self):
        self.first = Coder()
        self.second = Coder()
        self.head = linen.Dense(1)

    def encode(self, x):
        return self.second.encode(x + self.first(x))

    def score(self, code):
        return self.head(self.second.decode(code, scale=2.0))

    def inside(self, x):
        """A unit's submodule, called from outside the unit."""
        return self.first.inner(x)

    def __call__(self, x):
        return self.score(self.encode(x))


def error(out: Any, batch: Any) -> jax.Array:
    return jnp.mean((out[:, 0] - batch["y"]) ** 2)


def whole(model: Any, batch: Any) -> Any:
    return error(model(batch["x"]), batch)


def by_methods(model: Any, batch: Any) -> Any:
    """The same in two calls."""
    return error(model.score(model.encode(batch["x"])), batch)


def by_keyword(model: Any, batch: Any) -> Any:
    code = model(batch["x"], method="encode")
    return error(model(code, method=lambda module, code: module.score(code)), batch)


def with_state(model: Any, batch: Any) -> Any:
    """What is asked for is returned, and what was sown within units is in it."""
    out, changed = model(batch["x"], mutable=["batch_stats", "intermediates"])
    assert set(changed) == {"batch_stats", "intermediates"}
    sown = [changed["intermediates"][name]["code"][0] for name in ("first", "second")]
    return error(out, batch) + 0.1 * sum(sown)


def applied(model: Any, batch: Any) -> Any:
    return error(model.apply(model.variables, batch["x"], mutable=["batch_stats"])[0], batch)


def applied_by_collection(model: Any, batch: Any) -> Any:
    """As the loss of a Flax train state is usually written."""
    variables = {"params": model.variables["params"], "batch_stats": model.variables["batch_stats"]}
    out, updates = model.apply(
        variables, batch["x"], mutable=["batch_stats"], rngs={"dropout": jax.random.key(0)}
    )
    assert set(updates) == {"batch_stats"}
    return error(out, batch)


def inside(model: Any, batch: Any) -> Any:
    return whole(model, batch) + jnp.mean(model.inside(batch["x"]) ** 2)


def create(
    loss: Any, units: tuple[type, ...] = (Coder,), model: Any = None, **zero: Any
) -> zerojax.TrainState:
    return zerojax.TrainState.create(
        Model() if model is None else model,
        SGD,
        loss,
        mesh=zerojax.make_mesh(1, 2),
        zero=zerojax.ZeroConfig(compute_dtype="float32", units=units, **zero),
        sample_batch=BATCH,
    )


def plain_step(loss: Any, state: zerojax.TrainState) -> tuple[float, Any, dict[str, Any]]:
    """The loss, the weights after a step and the statistics: Flax alone, on each device's rows."""
    params = jax.tree.map(jnp.asarray, masters(state))
    module = Model()
    stats = module.init(jax.random.key(0), BATCH["x"])["batch_stats"]
    losses, grads, after = [], [], []
    for part in (slice(0, 4), slice(4, 8)):
        rows = {name: x[part] for name, x in BATCH.items()}

        def own(params: Any, rows: Any = rows) -> Any:
            caller = Caller(module, {"params": params, "batch_stats": stats})
            return loss(caller, rows), caller.variables["batch_stats"]

        (value, changed), grad = jax.jit(jax.value_and_grad(own, has_aux=True))(params)
        losses, grads, after = [*losses, value], [*grads, grad], [*after, changed]
    mean = lambda *x: sum(x) / len(x)  # noqa: E731
    params = jax.tree.map(lambda w, *g: w - RATE * mean(*g), params, *grads)
    return float(mean(*losses)), params, jax.tree.map(mean, *after)


class Caller:
    """A module with its variables, called by the few lines that a Flax user would write."""

    def __init__(self, module: Any, variables: Any):
        self.module, self.variables = module, variables

    def __call__(self, *args: Any, mutable: Any = None, **kwargs: Any) -> Any:
        out, changed = self.module.apply(self.variables, *args, mutable=mutable or ["batch_stats"], **kwargs)
        self.variables = {**self.variables, "batch_stats": changed["batch_stats"]}
        return out if mutable is None else (out, changed)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.apply(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self(*args, method=name, **kwargs)


@pytest.mark.parametrize(
    ("loss", "units"),
    [
        pytest.param(whole, (Coder,), marks=pytest.mark.slow),
        (by_methods, (Coder,)),
        pytest.param(by_keyword, (Coder,), marks=pytest.mark.slow),
        (with_state, (Coder,)),
        pytest.param(with_state, (), marks=pytest.mark.slow),
        pytest.param(applied, (Coder,), marks=pytest.mark.slow),
        pytest.param(applied_by_collection, (Coder,), marks=pytest.mark.slow),
        pytest.param(inside, (Coder,), marks=pytest.mark.slow),
        pytest.param(by_methods, (Model,), marks=pytest.mark.slow),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(cls.__name__ for cls in value),
)
@pytest.mark.filterwarnings("ignore:no unit is named")
def test_a_loss_uses_the_model_as_it_would_use_the_module(loss, units):
    state = create(loss, units)
    wanted, params, stats = plain_step(loss, state)
    state, metrics = zerojax.train_step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    assert distance(masters(state), params) < 1e-5
    for path, x in jax.tree_util.tree_leaves_with_path(stats):
        name = "/".join(["batch_stats", *(part.key for part in path)])
        np.testing.assert_allclose(state.model_state[name], x, rtol=1e-5, atol=1e-6, err_msg=name)


class Sower(linen.Module):
    """A unit that appends to a collection in every call, and keeps a variable of two arrays."""

    @linen.compact
    def __call__(self, x):
        calls = self.variable("calls", "both", lambda: (jnp.int32(0), jnp.zeros(2)))
        if not self.is_initializing():
            calls.value = calls.value[0] + 1, calls.value[1] + jnp.array([1.0, 2.0])
        self.sow("losses", "size", jnp.mean(x**2))
        return linen.Dense(WIDTH)(x)


@pytest.mark.parametrize("units", [(Sower,), ()], ids=["unit", "whole"])
@pytest.mark.filterwarnings("ignore:no unit is named")
def test_sown_values_live_for_one_call_and_variables_hold_trees(units):
    def loss(model: Any, batch: Any) -> jax.Array:
        out, changed = model(batch["x"], mutable=["calls", "losses"])
        (size,) = changed["losses"]["layers_0"]["size"]
        return error(out, batch) + size

    state = create(loss, units, linen.Sequential([Sower()]))
    kernel = jnp.asarray(masters(state)["layers_0"]["Dense_0"]["kernel"])
    wanted = error(BATCH["x"] @ kernel, BATCH) + jnp.mean(BATCH["x"] ** 2)
    state, metrics = zerojax.train_step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    state, _ = zerojax.train_step(state, BATCH)
    count, sums = (state.model_state[f"calls/layers_0/both/{index}"] for index in range(2))
    assert count == 2
    assert sums.tolist() == [2.0, 4.0]


def test_units_gather_for_each_method_and_for_a_part_of_them():
    def gathers(loss: Any) -> int:
        report = zerojax.comm_report(create(loss), BATCH)
        return sum(
            c.count for c in report.collectives if c.phase == "weights forward" and c.axes == ("local",)
        )

    # A group of no unit, the first unit, and each of the second's two methods; a part of the first more.
    assert (gathers(whole), gathers(inside)) == (4, 5)


def frozen(model: Any, batch: Any) -> Any:
    return error(model(batch["x"], mutable=False), batch)


class Averaging(linen.Module):
    """Changes its statistics where it may."""

    @linen.compact
    def __call__(self, x):
        norm = linen.BatchNorm(
            use_running_average=not self.is_mutable_collection("batch_stats"), momentum=0.5
        )
        return linen.Dense(1)(norm(x))


def test_a_call_that_may_change_nothing_changes_nothing():
    before = create(frozen, (), Averaging(), stage=2)
    state, metrics = zerojax.train_step(before, BATCH)
    assert metrics["grad_norm"] > 0
    for name, x in state.model_state.items():
        np.testing.assert_array_equal(x, float(name.endswith("var")))


class Scaled(linen.Module):
    """A field, and a submodule in a field."""

    inner: linen.Module
    scale: float = 0.5

    @linen.compact
    def __call__(self, x):
        return self.inner(x)


def by_parts(model: Any, batch: Any) -> Any:
    return error(model.inner(batch["x"]) * model.scale, batch)


def test_fields_and_submodules_are_found():
    state = create(by_parts, (linen.Dense,), Scaled(linen.Dense(1)))
    params = masters(state)["inner"]
    wanted = error((BATCH["x"] @ params["kernel"] + params["bias"]) * 0.5, BATCH)
    np.testing.assert_allclose(zerojax.eval_step(state, BATCH)["loss"], wanted, rtol=1e-5)


def test_apply_takes_any_weights():
    """Those of another model of the same class, for example: no unit is gathered for them."""
    other = Model().init(jax.random.key(5), BATCH["x"])

    def against_a_teacher(model: Any, batch: Any) -> Any:
        target, _ = model.apply(other, batch["x"], mutable=["batch_stats"])
        return jnp.mean((model(batch["x"]) - target) ** 2)

    state = create(against_a_teacher)
    params = masters(state)
    losses = []
    for part in (slice(0, 4), slice(4, 8)):
        stats = {"batch_stats": other["batch_stats"]}
        both = [
            Model().apply({"params": p, **stats}, BATCH["x"][part], mutable=["batch_stats"])[0]
            for p in (params, other["params"])
        ]
        losses.append(np.mean((both[0] - both[1]) ** 2))
    np.testing.assert_allclose(zerojax.eval_step(state, BATCH)["loss"], np.mean(losses), rtol=1e-5)


class Base(linen.Module):
    def setup(self):
        self.dense = linen.Dense(WIDTH)

    def __call__(self, x):
        return self.dense(x)


class Derived(Base):
    def __call__(self, x):
        return 2 * super().__call__(x)


class CallsTheBase(linen.Module):
    over: bool

    @linen.compact
    def __call__(self, x):
        derived = Derived()
        return Base.__call__(derived, x) if self.over else derived(x)


@pytest.mark.parametrize("over", [False, True])
def test_a_method_that_a_unit_overrides(over):
    """Called by its own name it is found by it; else its submodules gather what is theirs."""
    state = create(whole, (Derived,), CallsTheBase(over=over))
    dense = masters(state)["Derived_0"]["dense"]
    wanted = error((1 if over else 2) * (BATCH["x"] @ dense["kernel"] + dense["bias"]), BATCH)
    np.testing.assert_allclose(zerojax.eval_step(state, BATCH)["loss"], wanted, rtol=1e-5)


class Lifted(linen.Module):
    """A unit under a transform of Flax's: of its class, or of a function that calls it."""

    how: str

    @linen.compact
    def __call__(self, x):
        if self.how == "class":
            return linen.Dense(1)(linen.remat(Coder)()(x))
        if self.how == "method":
            return linen.Dense(1)(linen.remat(Coder, methods=["encode"])().encode(x))
        scan = linen.scan(
            lambda block, carry: (block.encode(carry), None),
            variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=3,
        )
        return linen.Dense(1)(scan(Coder(), x)[0])


@pytest.mark.parametrize(
    ("how", "unit", "stack"), [("class", "Coder", ()), ("method", "Coder", ()), ("scan", "Coder", (3,))]
)
def test_units_under_transforms_are_found_where_they_are(how, unit, stack):
    model = Lifted(how)
    state = create(whole, (Coder,), model)
    units = {group.unit: group.stack for group in state.spec.groups if group.unit}
    assert list(units.values()) == [stack], units
    assert all(unit in name for name in units)
    params = jax.tree.map(jnp.asarray, masters(state))
    stats = model.init(jax.random.key(0), BATCH["x"])["batch_stats"]
    losses = []
    for part in (slice(0, 4), slice(4, 8)):
        out, _ = model.apply(
            {"params": params, "batch_stats": stats}, BATCH["x"][part], mutable=["batch_stats"]
        )
        losses.append(error(out, {"y": BATCH["y"][part]}))
    state, metrics = zerojax.train_step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: error(m(b["x"], mutable=["params"])[0], b), r"mutable has the parameters .*DenyList"),
        (lambda m, b: error(m.apply(m.variables, b["x"], mutable=True)[0], b), "mutable has the parameters"),
        (
            lambda m, b: error(m(b["x"], capture_intermediates=True, mutable=["batch_stats"])[0], b),
            "let the modules sow",
        ),
        (
            lambda m, b: m.variables["params"]["head"],
            r"\['params'\]\['head'\] is read, but the model has not been called",
        ),
    ],
)
def test_what_is_refused(loss, message):
    with pytest.raises(zerojax.ZeroError, match=message):
        zerojax.lower_train_step(create(loss), BATCH)


def test_mutable_by_exclusion():
    def loss(model: Any, batch: Any) -> Any:
        out, changed = model(batch["x"], mutable=DenyList("params"))
        assert {"batch_stats", "intermediates"} <= set(changed)
        return error(out, batch)

    zerojax.lower_train_step(create(loss), BATCH)


def test_attributes_that_are_not_there():
    def loss(model: Any, batch: Any) -> Any:
        assert model.width == WIDTH
        assert not hasattr(model, "decode")
        with pytest.raises(AttributeError, match="may call the model, its methods and `apply`"):
            model.bind({})
        with pytest.raises(AttributeError, match=r"\"first\" is defined in '.setup\(\)'"):
            model.first(batch["x"])
        return whole(model, batch)

    zerojax.lower_train_step(create(loss), BATCH)


class Listed(linen.Module):
    """A parameter that is a list of arrays."""

    @linen.compact
    def __call__(self, x):
        first, second = self.param("both", lambda _: [jnp.ones((x.shape[-1], 3)), jnp.ones((3, 1))])
        return x @ first @ second


@pytest.mark.filterwarnings("ignore:no unit is named")
def test_lists_in_parameters_stay_lists():
    state = create(whole, (), Listed())
    params = zerojax.gather_params(state)
    Listed().apply({"params": params}, BATCH["x"])
    halved = jax.tree.map(lambda x: x / 2, params)
    for given in (halved, {"both": dict(enumerate(halved["both"]))}):  # nnx.to_pure_dict's lists
        found = zerojax.gather_params(zerojax.put_params(state, given))
        jax.tree.map(np.testing.assert_array_equal, found, halved)
