"""Scalars and ``Replicated`` arrays in a batch: every device and micro-batch is given them as they are."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import CASES, Case, squared_error
from plain_loop import Plain, PlainLinen, distance, masters

import zerojax

ROWS, STEPS = 24, 3


def weighted(model: Any, batch: Any) -> Any:
    """A loss whose weight comes with the batch, and what it saw of it."""
    assert jnp.shape(batch["weight"]) == ()
    loss = batch["weight"] * squared_error(model, batch)
    return loss, {"weight": batch["weight"], "calls": jnp.asarray(batch["more"]["count"], jnp.float32)}


def with_weight(batch: Any, weight: Any, count: Any) -> Any:
    return {**batch, "weight": weight, "more": {"count": count}}


AS: dict[str, tuple[Any, Any]] = {
    "Python": (float, int),
    "numpy": (np.float32, np.asarray),  # a scalar and an array of no dimension
    "JAX": (jnp.asarray, jnp.asarray),
}


@pytest.mark.parametrize(
    ("style", "kind", "mesh", "options"),
    [
        pytest.param("nnx", "Python", (2, 2), {}, marks=pytest.mark.slow),
        pytest.param("nnx", "numpy", (2, 2), {"accumulate": 3}, marks=pytest.mark.slow),
        ("stack", "JAX", (3, 2), {"accumulate": 2, "accumulate_order": "breadth"}),
        pytest.param("linen", "JAX", (1, 2), {"stage": 1, "accumulate": 2}, marks=pytest.mark.slow),
        pytest.param(
            "linen-scan",
            "Python",
            (2, 1),
            {"accumulate": 2, "accumulate_order": "breadth"},
            marks=pytest.mark.slow,
        ),
        pytest.param("stack", "JAX", (1, 1), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_weight_that_changes_from_step_to_step(style, kind, mesh, options):
    known = CASES[style]
    number, integer = AS[kind]
    case = Case(known.model, weighted, known.units, known.batch, linen=known.linen)
    batches = [
        with_weight(batch, number(1 / (i + 1)), integer(i))
        for i, batch in enumerate(known.batches(ROWS, STEPS))
    ]
    tx = optax.sgd(0.02, momentum=0.9)
    given = zerojax.TrainState.create(
        case.model,
        tx,
        weighted,
        mesh=zerojax.make_mesh(*mesh),
        zero=zerojax.ZeroConfig(compute_dtype="float32", units=case.units, **options),
        sample_batch=batches[0] if case.linen else None,
    )
    plain = PlainLinen(case, zerojax.gather_params(given)) if case.linen else Plain(case)
    weights: Any = plain.weights
    memory = tx.init(weights)
    state, wanted = given, jax.jit(jax.value_and_grad(plain.loss))
    for i, batch in enumerate(batches):
        evaluated = zerojax.eval_step(state, batch)
        state, metrics = zerojax.train_step(state, batch)
        loss, grads = wanted(weights, batch)
        updates, memory = tx.update(grads, memory, weights)
        weights = optax.apply_updates(weights, updates)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(evaluated["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose([metrics["weight"], metrics["calls"]], [1 / (i + 1), i], rtol=1e-6)
    assert distance(masters(state), cast(Any, weights)) < 1e-5


def seen(model: Any, batch: Any, *, dtypes: list[Any]) -> Any:
    dtypes.append(jnp.result_type(jnp.bfloat16(1) * batch["weight"]))
    return squared_error(model, batch)


@pytest.mark.parametrize("order", ["depth", pytest.param("breadth", marks=pytest.mark.slow)])
def test_a_number_of_pythons_has_no_dtype_of_its_own(order):
    """As anywhere in JAX: what it is multiplied with keeps its dtype."""
    known, dtypes = CASES["nnx"], []
    case = Case(known.model, functools.partial(seen, dtypes=dtypes), known.units, known.batch)
    state = case.abstract(optax.sgd(0.1), nodes=1, local=2, accumulate=2, accumulate_order=order)
    batch = known.batches(ROWS, 1)[0]
    zerojax.lower_train_step(state, {**batch, "weight": 0.5})
    assert set(dtypes) == {jnp.dtype("bfloat16")}
    dtypes.clear()
    zerojax.lower_train_step(state, {**batch, "weight": np.float32(0.5)})
    assert set(dtypes) == {jnp.dtype("float32")}


def test_lowering_and_reports_take_them():
    known = CASES["stack"]
    case = Case(known.model, weighted, known.units, known.batch)
    state = case.create(optax.sgd(0.1), nodes=2, local=2)
    batch = known.batches(ROWS, 1)[0]
    own = with_weight(batch, 0.5, np.int32(3))
    assert (
        zerojax.comm_report(state, own).node_bytes
        == zerojax.comm_report(
            state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), own)
        ).node_bytes
    )
    before = zerojax.lower_train_step(state, own).as_text()
    assert "tensor<f32>" in before
    jax.block_until_ready(zerojax.train_step(state, own))


def by_class(model: Any, batch: Any) -> Any:
    """A loss with a weight for each class of rows, and a table that shifts the inputs."""
    weights, table = batch["weights"], batch["more"]["table"]
    assert weights.shape == (8,)
    assert table.shape == (2, 6)
    error = (model(batch["x"] + table[0])[:, 0] - batch["y"]) ** 2
    return jnp.mean(weights[batch["kind"]] * error) + batch["more"]["offset"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "mesh", "options"),
    [
        pytest.param("linen", (2, 2), {"accumulate": 3}, marks=pytest.mark.slow),
        ("stack", (3, 2), {"accumulate": 2, "accumulate_order": "breadth"}),
    ],
    ids=str,
)
def test_arrays_that_every_device_gets_whole(style, mesh, options):
    """Eight weights on up to eight devices and 24 rows: split by rows, each device would have its own."""
    known = CASES[style]
    case = Case(known.model, by_class, known.units, known.batch, linen=known.linen)
    rng = np.random.default_rng(3)
    whole = {
        "weights": np.linspace(0.1, 3, 8, dtype=np.float32),
        "more": {"table": rng.standard_normal((2, 6), np.float32), "offset": np.float32(0.5)},
    }
    rows = [{**batch, "kind": rng.integers(0, 8, ROWS)} for batch in known.batches(ROWS, STEPS)]
    batches = [{**batch, **{name: zerojax.Replicated(x) for name, x in whole.items()}} for batch in rows]
    tx = optax.sgd(0.02, momentum=0.9)
    state = zerojax.TrainState.create(
        case.model,
        tx,
        by_class,
        mesh=zerojax.make_mesh(*mesh),
        zero=zerojax.ZeroConfig(compute_dtype="float32", units=case.units, **options),
        sample_batch=batches[0] if case.linen else None,
    )
    plain = PlainLinen(case, zerojax.gather_params(state)) if case.linen else Plain(case)
    plain.case = case
    weights: Any = plain.weights
    memory, wanted = tx.init(weights), jax.jit(jax.value_and_grad(plain.loss))
    assert zerojax.comm_report(state, batches[0]).collectives
    shifted = zerojax.predict_step(
        state, batches[0], lambda model, batch: batch["x"] + batch["more"]["table"][1]
    )
    np.testing.assert_array_equal(shifted, rows[0]["x"] + whole["more"]["table"][1])
    assert float(zerojax.eval_step(state, batches[0])["loss"]) == pytest.approx(
        float(wanted(weights, rows[0] | whole)[0]), rel=1e-5
    )
    for batch, given in zip(rows, batches, strict=True):
        state, metrics = zerojax.train_step(state, given)
        loss, grads = wanted(weights, batch | whole)
        updates, memory = tx.update(grads, memory, weights)
        weights = optax.apply_updates(weights, updates)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert distance(masters(state), cast(Any, weights)) < 1e-5
