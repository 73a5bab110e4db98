"""Tests of zerojax/train/model_pass.py."""

import dataclasses
import itertools

import jax
import numpy as np
import optax
import pytest
from core_models import CASES

from zerojax.train import step

SGD = optax.sgd(0.1)
BATCH = CASES["stack"].batches(16, 1)[0]


@pytest.mark.parametrize(
    ("lower", "options"),
    [
        pytest.param(step.lower_train_step, {}, id="step"),
        pytest.param(step.lower_train_step, {"accumulate": 2}, id="depth"),
        pytest.param(step.lower_train_step, {"accumulate": 2, "accumulate_order": "breadth"}, id="breadth"),
        pytest.param(step.lower_eval_step, {}, id="evaluation"),
    ],
)
def test_a_loss_is_traced_once(lower, options):
    """Tracing a large model takes seconds. The pass that is checked is the one that runs."""
    case, calls = CASES["stack"], itertools.count()

    def loss_fn(model, batch):
        next(calls)
        return case.loss(model, batch)

    zero = {"weights_delta": True, "hpz": True} | options
    state = dataclasses.replace(case, loss=loss_fn).abstract(SGD, nodes=2, local=4, **zero)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), BATCH)
    lower(state, rows)
    assert next(calls) == 1
