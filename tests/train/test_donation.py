"""A step takes the memory of the state that it is given: what stays, and what says that it is gone."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from core_models import Case, Normed, NormedModel, regression_batch, squared_error

import zerojax
from zerojax import checkpoints

CASE = Case(NormedModel, squared_error, (Normed,), regression_batch)
GONE = r"was passed to train_step before.*\(donation\): use the state that train_step returned"


def test_what_was_copied_out_of_a_state_stays(tmp_path):
    first, second = CASE.batches(8, 2)
    state = CASE.create(optax.sgd(0.1), nodes=2, local=2)
    model, params = zerojax.gather_model(state), zerojax.gather_params(state)
    wanted = np.asarray(model(second["x"])), jax.tree.map(np.copy, params)
    with checkpoints.Checkpoints(tmp_path) as saved:
        saved.save(0, state, checkpoints.Record())
        after, metrics = zerojax.train_step(state, first)
        del state
        after, _ = zerojax.train_step(after, second)
    assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(model(second["x"]), wanted[0])
    jax.tree.map(np.testing.assert_array_equal, params, wanted[1])
    back = zerojax.gather_params(checkpoints.restore(Path(tmp_path, "0"), after))
    jax.tree.map(np.testing.assert_array_equal, back, wanted[1])


def test_the_programs_of_a_state_go_with_it():
    """JAX's caches would keep the spec, which has them, by the structure of an argument."""
    (batch,) = CASE.batches(4, 1)
    state = CASE.create(optax.sgd(0.1), nodes=1, local=2)
    state, _ = zerojax.train_step(state, batch)
    zerojax.eval_step(state, batch)
    spec = weakref.ref(state.spec)
    del state
    gc.collect()
    assert spec() is None


@pytest.fixture(scope="module")
def donated() -> zerojax.TrainState:
    state = CASE.create(optax.chain(optax.sgd(0.1), zerojax.average_weights(0.5)), nodes=1, local=2)
    jax.tree.map(np.asarray, state)  # CPUs leave a state what was read before, at least on the first device
    zerojax.train_step(state, CASE.batches(4, 1)[0])
    return state


@pytest.mark.parametrize(
    "use",
    [
        lambda state: zerojax.train_step(state, CASE.batches(4, 1)[0]),
        lambda state: zerojax.eval_step(state, CASE.batches(4, 1)[0]),
        zerojax.gather_params,
        zerojax.gather_model,
        zerojax.averaged,
        lambda state: checkpoints.Checkpoints(Path("never")).save(1, state, checkpoints.Record()),
        lambda state: zerojax.gather_params(state.replace(params=state.params)),
    ],
)
def test_a_donated_state_is_refused_in_words(donated: zerojax.TrainState, use: Callable[[Any], Any]):
    with pytest.raises(zerojax.ZeroError, match=GONE):
        use(donated)


def test_what_needs_shapes_alone_works_on(donated):
    assert zerojax.comm_report(donated, CASE.batches(4, 1)[0]).nodes == 1
