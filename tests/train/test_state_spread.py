"""Every node holds all master weights and moments, spread over its devices (``state_spread="node"``)."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from core_models import CASES
from plain_loop import by_path, distance, masters, plain_loop, plain_model

import zerojax
from zerojax.run.checkpoints import Checkpoints, Record, restore
from zerojax.run.checkpoints.canonical import abstract_canonical, to_canonical
from zerojax.zero_config.config import PRESETS, Preset

ROWS = 24
SLOW = pytest.mark.slow
DELTA = PRESETS["delta"] | {"block_size": 64}


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("awkward", (3, 2), {}),
        pytest.param("stack", (2, 4), {"hpz": True, "accumulate": 3}, marks=SLOW),
        pytest.param("stack", (4, 2), {"hpz": True, "weights_delta": True, "grad_sync": "step"}, marks=SLOW),
        pytest.param("stack", (2, 2), {"accumulate": 3, "accumulate_order": "breadth"}, marks=SLOW),
        pytest.param("linen", (2, 2), {"remat": "none"}, marks=SLOW),
        pytest.param("nnx", (1, 1), {}, marks=SLOW),
    ],
    ids=str,
)
def test_it_trains_like_optax_on_whole_weights(
    name: str, mesh: tuple[int, int], options: dict[str, Any]
) -> None:
    nodes, local = mesh
    batches, plain = CASES[name].batches(ROWS, 4), plain_model(name)
    losses, wanted = plain_loop(plain, optax.adamw(1e-2), batches)
    given: dict[str, Any] = {"nodes": nodes, "local": local, "state_spread": "node", **options}
    state = CASES[name].start(optax.adamw(1e-2), plain.weights, **given)
    assert all(leaf.in_every_node == (nodes > 1) for leaf in state.spec.leaves)
    found = []
    for batch in batches:
        state, metrics = zerojax.train_step(state, batch)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=2e-5)
    assert distance(masters(state), wanted) < 1e-5


@pytest.mark.slow
def test_the_state_may_be_in_host_memory() -> None:
    case, after = CASES["stack"], []
    for host in ((), ("optimizer",)):
        state = case.create(optax.adamw(1e-2), nodes=2, local=2, state_spread="node", host=host)
        for batch in case.batches(ROWS, 2):
            state, _ = zerojax.train_step(state, batch)
        after.append(masters(state))
    assert distance(*after) < 1e-6


@pytest.mark.parametrize(
    "options",
    [{"rotation": 0, "rounding": "nearest"}, pytest.param({"error_feedback": True}, marks=SLOW)],
    ids=str,
)
def test_nodes_stay_bit_identical_in_int4(options: dict[str, Any]) -> None:
    case = CASES["stack"]
    state = case.begin(optax.adamw(1e-2), nodes=3, local=2, state_spread="node", **DELTA | options)
    assert not state.replicas, "no node needs a replica of its own weights"
    for batch in case.batches(ROWS, 2):
        state, metrics = zerojax.train_step(state, batch)
        assert np.isfinite(metrics["loss"])
    for x in by_path(state.params).values():
        of_nodes: dict[str, list[bytes]] = {}
        for shard in x.addressable_shards:
            of_nodes.setdefault(str(shard.index), []).append(np.asarray(shard.data).tobytes())
        assert all(same == [same[0]] * 3 for same in of_nodes.values())


@pytest.mark.parametrize(
    ("preset", "wanted"),
    [("zero3", 2 / (3 - 1 / 3)), pytest.param("zero++", 1, marks=pytest.mark.slow), ("delta", 1)],
)
def test_nodes_send_no_more(preset: Preset, wanted: float) -> None:
    """Gradient sums go to all nodes, and not weights, which zero3 sends twice (the last layer once)."""
    case = CASES["stack"]
    options = {"nodes": 3, "local": 2, **PRESETS[preset], "block_size": 64}
    tx, (batch,) = optax.adamw(1e-2), case.batches(ROWS, 1)
    spread, whole = (case.abstract(tx, state_spread=to, **options) for to in ("world", "node"))
    sent = zerojax.comm_report(whole, batch).between_nodes
    assert sent == pytest.approx(wanted * zerojax.comm_report(spread, batch).between_nodes, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("node", "world"), ("world", "node")])
def test_checkpoints_fit_other_spreads_and_meshes(tmp_path: Path, first: Any, second: Any) -> None:
    case, tx = CASES["gpt-tied"], optax.adamw(1e-2)
    state = case.create(tx, nodes=2, local=2, state_spread=first)
    for batch in case.batches(ROWS, 2):
        state, _ = zerojax.train_step(state, batch)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, Record())
        checkpoints.wait()
    other = restore(tmp_path / "2", case.create(tx, nodes=3, local=1, state_spread=second))
    jax.tree.map(np.testing.assert_array_equal, to_canonical(other), to_canonical(state))


def test_the_devices_of_a_node_hold_a_whole_checkpoint() -> None:
    state = CASES["gpt-tied"].abstract(optax.adamw(1e-2), nodes=2, local=2, state_spread="node")
    for x in jax.tree.leaves(abstract_canonical(state)):
        places = x.sharding.devices_indices_map(x.shape)
        in_node = {places[device] for device in state.spec.mesh.devices[1]}
        assert in_node == {*places.values()}
