"""Muon on shards against optax's Muon on whole leaves, on meshes that divide nothing; what it sends."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import CASES, squared_error
from flax import nnx
from plain_loop import Plain, by_path, distance, masters, plain_loop, plain_model
from plain_muon import plain_muon
from wire_models import abstract_state, batch_of

import zerojax
from zerojax.optim.muon import MomentumState
from zerojax.run.checkpoints import Checkpoints, Record, restore
from zerojax.run.checkpoints.canonical import to_canonical
from zerojax.sharding.layout import from_stored, to_stored
from zerojax.sharding.param_tree import from_tree, to_tree
from zerojax.zero_config.config import PRESETS, Preset

ROWS = 24
RATE = optax.linear_schedule(0.05, 0.01, 4)


def sharded_muon() -> Any:
    return zerojax.chain(zerojax.scale_by_muon(), optax.scale_by_learning_rate(RATE))


@pytest.mark.parametrize(
    ("name", "nodes", "local", "zero"),
    [
        ("nnx", 3, 2, {}),
        pytest.param("stack", 2, 4, {"hpz": True}, marks=pytest.mark.slow),
        pytest.param(
            "stack",
            4,
            2,
            {"accumulate": 3, "grad_sync": "step", "weights_delta": True, "hpz": True},
            marks=pytest.mark.slow,
        ),
        pytest.param("awkward", 2, 2, {"stage": 2}, marks=pytest.mark.slow),
        pytest.param("stack", 1, 1, {}, marks=pytest.mark.slow),
        pytest.param("stack", 2, 2, {"stage": 0}, marks=pytest.mark.slow),
        pytest.param("stack", 2, 2, {"matrix_spread": "world"}, marks=pytest.mark.slow),
        pytest.param("awkward", 2, 1, {"accumulate": 2, "grads_hops": 1}, marks=pytest.mark.slow),
        pytest.param("stack", 2, 2, {"chunks": 2}, marks=pytest.mark.slow),
    ],
)
def test_sharded_steps_equal_whole_ones(name, nodes, local, zero):
    case = CASES[name]
    batches = case.batches(ROWS, 4)
    plain = plain_model(name)
    losses, wanted = plain_loop(plain, plain_muon(RATE), batches)
    state = case.start(sharded_muon(), plain.weights, nodes=nodes, local=local, **zero)
    found = []
    for batch in batches:
        state, metrics = zerojax.train_step(state, batch)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=2e-4)
    assert distance(masters(state), wanted) < (1e-3 if zero.get("stage") else 1e-6)


class Mixture(nnx.Module):
    """Experts in a stack, beside matrices of a shape of their own."""

    def __init__(self, rngs: nnx.Rngs):
        def block(rngs: nnx.Rngs) -> nnx.Module:
            return nnx.Dict(mixture=zerojax.Experts(5, 3, experts=4, per_token=2, biases=True, rngs=rngs))

        self.stack = zerojax.Stack(block, 3, rngs=rngs)


@pytest.mark.parametrize(
    "zero",
    [pytest.param({"matrix_spread": "world"}, marks=pytest.mark.slow), {}, {"experts": "gathered"}],
    ids=str,
)
def test_each_expert_has_matrices_of_its_own(zero):
    mesh = zerojax.make_mesh(2, 2)
    options = zerojax.ZeroConfig(compute_dtype="float32", **zero)
    state = zerojax.TrainState.abstract(Mixture, sharded_muon(), squared_error, mesh=mesh, zero=options)
    spec, rng = state.spec, np.random.default_rng(0)
    assert {leaf.parts for leaf in spec.leaves if leaf.of_experts} == {1 if "experts" in zero else 2}
    whole = {leaf.path: rng.standard_normal(leaf.unsharded_shape, np.float32) for leaf in spec.leaves}
    places = {leaf.path: spec.sharding(spec.param_spec(leaf)) for leaf in spec.leaves}
    stored = {
        leaf.path: jax.device_put(to_stored(jnp.asarray(whole[leaf.path]), leaf), places[leaf.path])
        for leaf in spec.leaves
    }

    def updates(tx: optax.GradientTransformation, grads: Any) -> Any:
        return tx.update(grads, tx.init(grads), grads)[0]

    assert spec.tx is not None
    found = from_tree(jax.jit(partial(updates, spec.tx))(to_tree(stored)))
    wanted = from_tree(jax.jit(partial(updates, plain_muon(RATE)))(to_tree(whole)))
    for leaf in spec.leaves:
        mine = from_stored(found[leaf.path], leaf)
        np.testing.assert_allclose(mine, wanted[leaf.path], atol=1e-5, err_msg=leaf.name)


def penalised(model: Any, batch: Any) -> jax.Array:
    return squared_error(model, batch) + 0.05 * zerojax.weight_sum(model, paths="*kernel")


@pytest.mark.slow
@pytest.mark.parametrize("zero", [{"accumulate": 2, "grad_sync": "step"}, {}, {"accumulate": 2}])
def test_a_penalty_of_matrices_that_every_node_holds_counts_once(zero):
    case = dataclasses.replace(CASES["stack"], loss=penalised)
    plain, batches = Plain(case), case.batches(ROWS, 2)
    losses, wanted = plain_loop(plain, plain_muon(RATE), batches)
    state = case.start(sharded_muon(), plain.weights, nodes=3, local=2, **zero)
    for batch, loss in zip(batches, losses, strict=True):
        state, metrics = zerojax.train_step(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert distance(masters(state), wanted) < 1e-6


@pytest.mark.parametrize(
    ("preset", "nodes", "local", "wanted"),
    [
        pytest.param("zero++", 3, 2, 1, marks=pytest.mark.slow),
        ("delta", 2, 4, 1),
        pytest.param("zero3", 2, 4, 0.752, marks=pytest.mark.slow),
        pytest.param("zero++", 2, 4, 1, marks=pytest.mark.slow),
        pytest.param("delta", 3, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_nodes_exchange_no_more_than_with_adamw(preset: Preset, nodes: int, local: int, wanted: float):
    """A matrix's gradient crosses once more, and its weight not at all (zero3's in three layers: 2 2/3)."""

    def between_nodes(tx: Any) -> float:
        state = abstract_state("stacked", zerojax.make_mesh(nodes, local), zero, width=64, hidden=256, tx=tx)
        report = zerojax.comm_report(state, batch_of(nodes * local))
        assert report.phases().get("optimizer", (0, 0))[1] == 0
        return report.between_nodes

    zero = zerojax.ZeroConfig.preset(preset)
    assert between_nodes(sharded_muon()) / between_nodes(optax.adamw(1e-3)) == pytest.approx(wanted, 1e-2)


@pytest.mark.parametrize(
    ("preset", "zero", "error"),
    [
        ("delta", {"rotation": 0, "rounding": "nearest"}, 0.3),  # compiled in less time
        pytest.param("delta", {}, 0.3, marks=pytest.mark.slow),
        pytest.param("delta", {"accumulate": 2, "error_feedback": True}, 0.3, marks=pytest.mark.slow),
        pytest.param("zero++", {"accumulate": 2}, 0.2, marks=pytest.mark.slow),
        pytest.param("zero++", {"accumulate": 2, "accumulate_order": "breadth"}, 0.2, marks=pytest.mark.slow),
    ],
)
def test_nodes_stay_bit_identical(preset: Preset, zero: dict[str, Any], error: float):
    """All nodes decode the same bytes; and what they decode is the gradient, but for rounding."""
    case, plain = CASES["stack"], plain_model("stack")
    options = PRESETS[preset] | zero
    state = case.start(sharded_muon(), plain.weights, nodes=3, local=2, **options)
    first, *batches = case.batches(ROWS, 3)
    wanted = by_path(jax.jit(jax.grad(plain.loss))(plain.weights, first))
    state, _ = zerojax.train_step(state, first)
    states = jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, MomentumState))
    (momentum,) = (x for x in states if isinstance(x, MomentumState))
    leaves = {leaf.path: leaf for leaf in state.spec.leaves}
    matrices = [path for path, leaf in leaves.items() if len(leaf.shape) == 2]
    assert matrices == [path for path, leaf in leaves.items() if leaf.in_every_node]
    for path in matrices:
        leaf, right = leaves[path], np.asarray(wanted[path])
        found = np.asarray(by_path(momentum.mu)[path]).reshape(leaf.layers, -1)[:, : leaf.size] / 0.05
        assert np.linalg.norm(found.reshape(right.shape) - right) < error * np.linalg.norm(right)
    for batch in batches:
        state, _ = zerojax.train_step(state, batch)
    for path, x in by_path(state.params).items():
        parts: dict[str, list[np.ndarray]] = {}
        for shard in x.addressable_shards:
            parts.setdefault(str(shard.index), []).append(np.asarray(shard.data).view(np.uint32))
        assert {len(same) for same in parts.values()} == {3 if path in matrices else 1}
        for one, *others in parts.values():
            for same in others:
                np.testing.assert_array_equal(one, same)


def test_its_bytes_are_reported():
    """Each element of a matrix crosses twice; of 2 nodes, half of the elements go to the other."""
    case = CASES["stack"]
    state = case.abstract(sharded_muon(), nodes=2, local=2, matrix_spread="world")
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
    case = CASES["gpt-tied"]  # whose matrices are cut by rows on four devices, and not on three
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
