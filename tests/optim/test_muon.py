"""Muon on shards against optax's Muon on whole leaves, on meshes that divide nothing."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from core_models import CASES
from optax import contrib
from plain_loop import distance, masters, plain_loop, plain_model

import zerojax
from zerojax.run.checkpoints import Checkpoints, Record, restore
from zerojax.run.checkpoints.canonical import to_canonical

ROWS = 24
RATE = optax.linear_schedule(0.05, 0.01, 4)


def whole_muon(stacked: bool) -> optax.GradientTransformation:
    """optax's own, told which axes are a matrix's: the last two of every kernel."""

    def dims(params: Any) -> Any:
        def one(path: Any, x: Any) -> Any:
            in_stack = stacked and "stack" in jax.tree_util.keystr(path)
            if x.ndim - in_stack != 2:
                return None
            return contrib.MuonDimensionNumbers(in_stack, in_stack + 1)

        return jax.tree_util.tree_map_with_path(one, params)

    return contrib.muon(
        RATE,
        adam_b2=0.95,
        nesterov=True,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=dims,
    )


def sharded_muon() -> Any:
    return zerojax.chain(zerojax.scale_by_muon(), optax.scale_by_learning_rate(RATE))


def plain_rest(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """optax's Muon uses Nesterov for Adam's leaves too; here they are compared with plain Adam."""

    def labels(params: Any) -> Any:
        def one(path: Any, x: Any) -> str:
            in_stack = "stack" in jax.tree_util.keystr(path)
            return "muon" if x.ndim - in_stack == 2 else "adam"

        return jax.tree_util.tree_map_with_path(one, params)

    return optax.partition({"muon": tx, "adam": optax.adam(RATE, 0.9, 0.95)}, labels)


@pytest.mark.parametrize(
    ("name", "nodes", "local", "zero"),
    [
        ("nnx", 3, 2, {}),
        ("stack", 2, 4, {}),
        ("stack", 2, 2, {"stage": 0}),
        ("awkward", 2, 2, {"stage": 2}),
    ],
)
def test_sharded_steps_equal_whole_ones(name, nodes, local, zero):
    case = CASES[name]
    batches = case.batches(ROWS, 4)
    plain = plain_model(name)
    losses, wanted = plain_loop(plain, plain_rest(whole_muon(name == "stack")), batches)
    state = case.start(sharded_muon(), plain.weights, nodes=nodes, local=local, **zero)
    found = []
    for batch in batches:
        state, metrics = zerojax.train_step(state, batch)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=2e-4)
    assert distance(masters(state), wanted) < 1e-3


def test_its_bytes_are_reported():
    """Each element of a matrix crosses twice; of 2 nodes, half of the elements go to the other."""
    case = CASES["stack"]
    state = case.create(sharded_muon(), nodes=2, local=2)
    report = zerojax.comm_report(state, case.batches(ROWS, 1)[0])
    world, sent = 4, 0
    for leaf in state.spec.leaves:
        if len(leaf.shape) == 2:
            sent += 2 * -(-leaf.layers // world) * world * leaf.shard * 4 // 2
    _, between_nodes = report.phases()["optimizer"]
    # Leaves of one shape are dealt out together, so that padding to whole devices is shared.
    assert 0.5 * sent <= between_nodes <= sent


@pytest.mark.slow
def test_its_state_is_restored_on_another_mesh(tmp_path):
    case = CASES["stack"]
    state = case.create(sharded_muon(), nodes=2, local=2)
    for batch in case.batches(ROWS, 2):
        state, _ = zerojax.train_step(state, batch)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, Record())
        checkpoints.wait()
    other = restore(tmp_path / "2", case.create(sharded_muon(), nodes=3, local=1))
    expected, found = to_canonical(state), to_canonical(other)
    jax.tree.map(np.testing.assert_array_equal, found["optimizer"], expected["optimizer"])
    (batch,) = case.batches(ROWS, 1)
    _, first = zerojax.train_step(state, batch)
    _, second = zerojax.train_step(other, batch)
    np.testing.assert_allclose(first["loss"], second["loss"], rtol=1e-5)
