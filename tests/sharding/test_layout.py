"""Behind a leaf's end are zeros, and only there: a rotation spreads what rounding lost over 32 neighbours."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from core_models import slope_case

import zerojax
from zerojax.train.step import gradients

SIZE = 150
ROTATED = {"grads": ("int8", "int4"), "rotation": 32, "block_size": 64}


def created(**options: Any) -> zerojax.TrainState:
    return slope_case(SIZE).create(optax.sgd(0.1), nodes=2, local=2, **ROTATED, **options)


def batch() -> dict[str, np.ndarray]:
    return {"slope": np.random.default_rng(0).standard_normal((8, SIZE)).astype(np.float32)}


def check(values: Any, state: zerojax.TrainState) -> None:
    (leaf,), (x,) = state.spec.leaves, jax.tree.leaves(values)
    rows = np.asarray(x).reshape(-1, leaf.padded)
    assert leaf.padded > SIZE
    assert not rows[:, SIZE:].any()
    assert np.count_nonzero(rows[:, :SIZE]) > 0.8 * rows[:, :SIZE].size


@pytest.mark.parametrize(
    "options", [{}, {"stage": 1}, {"grad_sync": "step", "accumulate": 2}], ids=["units", "stage 1", "once"]
)
def test_gradients(options):
    state = created(**options)
    check(gradients(state, batch()), state)


def test_what_error_feedback_remembers():
    state, _ = zerojax.train_step(created(grad_sync="step", error_feedback=True), batch())
    check(state.residual, state)
