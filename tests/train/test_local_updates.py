"""Local updates against DiLoCo in numpy, and what must hold where nodes differ."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import WIDTH, Block, Case, Stacked, begun, regression_batch, squared_error
from local_reference import DiLoCo, in_int4
from plain_loop import Plain, distance, masters, plain_loop

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.train.fields import MAX_METRICS, LocalState
from zerojax.train.step import trace_train_step

STEPS = 7
CASE = Case(partial(Stacked, block=partial(Block, WIDTH, 41)), squared_error, (), regression_batch)
"""Of several codec blocks: fragments begin in the middle of a layer, and end behind the last one. A matrix
ends with 22 of a rotation's 32 elements: with a power of two, rounding errors would not reach the padding."""
OPTIONS: dict[str, dict[str, Any]] = {
    "waits": {"every": 2, "outer_momentum": 0.9, "outer_learning_rate": 0.7},
    "one step": {"every": 3, "outer_delay": 1, "outer_mixing": 0.5, "stage": 1},
    "two steps": {"every": 4, "outer_delay": 2, "outer_mixing": 0.25, "outer_momentum": 0.5, "stage": 2},
    "later": {"every": 4, "outer_delay": 3, "accumulate": 2},
    "int4": {
        "every": 3,
        "outer_delay": 2,
        "outer_mixing": 0.5,
        "outer_momentum": 0.9,
        "outer_learning_rate": 0.7,
        "weights": "int4",
        "grads": (None, "int4"),
        "rotation": 32,
        "error_feedback": True,
    },
}


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain(CASE)


def inner() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def create(plain: Plain, tx: Any, nodes: int, local: int, **zero: Any) -> zerojax.TrainState:
    state = CASE.abstract(tx, nodes=nodes, local=local, block_size=64, **zero)
    return begun(state, plain.weights)


def local_of(state: zerojax.TrainState) -> LocalState:
    assert state.local is not None
    return state.local


@pytest.mark.parametrize(
    ("nodes", "local", "name"),
    [
        (2, 1, "waits"),
        (2, 4, "int4"),
        pytest.param(3, 2, "two steps", marks=pytest.mark.slow),
        *(
            pytest.param(*mesh, name, marks=pytest.mark.slow)
            for mesh in ((1, 1), (2, 1), (2, 4), (3, 2))
            for name in OPTIONS
        ),
    ],
)
def test_equals_diloco(plain, nodes, local, name):
    """Outer weights, own weights, losses and norms, with clipping by each node's own norm."""
    options = OPTIONS[name]
    if nodes == 1:
        options = options | {"error_feedback": False}
    state = create(plain, inner(), nodes, local, **options)
    rounds = in_int4(64, 32) if name == "int4" and nodes > 1 else None
    given: dict[str, Any] = {"learnt": rounds, "change": in_int4(64, 0)} if rounds else {}
    reference = DiLoCo(plain, inner(), state, **given)
    told, wanted = [], []
    for batch in CASE.batches(48, STEPS):
        wanted.append(reference.step(batch))
        state, metrics = zerojax.train_step(state, batch)
        told.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert distance(masters(state), reference.weights) < 1e-5
    for n in range(nodes):
        own = dataclasses.replace(state, params=jax.tree.map(lambda x, n=n: x[n], local_of(state).weights))
        assert distance(masters(own), reference.own_weights(n)) < 1e-5
    lag = 1 if options.get("outer_delay") else 0
    assert np.isnan([loss for loss, _ in told[:lag]]).all()
    np.testing.assert_allclose(told[lag:], wanted[: STEPS - lag], rtol=2e-5)


@pytest.mark.slow
def test_every_step_is_zero3(plain):
    """With one fragment, SGD inside and plain averaging outside, it is data-parallel training."""
    batches = CASE.batches(16, 4)
    state = create(plain, optax.sgd(0.02), 2, 4, every=1)
    losses = []
    for batch in batches:
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    wanted, weights = plain_loop(plain, optax.sgd(0.02), batches)
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    assert distance(masters(state), weights) < 1e-6


@pytest.mark.slow
def test_a_rate_that_is_set_between_steps_is_that_of_all_nodes(plain):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    state = create(plain, tx, 2, 1, every=2)
    before = jax.tree.map(np.asarray, local_of(state).weights)
    state.opt_state.hyperparams["learning_rate"] = 0.0
    state, _ = zerojax.train_step(state, CASE.batches(8, 1)[0])
    jax.tree.map(np.testing.assert_array_equal, before, local_of(state).weights)
    assert state.opt_state.hyperparams["learning_rate"].shape == (2,)


def test_a_node_that_skips_learns_nothing_and_the_others_go_on(plain):
    """A NaN in one node's batch stays there: neither its weights nor an exchange see it."""
    state = create(plain, optax.adamw(1e-2), 2, 2, every=2, outer_delay=2, outer_mixing=0.5)
    good, bad = CASE.batches(8, 2)
    bad["x"][:4] = np.nan  # the first node's rows
    before = jax.tree.map(np.asarray, local_of(state).weights)
    state, _ = zerojax.train_step(state, bad)
    after = jax.tree.map(np.asarray, local_of(state).weights)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[0], new[0])
        assert (old[1] != new[1]).any()
    assert np.asarray(local_of(state).skipped_in_row).tolist() == [1, 0]
    metrics: dict[str, Any] = {}
    for _ in range(3):
        state, metrics = zerojax.train_step(state, good)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, local_of(state).weights)))
    assert int(metrics["skipped"]) == 0
    assert int(metrics["skipped_in_row"]) == 0
    assert np.isfinite(float(metrics["loss"]))


def test_metrics_are_of_the_step_before(plain):
    """What nodes report of a step comes with the next: means over all tokens, and who skipped it."""

    def loss(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        error = (model(batch["x"])[:, 0] - batch["y"]) ** 2
        tokens = batch["tokens"].sum()
        means = {"error": error, "size": jnp.abs(batch["y"])}
        aux = {name: (x * batch["tokens"]).sum() / tokens for name, x in means.items()}
        return aux["error"], {**aux, "tokens": tokens}

    case = dataclasses.replace(CASE, loss=loss)
    state = case.abstract(optax.sgd(1e-2), nodes=2, local=1, every=2, outer_delay=1)
    state = begun(state, plain.weights)
    good, bad = ({**batch, "tokens": np.array([1, 1, 1, 5], np.float32)} for batch in CASE.batches(4, 2))
    wanted, aux = loss(zerojax.gather_model(state), good)
    aux["tokens"] = aux["tokens"].sum()
    bad["x"][:1] = np.nan
    told = []
    for batch in (good, bad, good, good):
        state, metrics = zerojax.train_step(state, batch)
        told.append((int(metrics["skipped"]), int(state.skipped_in_row)))
        if len(told) == 2:
            for name, value in {"loss": wanted, **aux}.items():
                np.testing.assert_allclose(metrics[name], value, rtol=1e-5)
    assert told == [(0, 0), (0, 0), (1, 1), (0, 0)]


def test_a_loss_with_too_many_scalars_is_refused():
    def loss(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        value = squared_error(model, batch)
        return value, {f"part {i}": value for i in range(MAX_METRICS + 1)}

    zero = zerojax.ZeroConfig(every=2)
    state = zerojax.TrainState.abstract(
        CASE.model, optax.sgd(1e-2), loss, mesh=zerojax.make_mesh(2, 1), zero=zero
    )
    with pytest.raises(ConfigurationError, match=f"has {MAX_METRICS + 1} scalars"):
        trace_train_step(state, CASE.batches(4, 1)[0])


@pytest.mark.slow
def test_evaluation_reads_the_outer_weights_and_stays_in_the_node(plain):
    """Every node knows them: a pass that reads sends no weights between nodes."""
    state = create(plain, optax.sgd(0.05), 2, 2, every=2, outer_delay=1)
    batch, *more = CASE.batches(8, 4)
    for other in more:
        state, _ = zerojax.train_step(state, other)
    wanted = squared_error(zerojax.gather_model(state), batch)
    np.testing.assert_allclose(zerojax.eval_step(state, batch)["loss"], wanted, rtol=1e-5)
    rows = zerojax.predict_step(state, batch, lambda model, batch: model(batch["x"])[:, 0])
    np.testing.assert_allclose(rows, zerojax.gather_model(state)(batch["x"])[:, 0], rtol=1e-4, atol=1e-5)
    assert zerojax.with_replica(state) is state
