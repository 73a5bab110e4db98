"""Checkpoints of local updates: the same nodes go on to the bit, others begin with the outer weights."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util

import zerojax
from zerojax.run.checkpoints import Checkpoints, Record, restore, restore_base, restore_weights
from zerojax.run.checkpoints.canonical import to_canonical
from zerojax.run.checkpoints.conversion import abstract_part, convert
from zerojax.run.checkpoints.entries import entries_of

ADAMW = optax.adamw(1e-2)
AVERAGED = optax.chain(ADAMW, zerojax.average_weights(0.5))
LOCAL: dict[str, Any] = {"name": "local", "every": 3, "block_size": 64}
Tree = dict[str, np.ndarray]


class Model(nnx.Module):
    """A stack, sizes that divide nothing and some that do, and a scalar."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = zerojax.Stack(lambda rngs: nnx.Linear(13, 13, rngs=rngs), 3, rngs=rngs)
        self.gain = nnx.Param(jnp.asarray(0.7))
        self.even = nnx.Param(jnp.linspace(-1, 1, 256).reshape(16, 16))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.gain[...] * jnp.tanh(self.blocks(x) + self.even[...].std())


def loss(model: Model, batch: jax.Array) -> jax.Array:
    return jnp.mean((model(batch) - 1) ** 2)


def make(nodes: int, local: int, *, filled: bool = False, tx: Any = AVERAGED, **zero: Any) -> Any:
    create = zerojax.TrainState.create if filled else zerojax.TrainState.abstract
    settings = zerojax.ZeroConfig.preset(zero.pop("name", "zero3"), compute_dtype="float32", **zero)
    spikes = zerojax.SpikeRule(9.0, 4)
    return create(Model, tx, loss, mesh=zerojax.make_mesh(nodes, local), zero=settings, spikes=spikes)


def step(state: Any, number: int) -> tuple[Any, float]:
    batch = np.random.default_rng(number).standard_normal((8, 13), np.float32)
    batch[:4] *= 0.1  # the nodes learn different things
    state, metrics = zerojax.train_step(state, batch)
    return state, float(metrics["loss"])


def host(state: Any) -> Tree:
    flat = traverse_util.flatten_dict(to_canonical(state), sep="/")
    return {name: np.asarray(x) for name, x in flat.items()}


def assert_same(found: Tree, expected: Tree, *kinds: str) -> None:
    for name in (name for name in expected if not kinds or name.startswith(kinds)):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def assert_mean_of_nodes(found: Tree, kept: Tree) -> None:
    for name in (name for name in found if name.startswith("params/")):
        own = kept[name.replace("params", "nodes/weights", 1)]
        np.testing.assert_allclose(found[name], own.mean(axis=0), rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.fixture(scope="module")
def trained() -> Any:
    state = make(2, 4, filled=True, **LOCAL)
    for number in range(4):
        state, _ = step(state, number)
    return state


@pytest.fixture(scope="module")
def saved(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(4, trained, Record())
    return folder / "4"


@pytest.fixture(scope="module")
def kept(trained: Any) -> Tree:
    return host(trained)


def test_every_nodes_own_is_saved(kept, trained):
    kinds = {name.partition("/")[0] for name in kept}
    assert kinds >= {"params", "optimizer", "average", "residual", "losses", "nodes", "outer"}
    own = kept["nodes/weights/blocks/block/kernel"]
    assert own.shape == (2, 3, 13, 13)
    assert (own[0] != own[1]).any()
    assert kept["nodes/weights/gain"].shape == (2,)
    assert kept["residual/blocks/block/kernel"].shape == (2, 3, 13, 13)
    assert kept["residual/blocks/block/kernel"].any()
    assert kept["outer/momentum/blocks/block/kernel"].any()
    np.testing.assert_array_equal(
        kept["params/blocks/block/kernel"], zerojax.gather_params(trained)["blocks"]["block"]["kernel"]
    )


class Rows(nnx.Module):
    """12 rows, without padding: the 4 devices of a node share them evenly, all 8 do not."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jnp.arange(12.0 * 256).reshape(12, 256))


def test_a_nodes_own_rows_are_saved_without_sending(monkeypatch):
    exact = {"weights": "fp32", "grads": ("fp32", "fp32"), "rotation": 0, "error_feedback": False}
    state = zerojax.TrainState.create(
        Rows,
        ADAMW,
        lambda model, batch: jnp.sum(model.kernel[...]) * batch.mean(),
        mesh=zerojax.make_mesh(2, 4),
        zero=zerojax.ZeroConfig.preset("local", every=3, stage=2, **exact),
    )
    own = entries_of(state)["nodes/weights/kernel"]
    assert own.leaf is not None
    like = abstract_part(state.spec, own.leaf, nodes=(2,))
    with monkeypatch.context() as patch:
        patch.setattr(jax.lax, "all_gather", lambda *_, **__: pytest.fail("a save sends rows"))
        rows = convert(state.spec, own.leaf, own.x, like, by_node=True, to_nodes=True)
    assert rows.addressable_shards[0].data.shape == (1, 3, 256)
    np.testing.assert_array_equal(rows, [np.arange(12.0 * 256).reshape(12, 256)] * 2)


@pytest.mark.slow
def test_the_same_nodes_go_on_to_the_bit(saved, kept):
    said: list[str] = []
    again = restore(saved, make(2, 4, **LOCAL), say=said.append)
    assert_same(host(again), kept)
    whole = make(2, 4, filled=True, **LOCAL)
    wanted = []
    for number in range(6):
        whole, value = step(whole, number)
        wanted.append(value)
    found = []
    for number in range(4, 6):
        again, value = step(again, number)
        found.append(value)
    assert found == wanted[4:]
    assert_same(host(again), host(whole))
    # Nodes of another number of devices have the same values.
    moved = restore(saved, make(2, 1, **LOCAL), say=said.append)
    assert_same(host(moved), kept)
    other = make(2, 1, **LOCAL | {"every": 5, "block_size": 128, "outer_momentum": 0.0})
    found = host(restore(saved, other, say=said.append))
    assert_same(found, {name: x for name, x in kept.items() if not name.startswith("outer/")})
    assert not said


@pytest.mark.slow
def test_other_nodes_begin_with_the_outer_weights(saved, kept):
    said: list[str] = []
    state = restore(saved, make(3, 1, **LOCAL), say=said.append)
    found = host(state)
    assert "saved by 2 nodes with local updates, and this run has 3" in said[0]
    assert_same(found, kept, "params/", "outer/", "counters/")
    for name, x in found.items():
        if name.startswith(("optimizer/", "average/")):
            combine = np.mean if np.issubdtype(x.dtype, np.inexact) else np.max
            for own in x:
                np.testing.assert_allclose(own, combine(kept[name], axis=0), rtol=1e-6, err_msg=name)
        elif name.startswith("nodes/weights/"):
            for own in x:
                np.testing.assert_array_equal(
                    own, kept[name.replace("nodes/weights", "params")], err_msg=name
                )
        elif name.startswith("nodes/known/"):
            np.testing.assert_array_equal(x, kept[name.replace("nodes/known", "params")], err_msg=name)
    assert not found["residual/blocks/block/kernel"].any()


@pytest.mark.slow
def test_to_another_preset_and_back(saved, kept, tmp_path):
    said: list[str] = []
    plain = restore(saved, make(1, 2), say=said.append)
    found = host(plain)
    assert "the outer momentum, are lost" in said[0]
    assert_same(found, kept, "params/")
    moments = [name for name in found if name.startswith(("optimizer/", "average/"))]
    for name in moments:
        combine = np.mean if np.issubdtype(found[name].dtype, np.inexact) else np.max
        np.testing.assert_allclose(found[name], combine(kept[name], axis=0), rtol=1e-6, err_msg=name)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, plain, Record())
    back = host(restore(tmp_path / "4", make(2, 2, **LOCAL), say=said.append))
    assert "without local updates: all 2 nodes begin" in said[1]
    for name in (*moments, *(name for name in back if name.startswith("nodes/weights/"))):
        for own in back[name]:
            np.testing.assert_array_equal(own, found[name.replace("nodes/weights", "params")], err_msg=name)


def test_inference_reads_the_mean_of_the_nodes_own_weights(saved, kept):
    state = restore(saved, make(2, 1, tx=None, **LOCAL), say=pytest.fail)
    assert state.local is None
    assert not state.residual
    assert_mean_of_nodes(host(state), kept)
    averaged = restore(saved, make(1, 2, tx=None), average=True)
    np.testing.assert_allclose(host(averaged)["params/gain"], kept["average/params/gain"].mean(), rtol=1e-6)


def test_a_new_run_begins_with_that_mean(saved, kept):
    found = host(restore_weights(saved, make(2, 1, filled=True, **LOCAL)))
    assert_mean_of_nodes(found, kept)
    for name in (name for name in found if name.startswith("params/")):
        for own in found[name.replace("params", "nodes/weights", 1)]:
            np.testing.assert_array_equal(own, found[name], err_msg=name)
    assert not found["outer/momentum/blocks/block/kernel"].any()


@pytest.mark.slow
def test_frozen_weights_are_that_mean(saved, kept):
    zero = {"frozen": ("even", "blocks/*")}
    found = zerojax.gather_params(restore_base(saved, make(1, 2, filled=True, **zero)))
    np.testing.assert_allclose(found["even"], kept["nodes/weights/even"].mean(axis=0), rtol=1e-6)


@pytest.mark.slow
def test_the_mean_of_the_nodes_in_a_program_of_ones_own():
    state = make(2, 2, filled=True, tx=ADAMW, **LOCAL)
    for number in range(3):
        state, _ = step(state, number)
    assert_mean_of_nodes(host(zerojax.averaged(state)), host(state))
