"""The resume matrix: every stage, preset and kind of state, on the same mesh and on others."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.run.checkpoints import Checkpoints, Record, restore
from zerojax.run.checkpoints.canonical import to_canonical
from zerojax.train.state import TrainState
from zerojax.zero_config import ZeroConfig

CONFIGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "zero3": {"preset": "zero3"},
    "zero3, accumulated": {"preset": "zero3", "accumulate": 2},
    "zero++": {"preset": "zero++"},
    "zero++, stochastic": {"preset": "zero++", "rounding": "stochastic"},
    "delta": {"preset": "delta"},
    "delta, all": {"preset": "delta", "accumulate": 2, "error_feedback": True, "delta_resync": 3},
}
ADAMW = optax.adamw(1e-2)  # one for all, which is checked once
OTHERS = [(4, 2), (1, 8), (3, 2)]
# The most state; the others take the same paths.
USUAL = {"delta, all": OTHERS[1:]}
GRID = [(name, USUAL[name]) for name in USUAL] + [
    pytest.param(name, OTHERS, marks=pytest.mark.slow) for name in CONFIGS
]


class Model(nnx.Module):
    """Two layers, of a size that divides nothing, with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wide = nnx.Linear(13, 43, rngs=rngs)
        self.drop = nnx.Dropout(0.5)
        self.out = nnx.Linear(43, 5, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        return self.out(self.drop(nnx.tanh(self.wide(x)), rngs=rngs))


def loss(model: Model, batch: jax.Array, rngs: nnx.Rngs) -> jax.Array:
    return (model(batch, rngs) ** 2).mean()


def create(
    nodes: int, local: int, preset: Any = "zero3", *, abstract: bool = False, **zero: Any
) -> TrainState:
    make = TrainState.abstract if abstract else TrainState.create
    settings = ZeroConfig.preset(preset, compute_dtype="float32", units=(nnx.Linear,), **zero)
    return make(Model, ADAMW, loss, mesh=zerojax.make_mesh(nodes, local), zero=settings)


def steps(state: TrainState, first: int, last: int) -> tuple[TrainState, list[float]]:
    """Steps `first` to `last`, each on a batch of its own."""
    losses = []
    for step in range(first, last + 1):
        batch = np.random.default_rng(step).standard_normal((48, 13), np.float32)
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def host(tree: Any) -> dict[str, np.ndarray]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def assert_same(found: Any, expected: Any) -> None:
    found, expected = host(found), host(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(("name", "others"), GRID)
def test_a_resumed_run_equals_one_that_was_not_interrupted(
    name: str, others: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Stop after 3 of 6 steps: on the same mesh nothing is lost; on others parameters and optimizer."""
    state, _ = steps(create(2, 4, **CONFIGS[name]), 1, 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, Record())
    kept = jax.tree.map(np.asarray, to_canonical(state))
    whole, expected = steps(state, 4, 6)

    again, losses = steps(restore(tmp_path / "3", create(2, 4, abstract=True, **CONFIGS[name])), 4, 6)
    assert losses == expected
    assert_same(to_canonical(again), to_canonical(whole))

    for nodes, local in others:
        # A mesh of one node has no node hop, and so no error to feed back to it.
        zero = CONFIGS[name] | ({"error_feedback": False} if nodes == 1 else {})
        moved = to_canonical(restore(tmp_path / "3", create(nodes, local, abstract=True, **zero)))
        for kind in ("counters", "params", "optimizer"):
            assert_same(moved[kind], kept[kind])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nodes", "local"),
    [("stage 1", 3, 2), ("delta, all", 4, 2)],
)
def test_training_goes_on_elsewhere(name: str, nodes: int, local: int, tmp_path: Path) -> None:
    """From zero++ to another mesh, stage and wire format: the losses are those of the same weights."""
    state, _ = steps(create(2, 4, "zero++"), 1, 8)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(8, state, Record())
    _, expected = steps(state, 9, 12)
    state, losses = steps(
        restore(tmp_path / "8", create(nodes, local, abstract=True, **CONFIGS[name])), 9, 12
    )
    assert int(state.step) == 12
    # Dropout, and rounding, differ between meshes.
    np.testing.assert_allclose(losses, expected, rtol=0.35)
