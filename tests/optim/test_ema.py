"""The average of the weights: numpy's, sharded, checkpointed, and used in the weights' place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import CASES
from plain_loop import by_path, distance, masters

import zerojax
from zerojax.run.checkpoints import Checkpoints, Record, restore

DECAY, ROWS = 0.7, 24
DELTA = {"weights": "int8", "weights_delta": True, "hpz": True}


def optimizer():
    return optax.chain(optax.adam(1e-2), zerojax.average_weights(DECAY))


@pytest.fixture(scope="module")
def trained():
    """Four steps on 2 x 4 with delta weights, and the weights after each."""
    case = CASES["nnx"]
    state, weights = case.begin(optimizer(), nodes=2, local=4, **DELTA), []
    for batch in case.batches(ROWS, 4):
        state, _ = zerojax.train_step(state, batch)
        weights.append(by_path(masters(state)))
    return state, weights


def test_equals_numpys(trained):
    state, weights = trained
    found = by_path(masters(zerojax.averaged(state)))
    shares = np.float64(DECAY) ** np.arange(len(weights))[::-1]
    shares /= shares.sum()
    for path, value in found.items():
        wanted = sum(share * np.float64(w[path]) for share, w in zip(shares, weights, strict=True))
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7, err_msg=str(path))


def test_lives_where_the_parameters_live(trained):
    state, _ = trained
    average = optax.tree_utils.tree_get(state.opt_state, "averaged_params")
    jax.tree.map(lambda a, p: (a.sharding == p.sharding) or pytest.fail("elsewhere"), average, state.params)


@pytest.mark.slow
def test_is_restored_and_read_alone(trained, tmp_path):
    state, _ = trained
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, state, Record())
        checkpoints.wait()
    case, batch = CASES["nnx"], CASES["nnx"].batches(ROWS, 1)[0]
    wanted = zerojax.gather_params(zerojax.averaged(state))
    again = restore(tmp_path / "4", case.begin(optimizer(), nodes=3, local=2, **DELTA))
    alone = restore(tmp_path / "4", case.begin(optax.identity(), nodes=2, local=2, **DELTA), average=True)
    for found in (zerojax.averaged(again), alone):
        jax.tree.map(np.testing.assert_array_equal, zerojax.gather_params(found), wanted)
    # A run that goes on averages on.
    found, expected = (
        masters(zerojax.averaged(zerojax.train_step(s, batch)[0]))
        for s in (again, jax.tree.map(jnp.copy, state))
    )
    assert distance(found, expected) < 1e-3
    # The secondary copies are of the average, too: the loss is that of a model with these weights.
    fresh = zerojax.put_params(case.begin(optax.identity(), nodes=2, local=2, **DELTA), wanted)
    found, expected = zerojax.eval_step(alone, batch), zerojax.eval_step(fresh, batch)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_without_one(tmp_path):
    case = CASES["nnx"]
    state = case.begin(optax.adam(1e-2), nodes=1, local=2)
    with pytest.raises(zerojax.ZeroError, match="there is no average of the weights"):
        zerojax.averaged(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, Record())
        checkpoints.wait()
    with pytest.raises(zerojax.ZeroError, match="has no average of the weights"):
        restore(tmp_path / "1", case.begin(optax.identity(), nodes=1, local=2), average=True)


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_begins_when_it_is_asked_for(nested, tmp_path):
    """A run that goes on with an average has that of the steps since."""
    case = CASES["nnx"]
    plain = optax.chain(optax.scale_by_adam(), optax.scale(-1e-2))
    parts = [plain] if nested else [optax.scale_by_adam(), optax.scale(-1e-2)]
    with_average = optax.chain(*parts, zerojax.average_weights(DECAY))
    state = case.begin(plain, nodes=1, local=2)
    batches = case.batches(ROWS, 2)
    state, _ = zerojax.train_step(state, batches[0])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, Record())
        checkpoints.wait()
    state = restore(tmp_path / "1", case.begin(with_average, nodes=1, local=2))
    with pytest.raises(zerojax.ZeroError, match="before the first step"):
        zerojax.averaged(state)
    state, _ = zerojax.train_step(state, batches[1])
    found, wanted = masters(zerojax.averaged(state)), masters(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted)


def test_it_comes_last():
    early = optax.chain(zerojax.average_weights(0.9), optax.adam(1e-2))
    with pytest.raises(zerojax.ZeroError, match="come last"):
        CASES["nnx"].create(early, nodes=1, local=1)
    with pytest.raises(zerojax.ZeroError, match=r"zerojax\.chain"):
        optax.chain(zerojax.scale_by_muon(), optax.scale(-0.1))  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_a_decay_that_cannot_be(decay):
    with pytest.raises(zerojax.ZeroError, match="must lie between 0 and 1"):
        zerojax.average_weights(decay)
