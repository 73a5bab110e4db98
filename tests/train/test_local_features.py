"""Local updates with what else a state may have: frozen weights, adapters, averages, batch statistics."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from core_models import CASES, Case, Normed, NormedModel, in_fp32, regression_batch, squared_error
from plain_loop import distance

import zerojax

SGD = optax.sgd(0.01)
NODES: dict[str, Any] = {"every": 2, "outer_delay": 1, "block_size": 64}


def create(
    tx: Any, *, nodes: int = 2, local: int = 1, name: str = "nnx", lora: Any = None, **zero: Any
) -> Any:
    case = CASES[name]
    settings = in_fp32(**{"units": case.units} | zero)
    mesh = zerojax.make_mesh(nodes, local)
    return zerojax.TrainState.create(case.model, tx, case.loss, mesh=mesh, zero=settings, lora=lora)


def trained(state: Any, batches: list[Any]) -> tuple[Any, list[float]]:
    losses = []
    for batch in batches:
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.slow
def test_adapters_alone_are_the_nodes_own():
    """With one fragment and plain averaging it is zero3 with adapters on frozen weights."""
    batches = CASES["nnx"].batches(8, 3)
    lora = zerojax.LoRA(rank=2, alpha=2.0, targets=("*kernel",))
    both: list[dict[str, Any]] = [{"every": 1}, {}]
    runs = [create(SGD, lora=lora, frozen=("*",), local=2, **more) for more in both]
    (state, losses), (exact, wanted) = (trained(run, batches) for run in runs)
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    assert distance(zerojax.gather_adapters(state), zerojax.gather_adapters(exact)) < 1e-6
    assert len(jax.tree.leaves(state.local)) == 2 * len(jax.tree.leaves(state.params)) + 2
    assert int(state.base["fingerprint"]) == int(exact.base["fingerprint"])


@pytest.mark.slow
def test_the_average_is_the_mean_of_the_nodes_averages():
    """Of those that have made an update."""
    tx = optax.chain(SGD, zerojax.average_weights(0.5))
    batch, *more = CASES["nnx"].batches(8, 4)
    bad = dict(batch, x=np.where(np.arange(8)[:, None] < 4, batch["x"], np.nan))  # of the second node
    state, _ = trained(create(tx, local=2, **NODES), [bad])
    own = optax.tree_utils.tree_get(state.opt_state, "averaged_params")
    assert distance(zerojax.averaged(state).params, jax.tree.map(lambda x: x[0], own)) < 1e-6
    state, _ = trained(state, more)
    own = optax.tree_utils.tree_get(state.opt_state, "averaged_params")
    average = zerojax.averaged(state)
    assert average.local is not None
    for found in (average.local.known, average.params):
        assert distance(found, jax.tree.map(lambda x: np.asarray(x).mean(axis=0), own)) < 1e-6
    whole = zerojax.gather_model(average)
    loss = zerojax.eval_step(average, batch)["loss"]
    np.testing.assert_allclose(loss, squared_error(whole, batch), rtol=1e-5)


def test_a_state_for_inference_has_the_outer_weights_alone():
    (batch,) = CASES["nnx"].batches(8, 1)
    state = create(None, **NODES, grads=(None, "int4"), error_feedback=True)
    assert state.local is None
    assert not state.residual
    loss = squared_error(zerojax.gather_model(state), batch)
    for reader in (state, zerojax.with_replica(state)):
        np.testing.assert_allclose(zerojax.eval_step(reader, batch)["loss"], loss, rtol=1e-5)


@pytest.mark.slow
def test_a_node_that_is_not_finite_leaves_batch_statistics_as_they_were():
    case = Case(NormedModel, squared_error, (Normed,), regression_batch)
    state = case.create(SGD, nodes=2, local=1, **NODES)
    bad, good = case.batches(8, 2)
    bad["x"][4:] = np.nan
    before = jax.tree.map(np.asarray, state.model_state)
    state, _ = zerojax.train_step(state, bad)
    jax.tree.map(np.testing.assert_array_equal, state.model_state, before)
    state, _ = zerojax.train_step(state, good)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.model_state))
    assert any(
        (x != y).any() for x, y in zip(jax.tree.leaves(state.model_state), before.values(), strict=True)
    )
