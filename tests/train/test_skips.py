"""A step whose loss or gradient is not finite changes nothing but the counters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import (
    CASES,
    WIDTH,
    Block,
    Case,
    LinenBlock,
    Listed,
    regression_batch,
    squared_error,
)
from flax import linen, nnx
from plain_loop import distance, masters, plain_loop, plain_model

import zerojax

LOSSY = {"weights": "int8", "hpz": True, "grads": ("int8", "int4"), "block_size": 64}
ROWS = 24


def bits(state: zerojax.TrainState) -> Any:
    """Everything that a skipped step must leave alone."""
    kept = (state.params, state.opt_state, state.model_state, state.residual, state.replicas)
    return jax.tree.map(np.asarray, kept)


def with_bad_row(batch: dict[str, np.ndarray], row: int, value: float) -> dict[str, np.ndarray]:
    """The batch with one bad number: one device of eight sees it."""
    x = batch["x"].copy()
    x[row, 0] = value
    return {**batch, "x": x}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"stage": 0}, marks=pytest.mark.slow),
        pytest.param({"stage": 2, "accumulate": 3}, marks=pytest.mark.slow),
        pytest.param({"stage": 3, **LOSSY}, marks=pytest.mark.slow),
        {
            "stage": 3,
            **LOSSY,
            "weights_delta": True,
            "grad_sync": "step",
            "error_feedback": True,
            "accumulate": 3,
        },
    ],
    ids=["stage 0", "stage 2", "lossy", "delta"],
)
def test_a_bad_batch_changes_nothing_and_is_counted(options):
    case = CASES["nnx"]
    state = case.start(optax.adamw(1e-2), plain_model("nnx").weights, nodes=2, local=4, **options)
    good = case.batches(ROWS, 4)
    state, metrics = zerojax.train_step(state, good[0])
    assert (metrics["skipped"], metrics["skipped_in_row"]) == (0, 0)
    if options.get("weights_delta"):
        # The copies follow the weights at each step's start, a skipped one included.
        state, _ = zerojax.train_step(state, with_bad_row(good[1], 0, -np.inf))
    before = bits(state)
    already = int(state.skipped_in_row)
    for count, value in ((1, np.nan), (2, np.inf)):
        step = int(state.step)
        state, metrics = zerojax.train_step(state, with_bad_row(good[1], 7 * count, value))
        assert (metrics["skipped"], metrics["skipped_in_row"]) == (1, already + count)
        assert (int(state.step), int(state.skipped_in_row)) == (step + 1, already + count)
    after = bits(state)
    if options.get("weights_delta"):
        before, after = before[:4], after[:4]
    jax.tree.map(np.testing.assert_array_equal, before, after)
    state, metrics = zerojax.train_step(state, good[2])
    assert (metrics["skipped"], metrics["skipped_in_row"]) == (0, 0)
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1)), 3])
def test_good_steps_after_a_skip_are_those_of_a_run_without_it(stage):
    case, tx = CASES["nnx"], optax.sgd(0.02, momentum=0.9)
    good = case.batches(ROWS, 6)
    plain = plain_model("nnx")
    wanted_losses, wanted = plain_loop(plain, tx, good)
    state = case.start(tx, plain.weights, nodes=2, local=4, stage=stage)
    losses = []
    for i, batch in enumerate(good):
        if i in (2, 3):
            state, metrics = zerojax.train_step(state, with_bad_row(batch, 11, np.nan))
            assert metrics["skipped"] == 1
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)
    assert distance(masters(state), wanted) < 1e-5
    assert int(state.step) == 8


def loss_with_a_bad_gradient(model: Any, batch: Any) -> jax.Array:
    """Finite everywhere, but where ``y`` is 100 its gradient is sqrt's slope at zero, times zero."""
    out = model(batch["x"])[:, 0]
    bad = batch["y"] == 100
    return jnp.mean(jnp.where(bad, jnp.sqrt(jnp.where(bad, out * 0, 1)), (out - batch["y"]) ** 2))


@pytest.mark.parametrize(
    "options",
    [pytest.param({"stage": 0}, marks=pytest.mark.slow), {"stage": 3, **LOSSY}],
    ids=["exact", "lossy"],
)
def test_a_bad_gradient_under_a_finite_loss_is_skipped(options):
    """No codec may turn NaN into a silent number."""
    case = CASES["nnx"]
    state = zerojax.TrainState.create(
        Listed,
        optax.sgd(0.1),
        loss_with_a_bad_gradient,
        mesh=zerojax.make_mesh(2, 4),
        zero=zerojax.ZeroConfig(compute_dtype="float32", units=case.units, **options),
    )
    batch = case.batches(8, 1)[0]
    before = bits(state)
    state, metrics = zerojax.train_step(state, {**batch, "y": np.where(np.arange(8) == 5, 100, batch["y"])})
    assert np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, bits(state))
    state, metrics = zerojax.train_step(state, batch)
    assert metrics["skipped"] == 0


@pytest.mark.slow
def test_a_bad_loss_over_finite_gradients_is_skipped():
    """A penalty without a gradient, say, that overflows."""
    case = CASES["nnx"]

    def loss(model: Any, batch: Any) -> jax.Array:
        return squared_error(model, batch) + jnp.where(jnp.any(batch["y"] == 100), jnp.inf, 0)

    state = dataclasses.replace(case, loss=loss).create(optax.sgd(1e-4), nodes=2, local=1)
    batch = case.batches(4, 1)[0]
    before = bits(state)
    state, metrics = zerojax.train_step(state, {**batch, "y": np.where(np.arange(4) == 3, 100, batch["y"])})
    assert np.isfinite(metrics["grad_norm"])
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, bits(state))


class Normed(nnx.Module):
    """Statistics of batches, in a unit and outside."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, rngs=rngs)
        self.block = Block(rngs=rngs)
        self.calls = nnx.BatchStat(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.block(self.norm(x))


class LinenNormed(linen.Module):
    """The same in Linen."""

    @linen.compact
    def __call__(self, x):
        calls = self.variable("batch_stats", "calls", lambda: jnp.int32(0))
        calls.value += 1
        return LinenBlock()(linen.BatchNorm(use_running_average=False, momentum=0.8)(x))


NORMED = {
    "nnx": Case(Normed, squared_error, (Block,), regression_batch),
    "linen": Case(LinenNormed(), squared_error, (LinenBlock,), regression_batch, linen=True),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nnx", {"stage": 2, "accumulate": 3}),
        ("nnx", {"accumulate": 2, "accumulate_order": "breadth"}),
        ("linen", {}),
    ],
)
def test_what_is_no_parameter_is_not_taken_from_a_skipped_step(name, options):
    """A batch whose target is bad moves statistics to numbers that look right; one of NaN to NaN."""
    case = NORMED[name]
    state = case.create(optax.sgd(0.1), nodes=2, local=2, **options)
    good = case.batches(ROWS, 3)
    state, _ = zerojax.train_step(state, good[0])
    before = jax.tree.map(np.asarray, state.model_state)
    bad_target = {**good[1], "y": np.full(ROWS, np.inf, np.float32)}
    for bad in (bad_target, with_bad_row(good[1], 3, np.nan)):
        state, metrics = zerojax.train_step(state, bad)
        assert metrics["skipped"] == 1
        jax.tree.map(np.testing.assert_array_equal, before, state.model_state)
    state, _ = zerojax.train_step(state, good[2])
    moved = [not np.array_equal(x, before[key]) for key, x in state.model_state.items()]
    assert len(moved) == 3
    assert all(moved)


def test_no_counted_token_at_all_is_no_step():
    """The mean over no token is not a number, and must not become a step."""
    case = CASES["ragged"]
    state = case.begin(optax.sgd(0.1), nodes=2, local=2)
    batch = case.batches(8, 1)[0]
    before = bits(state)
    state, metrics = zerojax.train_step(state, {**batch, "counted": np.zeros(8, bool)})
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, bits(state))


def test_padding_stays_zero_in_weights_moments_and_residuals():
    """What was never zeroed would leak into a scale, and from there into real weights."""
    case = CASES["awkward"]
    options = {**LOSSY, "grad_sync": "step", "error_feedback": True, "rotation": 32}
    tx = optax.adamw(1e-2, weight_decay=0.1)
    state = case.begin(tx, nodes=3, local=2, **options)
    for batch in case.batches(ROWS, 3):
        state, _ = zerojax.train_step(state, batch)
    sizes = {leaf.name: leaf.size for leaf in state.spec.leaves}
    padded = {leaf.name: leaf.padded for leaf in state.spec.leaves}
    checked = 0
    for path, x in jax.tree.leaves_with_path((state.params, state.opt_state, state.residual)):
        name = "/".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        if name not in sizes:
            continue
        rows = np.asarray(x).reshape(-1, padded[name])
        assert padded[name] > sizes[name]
        assert not rows[:, sizes[name] :].any(), name
        # A residual of a leaf that travels in fp32 is nothing but zeros.
        assert sizes[name] == 0 or path[0].idx == 2 or rows[:, : sizes[name]].any(), name
        checked += 1
    assert checked == 4 * len(sizes)
