"""What a program sets in a state by hand: a learning rate, counters, batch statistics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import CASES
from flax import nnx
from plain_loop import distance, masters

import zerojax
from zerojax import ZeroError, checkpoints
from zerojax.train.state import settled

CASE = CASES["stack"]
TX = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)


@pytest.mark.slow
def test_numbers_are_saved_and_trained_with_as_arrays(tmp_path):
    state = CASE.create(TX, nodes=2, local=2)
    first, second = CASE.batches(8, 2)
    assert settled(state) is state
    state, _ = zerojax.train_step(state, first)
    assert settled(state) is state
    wanted = masters(state)
    state.opt_state.hyperparams["learning_rate"] = 0.0
    state = state.replace(step=7, seed=np.int64(3), skipped_in_row=jnp.int8(0))
    assert "step 7, seed 3" in repr(state)
    with checkpoints.Checkpoints(tmp_path) as store:
        store.save(7, state, checkpoints.Record())
    found = checkpoints.resume(tmp_path, CASE.abstract(TX, nodes=2, local=2))
    assert found is not None
    for one in (state, found.state):
        after, _ = zerojax.train_step(one, second)
        assert distance(masters(after), wanted) == 0
        assert int(after.step) == 8
        assert (after.step.dtype, after.seed.dtype) == (jnp.int32, jnp.uint32)


def test_a_set_value_does_not_compile_the_step_again():
    state = CASE.begin(TX, nodes=1, local=1)
    (batch,) = CASE.batches(8, 1)
    state, _ = zerojax.train_step(state, batch)
    with jax.no_tracing():
        state.opt_state.hyperparams["learning_rate"] = 0.5
        state, _ = zerojax.train_step(state, batch)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("learning_rate", "fast", r"state\.opt_state\.hyperparams\.learning_rate was set to 'fast', which"),
        (
            "learning_rate",
            np.ones(2, np.float32),
            r"was set to float32\[2\], which .* its float32\[\]: set",
        ),
        ("step", 1.5, r"state\.step was set to 1\.5, which does not fit its int32\[\]"),
    ],
)
def test_refuses_what_does_not_fit(name, value, words):
    state = CASE.begin(TX, nodes=1, local=1)
    (batch,) = CASE.batches(8, 1)
    if name == "step":
        state = state.replace(step=value)
    else:
        state.opt_state.hyperparams[name] = value
    with pytest.raises(ZeroError, match=words):
        zerojax.train_step(state, batch)


def linear(zero: zerojax.ZeroConfig) -> tuple[zerojax.TrainState, dict[str, Any]]:
    state = zerojax.TrainState.create(
        lambda rngs: nnx.Linear(4, 3, rngs=rngs),
        TX,
        lambda model, batch: batch["weight"] * jnp.mean(model(batch["x"]) ** 2),
        mesh=zerojax.make_mesh(2, 2),
        zero=zero,
    )
    return state, {"x": np.ones((8, 4), np.float32), "weight": 1.0}


@pytest.mark.parametrize(
    "options",
    [
        {"host": ("optimizer",)},
        {"every": 1},
        pytest.param({"weights_delta": True, "hpz": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_weight_set_in_place_is_refused_where_arrays_were_made_of_it(options: dict[str, Any]) -> None:
    state, batch = linear(zerojax.ZeroConfig(units=(nnx.Linear,), compute_dtype="float32", **options))
    params = dict(state.params)
    state.params["kernel"] = zeros = state.params["kernel"] * 0
    for call in (zerojax.eval_step, zerojax.train_step):
        with pytest.raises(zerojax.ZeroError, match="has other weights than this state computes with"):
            call(state.replace(step=0), batch)
        with pytest.raises(zerojax.ZeroError, match=r"state\.with_params\(tree\), or zerojax\.put_params"):
            call(state.replace(params=params | {"kernel": zeros}), batch)
    replaced = state.with_params(params | {"kernel": zeros})
    assert float(zerojax.eval_step(replaced, batch)["loss"]) == 0


def test_a_weight_set_in_place_is_read_where_passes_read_masters() -> None:
    state, batch = linear(zerojax.ZeroConfig(units=(nnx.Linear,), compute_dtype="float32"))
    state.params["kernel"] = state.params["kernel"] * 0
    assert float(zerojax.eval_step(state, batch)["loss"]) == 0


def test_steps_run_under_a_guard_of_transfers() -> None:
    state, batch = linear(zerojax.ZeroConfig(units=(nnx.Linear,), compute_dtype="float32"))
    with jax.transfer_guard("disallow"):
        state.opt_state.hyperparams["learning_rate"] = 0.0
        state, metrics = zerojax.train_step(state, batch)
        found = zerojax.eval_step(state, batch | {"weight": np.float32(2)})
        assert jax.device_get(found["loss"]) == pytest.approx(2 * jax.device_get(metrics["loss"]))
