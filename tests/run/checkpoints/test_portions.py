"""Checkpoints of what is in host memory, written and read in portions."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import numpy as jnp

import zerojax
from zerojax.errors import RunError, ZeroError
from zerojax.run.checkpoints import Checkpoints, Record, portions, restore, store
from zerojax.run.checkpoints.canonical import to_canonical
from zerojax.sharding.memory import HOST
from zerojax.train import state as train_state
from zerojax.train.state import TrainState
from zerojax.zero_config import ZeroConfig

WIDTH = 24
ADAMW = optax.adamw(1e-2)  # one for all, which is checked once
BATCH = np.random.default_rng(0).standard_normal((48, WIDTH), np.float32)


class Model(nnx.Module):
    """A stack whose rows 8 devices share and one whose rows they do not, and weights in no stack."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = zerojax.Stack(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs), 6, rngs=rngs)
        self.odd = zerojax.Stack(lambda rngs: nnx.LoRA(WIDTH, 5, WIDTH, rngs=rngs), 4, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)
        self.scale = nnx.Param(jnp.float32(1.5))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.tanh(self.blocks(x))
        return self.head(x + self.odd(x)) * self.scale[...]


def loss(model: Model, batch: jax.Array) -> jax.Array:
    return (model(batch) ** 2).mean()


def make(mesh: tuple[int, int], *, abstract: bool = False, preset: Any = "zero3", **zero: Any) -> TrainState:
    create = TrainState.abstract if abstract else TrainState.create
    settings = ZeroConfig.preset(preset, compute_dtype="float32", **zero)
    return create(Model, ADAMW, loss, mesh=zerojax.make_mesh(*mesh), zero=settings)


def host(tree: Any) -> dict[str, np.ndarray]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def assert_same(found: TrainState, expected: dict[str, np.ndarray]) -> None:
    have = host(to_canonical(found))
    assert have.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(have[name], value, err_msg=name)


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "fit_beside_host_state", lambda _: False)
    monkeypatch.setattr(portions, "PORTION", 1 << 15)  # two layers of the first stack's kernel at a time


@pytest.mark.usefixtures("short_of_memory")
@pytest.mark.parametrize(
    ("mesh", "preset"), [((1, 1), "zero3"), ((2, 4), "delta"), pytest.param((3, 2), "zero++", marks=pytest.mark.slow)]
)
def test_goes_on_where_it_stopped(
    mesh: tuple[int, int], preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    zero = {"preset": preset, "host": ("optimizer",)}
    state, _ = zerojax.train_step(make(mesh, **zero), BATCH)
    kept = host(to_canonical(state))
    with Checkpoints(tmp_path, say=said.append) as checkpoints:
        checkpoints.save(1, state, Record())
        state, metrics = zerojax.train_step(state, BATCH)
        checkpoints.save(2, state, Record())
    assert len(said) == 1
    assert "training waits" in said[0]

    encoded = []
    first_encoded = train_state.first_encoded
    with monkeypatch.context() as patch:
        patch.setattr(train_state, "first_encoded", lambda *args: encoded.append(1) or first_encoded(*args))
        again = restore(tmp_path / "1", make(mesh, abstract=True, **zero))
    assert len(encoded) == 1
    assert {x.sharding.memory_kind for x in jax.tree.leaves(again.params)} == {HOST}
    assert_same(again, kept)
    again, found = zerojax.train_step(again, BATCH)
    assert found["loss"] == metrics["loss"]
    assert_same(again, host(to_canonical(state)))

    plain = restore(tmp_path / "1", make(mesh, abstract=True, preset=preset))
    assert_same(plain, kept)
    with Checkpoints(tmp_path / "plain") as checkpoints:
        checkpoints.save(1, plain, Record())
    assert_same(restore(tmp_path / "plain" / "1", make(mesh, abstract=True, **zero)), kept)
