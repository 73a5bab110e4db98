"""Batch statistics over named mesh axes: those of the whole batch, as one device would have them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import WIDTH, in_fp32, regression_batch, squared_error
from flax import linen, nnx, traverse_util
from jax import lax
from plain_loop import by_path, distance, masters

import zerojax

AXES = ("node", "local")
ROWS = 48
RATE = 0.1
SGD = optax.sgd(RATE)  # one for all, which is checked once with each model


class Normed(nnx.Module):
    """A residual layer whose statistics are taken over ``axis``."""

    def __init__(self, *, rngs: nnx.Rngs, axis: Any):
        self.up = nnx.Linear(WIDTH, WIDTH, bias_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, axis_name=axis, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.norm(self.up(x)))


class Model(nnx.Module):
    """Statistics outside units and inside them, of a list or of a stack."""

    def __init__(self, rngs: nnx.Rngs, axis: Any, stacked: bool):
        layer = functools.partial(Normed, axis=axis)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, axis_name=axis, rngs=rngs)
        self.blocks = (
            zerojax.Stack(layer, 3, rngs=rngs) if stacked else nnx.List([layer(rngs=rngs) for _ in range(2)])
        )
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        x = self.norm(x)
        for block in [self.blocks] if isinstance(self.blocks, zerojax.Stack) else self.blocks:
            x = block(x)
        return self.last(x)


class LinenNormed(linen.Module):
    axis: Any

    @linen.compact
    def __call__(self, x, train: bool):
        hidden = linen.Dense(WIDTH, bias_init=linen.initializers.normal(1.0))(x)
        norm = linen.BatchNorm(use_running_average=not train, momentum=0.8, axis_name=self.axis)
        return x + jnp.tanh(norm(hidden))


class LinenModel(linen.Module):
    axis: Any
    stacked: bool

    @linen.compact
    def __call__(self, x, train: bool = True):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.8, axis_name=self.axis)(x)
        if self.stacked:
            scan = linen.scan(
                lambda block, carry: (block(carry, train), None),
                variable_axes={"params": 0, "batch_stats": 0},
                split_rngs={"params": True},
                length=3,
            )
            x, _ = scan(LinenNormed(self.axis), x)
        else:
            for _ in range(2):
                x = LinenNormed(self.axis)(x, train)
        return linen.Dense(1)(x)


STYLES = {
    "nnx": (Model, False),
    "stack": (Model, True),
    "linen": (LinenModel, False),
    "scan": (LinenModel, True),
}


def make(style: str, axis: Any) -> Any:
    cls, stacked = STYLES[style]
    if cls is LinenModel:
        return LinenModel(axis, stacked)
    return functools.partial(Model, axis=axis, stacked=stacked)


def create(style: str, mesh: tuple[int, int], axis: Any = AXES, **zero: Any) -> zerojax.TrainState:
    sample = batches(1)[0] if STYLES[style][0] is LinenModel else None
    units = (LinenNormed,) if sample else () if STYLES[style][1] else (Normed,)
    return zerojax.TrainState.create(
        make(style, axis),
        SGD,
        squared_error,
        mesh=zerojax.make_mesh(*mesh),
        zero=in_fp32(**{"units": units} | zero),
        sample_batch=sample,
    )


def batches(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [regression_batch(rng, ROWS) for _ in range(count)]


class Plain:
    """The same model on one device, without axes; what it is given counts as one batch of statistics."""

    def __init__(self, style: str, state: zerojax.TrainState):
        self.weights = jax.tree.map(jnp.asarray, masters(state))
        self.other = {
            tuple(name.split("/")): jnp.array(x, copy=True) for name, x in state.model_state.items()
        }
        model = make(style, None)
        if isinstance(model, linen.Module):
            self._apply = functools.partial(self._linen, model)
        else:
            graph, params, rest = nnx.split(model(nnx.Rngs(0)), nnx.Param, ...)
            parts = [
                {tuple(map(str, path)): (path, var) for path, var in nnx.to_flat_state(part)}
                for part in (params, rest)
            ]
            self._apply = functools.partial(self._nnx, graph, parts)

    def _linen(self, model: Any, weights: Any, other: Any, batch: Any) -> Any:
        rest = traverse_util.unflatten_dict(other)
        call = lambda x: model.apply({"params": weights, **rest}, x, mutable=["batch_stats"])  # noqa: E731
        out, changed = call(batch["x"])
        return jnp.mean((out[:, 0] - batch["y"]) ** 2), by_path(changed)

    def _nnx(self, graph: Any, parts: Any, weights: Any, other: Any, batch: Any) -> Any:
        values = (by_path(weights), other)
        states = [
            nnx.from_flat_state([(path, var.replace(value[key])) for key, (path, var) in part.items()])
            for part, value in zip(parts, values, strict=True)
        ]
        model = nnx.merge(graph, *states, copy=True)
        loss = squared_error(model, batch)
        after = nnx.to_flat_state(nnx.state(model, nnx.BatchStat))
        return loss, {tuple(map(str, path)): var.get_value() for path, var in after}

    def step(self, groups: list[dict[str, np.ndarray]], *, follow: bool = False) -> float:
        """One update by the mean loss of groups of rows that each have statistics of their own.

        The state becomes the mean of theirs; where groups ``follow`` each other, what the last left.
        """

        loss, after, self.weights = self._update(self.weights, self.other, groups, follow)
        self.other = {**self.other, **after}
        return float(loss)

    @functools.partial(jax.jit, static_argnums=(0, 4))
    def _update(self, weights: Any, other: Any, groups: Any, follow: bool) -> Any:
        def mean(weights: Any) -> Any:
            losses, afters, before = [], [], other
            for group in groups:
                loss, after = self._apply(weights, before, group)
                losses, afters = [*losses, loss], [*afters, after]
                before = {**before, **after} if follow else before
            states = afters[-1:] if follow else afters
            return sum(losses) / len(losses), jax.tree.map(lambda *x: sum(x) / len(x), *states)

        (loss, after), grads = jax.value_and_grad(mean, has_aux=True)(weights)
        return loss, after, jax.tree.map(lambda w, g: w - RATE * g, weights, grads)

    def check(self, state: zerojax.TrainState) -> None:
        assert distance(masters(state), self.weights) < 1e-5
        for path, x in self.other.items():
            if path[-1] in ("mean", "var"):
                np.testing.assert_allclose(
                    state.model_state["/".join(path)], x, rtol=1e-5, atol=1e-6, err_msg=str(path)
                )


def rows(batch: Any, chosen: Any) -> Any:
    return {name: x[np.asarray(chosen).reshape(-1)] for name, x in batch.items()}


@functools.cache
def trained(style: str, mesh: tuple[int, int], **options: Any) -> tuple[zerojax.TrainState, Plain]:
    """A state and the plain model after three steps of equal losses."""
    state = create(style, mesh, **options)
    plain = Plain(style, state)
    for batch in batches(3):
        state, metrics = zerojax.train_step(state, batch)
        np.testing.assert_allclose(metrics["loss"], plain.step([batch]), rtol=1e-5)
    return state, plain


@pytest.mark.parametrize(
    ("style", "mesh", "options"),
    [
        pytest.param("nnx", (2, 4), {}, marks=pytest.mark.slow),
        ("stack", (3, 2), {"hpz": True}),
        pytest.param("linen", (2, 4), {}, marks=pytest.mark.slow),
        ("linen", (1, 3), {"stage": 2}),
        pytest.param("linen", (4, 1), {"stage": 0}, marks=pytest.mark.slow),
        pytest.param("scan", (3, 2), {"hpz": True}, marks=pytest.mark.slow),
        pytest.param("scan", (2, 2), {"remat": "none"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_statistics_over_both_axes_are_those_of_the_whole_batch(style, mesh, options):
    state, plain = trained(style, mesh, **options)
    plain.check(state)


@pytest.mark.parametrize(("style", "axis"), [("nnx", "local"), ("scan", "node")])
def test_statistics_over_one_axis_are_those_of_its_devices(style, axis):
    nodes, local = 2, 3
    state = create(style, (nodes, local), axis=axis)
    plain, batch = Plain(style, state), batches(1)[0]
    owner = np.arange(ROWS).reshape(nodes, local, -1)
    groups = list(owner) if axis == "local" else list(owner.swapaxes(0, 1))
    state, metrics = zerojax.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"], plain.step([rows(batch, own) for own in groups]), rtol=1e-5)
    plain.check(state)


@pytest.mark.parametrize(
    ("style", "order"),
    [
        ("nnx", "breadth"),
        pytest.param("stack", "depth", marks=pytest.mark.slow),
        pytest.param("stack", "breadth", marks=pytest.mark.slow),
        ("linen", "depth"),
        pytest.param("scan", "breadth", marks=pytest.mark.slow),
    ],
)
def test_a_micro_batch_has_the_statistics_of_its_rows_on_all_devices(style, order):
    micro = 3
    state = create(style, (2, 2), accumulate=micro, accumulate_order=order)
    plain, batch = Plain(style, state), batches(1)[0]
    owner = np.arange(ROWS).reshape(4, micro, -1)
    groups = [rows(batch, owner[:, i]) for i in range(micro)]
    state, metrics = zerojax.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"], plain.step(groups, follow=order == "depth"), rtol=1e-5)
    plain.check(state)


def in_evaluation(model: Any, batch: Any) -> jax.Array:
    return squared_error(functools.partial(model, train=False), batch)


@pytest.mark.parametrize(
    ("style", "mesh", "options"), [("stack", (3, 2), {"hpz": True}), ("linen", (1, 3), {"stage": 2})]
)
def test_evaluation_uses_the_running_statistics_as_the_gathered_model_does_on_any_batch(style, mesh, options):
    state, _ = trained(style, mesh, **options)
    measure = in_evaluation if style in ("linen", "scan") else squared_error
    small, half = (rows(batches(4)[-1], np.arange(count)) for count in (12, 6))
    for given, once in ((small, small), (rows(half, [*range(6)] * 2), half)):
        wanted = measure(zerojax.gather_model(state), once)  # where no axis has a name
        np.testing.assert_allclose(zerojax.eval_step(state, given, measure)["loss"], wanted, rtol=1e-5)


def test_the_statistics_are_counted_among_what_a_step_sends():
    report = zerojax.comm_report(create("linen", (2, 2)), batches(1)[0])
    own = [c for c in report.collectives if c.phase == "other"]
    # Means of two vectors for each of three norms, computed again in the two units; and their gradients,
    # but for the first norm's, whose input has none.
    assert {c.elements for c in own} == {2 * WIDTH}
    assert sum(c.count for c in own) == 3 + 2 + 2


def contrastive(model: Any, batch: Any) -> jax.Array:
    """A loss that names the axes itself: every device's rows against those of all."""
    own = model(batch["x"])
    every = lax.all_gather(own, AXES, tiled=True)
    labels = lax.axis_index(AXES) * len(own) + jnp.arange(len(own))
    return optax.softmax_cross_entropy_with_integer_labels(own @ every.T, labels).mean()


def test_a_linen_loss_may_name_the_axes():
    batch = batches(1)[0]
    state = zerojax.TrainState.create(
        linen.Dense(3),
        SGD,
        contrastive,
        mesh=zerojax.make_mesh(2, 2),
        zero=zerojax.ZeroConfig(compute_dtype="float32", units=(linen.Dense,)),
        sample_batch=batch,
    )
    own = zerojax.gather_model(state)(batch["x"])
    wanted = optax.softmax_cross_entropy_with_integer_labels(own @ own.T, jnp.arange(ROWS)).mean()
    np.testing.assert_allclose(zerojax.eval_step(state, batch)["loss"], wanted, rtol=1e-5)


def test_a_linen_model_begins_with_the_values_of_its_own_init():
    """The forward pass is traced within the mesh and left out; what is left are the same values."""
    batch = batches(1)[0]
    state = create("scan", (2, 2))
    params, dropout = jax.random.split(jax.random.key(0))
    init = jax.jit(make("scan", None).init)  # jit rounds here and there in another way
    wanted = init({"params": params, "dropout": dropout}, batch["x"])
    jax.tree.map(np.testing.assert_array_equal, zerojax.gather_params(state), wanted["params"])
    for path, x in by_path(wanted["batch_stats"]).items():
        np.testing.assert_array_equal(state.model_state["/".join(("batch_stats", *path))], x)


class FromAll(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x * self.param("scale", lambda _: lax.pmean(jnp.max(x), AXES))


def test_initial_values_that_depend_on_other_devices_are_refused():
    with pytest.raises(zerojax.ZeroError, match=r"an initial value depends on a collective .* node"):
        zerojax.TrainState.create(
            FromAll(),
            SGD,
            squared_error,
            mesh=zerojax.make_mesh(2, 2),
            zero=zerojax.ZeroConfig(units=(FromAll,)),
            sample_batch=batches(1)[0],
        )
