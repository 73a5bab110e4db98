"""Evaluations bring the weights across nodes once, where there is room."""

from unittest import mock

import jax
import numpy as np
import optax
import pytest
from core_models import CASES

import zerojax
from zerojax.run import evaluation
from zerojax.run.evaluation import mean_loss

CASE = CASES["gpt-tied"]


def create(nodes: int, local: int) -> zerojax.TrainState:
    mesh = zerojax.make_mesh(nodes, local, devices=jax.devices()[: nodes * local])
    zero = zerojax.ZeroConfig(compute_dtype="float32")
    return zerojax.TrainState.create(CASE.model, optax.sgd(0.1), CASE.loss, mesh=mesh, zero=zero)


@pytest.mark.slow
def test_an_evaluation_of_several_batches_copies_the_weights_once():
    state, batches = create(2, 2), CASE.batches(8, 3)
    evaluated: list[zerojax.TrainState] = []

    def note(state, batch):
        evaluated.append(state)
        return eval_step(state, batch)

    eval_step = zerojax.eval_step
    expected = [float(eval_step(state, batch)["loss"]) for batch in batches]
    with mock.patch.object(evaluation, "eval_step", note):
        loss = mean_loss(state, batches)
        assert len({id(one) for one in evaluated}) == 1
        assert evaluated[0].current_replicas
        mean_loss(state, batches[:1])
    assert evaluated[-1] is state
    np.testing.assert_allclose(loss, np.mean(expected), rtol=1e-6)


def test_a_batch_without_tokens_counts_nothing():
    state, (batch,) = create(2, 2), CASE.batches(8, 1)
    padding = jax.tree.map(lambda x: np.full_like(x, -1), batch)
    assert np.isnan(zerojax.eval_step(state, padding)["loss"])
    assert mean_loss(state, [padding, batch, padding]) == mean_loss(state, [batch])


@pytest.mark.slow
def test_without_room_there_is_no_copy():
    state = create(2, 2)
    with mock.patch.object(evaluation, "free_memory", return_value=1):
        assert evaluation.for_several_passes(state).current_replicas
        assert evaluation.for_several_passes(state, reserved=1 << 20) is state
    one = create(1, 4)
    assert evaluation.for_several_passes(one) is one
