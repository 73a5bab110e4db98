"""Checkpoints: unsharded shapes, any mesh, complete or absent."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.errors import ZeroError
from zerojax.run.checkpoints import (
    Beside,
    Checkpoints,
    Record,
    Retention,
    newest_valid,
    read_manifest,
    restore,
    restore_weights,
    step_dirs,
    store,
    verify,
)
from zerojax.run.checkpoints.canonical import abstract_canonical, from_canonical, to_canonical
from zerojax.train.state import TrainState
from zerojax.zero_config import ZeroConfig

ADAMW = optax.adamw(1e-2)  # one for all, which is checked once with each model
BATCH = np.linspace(-1, 1, 8 * 13, dtype=np.float32).reshape(8, 13)


class Awkward(nnx.Module):
    """Sizes that divide nothing, a scalar, an empty leaf, a stack, a counter that is not a parameter."""

    def __init__(self, rngs: nnx.Rngs, width: int = 7) -> None:
        self.first = nnx.Linear(13, width, rngs=rngs)
        self.blocks = zerojax.Stack(lambda rngs: nnx.Linear(width, width, rngs=rngs), 3, rngs=rngs)
        self.wide = nnx.Linear(width, 24, rngs=rngs)
        self.scale = nnx.Param(jnp.float32(1.5))
        self.empty = nnx.Param(jnp.zeros((0, 4)))
        self.calls = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.wide(self.blocks(self.first(x))) * self.scale[...] + self.empty[...].sum()


def loss(model: Any, batch: Any) -> jax.Array:
    return (model(batch) ** 2).mean()


def make(
    nodes: int, local: int, model: Any = Awkward, *, abstract: bool = False, tx: Any = None, **zero: Any
) -> Any:
    mesh, settings = zerojax.make_mesh(nodes, local), ZeroConfig(compute_dtype="float32", **zero)
    create = TrainState.abstract if abstract else TrainState.create
    return create(model, tx or ADAMW, loss, mesh=mesh, zero=settings)


def host(tree: Any) -> dict[str, np.ndarray]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


RECORD = Record({"zero": {"preset": "delta"}}, {"next_index": 3}, 1, 2.5, (2, 4), {"validation_loss": 0.5})
DELTA = {"weights": "int8", "weights_delta": True, "hpz": True}


@pytest.fixture(scope="module")
def trained() -> Any:
    """Three steps on 2 x 4 with delta weights."""
    state = make(2, 4, **DELTA)
    for _ in range(3):
        state, _ = zerojax.train_step(state, BATCH)
    return state


@pytest.fixture(scope="module")
def saved(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    with Checkpoints(str(folder)) as checkpoints:
        checkpoints.save(3, trained, RECORD)
    return folder


def test_a_checkpoint_has_unsharded_shapes(trained: Any) -> None:
    tree = to_canonical(trained)
    assert tree["params"]["first"]["kernel"].shape == (13, 7)
    assert tree["params"]["blocks"]["block"]["kernel"].shape == (3, 7, 7)
    assert tree["params"]["scale"].shape == ()
    assert "empty" not in tree["params"]
    assert tree["optimizer"]["0"]["mu"]["first"]["kernel"].shape == (13, 7)
    assert tree["optimizer"]["0"]["count"].shape == ()
    assert float(tree["other"]["calls"]) == 3.0
    whole = zerojax.gather_params(trained)
    np.testing.assert_array_equal(tree["params"]["wide"]["kernel"], whole["wide"]["kernel"])
    described = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), abstract_canonical(trained))
    assert described == jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)


@pytest.mark.parametrize(
    ("nodes", "local", "zero"),
    [
        pytest.param(2, 4, DELTA, marks=pytest.mark.slow),
        (4, 2, DELTA),
        pytest.param(3, 2, {}, marks=pytest.mark.slow),
        pytest.param(1, 5, {"stage": 1}, marks=pytest.mark.slow),
        (1, 1, {"stage": 0}),
    ],
)
def test_a_checkpoint_restores_onto_any_mesh(
    saved: Path, trained: Any, nodes: int, local: int, zero: Any
) -> None:
    assert newest_valid(saved).step == 3
    assert read_manifest(saved / "3").record == RECORD
    state = restore(saved / "3", make(nodes, local, abstract=True, **zero))
    expected, found = host(to_canonical(trained)), host(to_canonical(state))
    if not zero.get("weights_delta"):
        expected = {name: x for name, x in expected.items() if "secondary" not in name}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (2, 4)])
def test_copies_outlive_the_state(nodes: int, local: int) -> None:
    state = make(nodes, local)
    tree = to_canonical(state)
    expected = host(jax.tree.map(jnp.copy, tree))
    jax.tree.map(lambda x: x.delete(), state)  # as donating it does
    for name, value in host(tree).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


class Even(nnx.Module):
    """A leaf that 8 devices share by rows."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = zerojax.Stack(lambda rngs: nnx.Linear(64, 64, rngs=rngs), 3, rngs=rngs)
        self.out = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.blocks(x))


@pytest.mark.parametrize("zero", [{}, DELTA, {"stage": 1}])
def test_sends_nothing_for_what_is_cut_by_rows(zero: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(*_: Any, **__: Any) -> None:
        raise AssertionError("a save should not cross the network")

    state = make(2, 4, Even, **zero)
    whole = host(zerojax.gather_params(state))
    with monkeypatch.context() as patch:
        patch.setattr(jax.lax, "all_gather", gather)
        tree = to_canonical(state)
        if not zero:
            from_canonical(state, tree)
    for name, value in host(tree["params"]).items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)
    assert tree["params"]["out"]["kernel"].addressable_shards[0].data.shape == (8, 32)
    again = from_canonical(make(2, 4, Even, abstract=True, **zero), tree)
    expected, found = host(tree), host(to_canonical(again))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("room", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_saves_while_training_goes_on(tmp_path: Path, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PORTION", 1 << 10)  # the state has 8 KiB
    monkeypatch.setattr(store, "_room", lambda _: 1e9 if room else 100)
    state = make(2, 4, **DELTA)
    expected = host(jax.tree.map(jnp.copy, to_canonical(state)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, RECORD)
        for _ in range(3):
            state, _ = zerojax.train_step(state, BATCH)
    found = host(to_canonical(restore(tmp_path / "1", make(2, 4, abstract=True, **DELTA))))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_one_array_at_a_time_where_memory_is_short(trained: Any) -> None:
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(to_canonical(trained, on_host=True))}
    assert kinds == {"pinned_host"}
    device = {"bytes_limit": 1000, "peak_bytes_in_use": 600}
    assert store._room([device, device | {"peak_bytes_in_use": 900}]) == 100
    assert store._room([{}]) == float("inf"), "a CPU does not say"


def test_a_save_reserves_no_more_than_a_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    state = make(2, 4, abstract=True)
    monkeypatch.setattr(store, "reserve_host_memory", lambda size, _: asked.append(size))
    store.reserve_for_saves([state])
    assert 0 < asked[0] < 1 << 16, "no more than the state, where that is less than a portion"


@pytest.mark.slow
def test_a_state_beside_another_is_restored_by_its_name(trained: Any, tmp_path: Path) -> None:
    """As PPO's critic: of other sizes and sharding, in the same checkpoint, and neither is saved alone."""
    critic = make(2, 4, lambda rngs: Awkward(rngs, width=8), stage=2)
    record = Record(beside={"critic": Beside({"a": 1}, "base")})
    skipped = critic.replace(skipped_in_row=critic.skipped_in_row + 1)
    with Checkpoints(tmp_path) as checkpoints:
        assert not checkpoints.save(3, trained, record, beside={"critic": skipped})
        assert checkpoints.save(3, trained, record, beside={"critic": critic})
    assert read_manifest(tmp_path / "3").record == record
    for state, name in ((trained, ""), (critic, "critic")):
        found, expected = (
            host(to_canonical(restore(tmp_path / "3", state, name=name))),
            host(to_canonical(state)),
        )
        assert found.keys() == expected.keys()
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    with pytest.raises(ZeroError, match=r"does not fit this run: value_counters: not saved"):
        restore(tmp_path / "3", critic, name="value")


def test_goes_on_where_it_stopped(saved: Path, trained: Any) -> None:
    state = restore(saved / "3", make(2, 4, abstract=True, **DELTA))
    copy = jax.tree.map(jnp.copy, trained)
    for _ in range(2):
        state, metrics = zerojax.train_step(state, BATCH)
        copy, expected = zerojax.train_step(copy, BATCH)
        np.testing.assert_array_equal(metrics["loss"], expected["loss"])


def test_makes_what_the_checkpoint_lacks(tmp_path: Path) -> None:
    exact = make(2, 4)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, exact, Record())
    wanted = {**DELTA, "grads": ("int8", "int8"), "grad_sync": "step", "error_feedback": True}
    state = restore(str(tmp_path / "1"), make(2, 4, abstract=True, **wanted))
    params, replicas = zerojax.gather_params(state), to_canonical(state)["secondary"]
    np.testing.assert_array_equal(replicas["first"]["kernel"], params["first"]["kernel"])
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(state.residual))


class Counting(Awkward):
    """With a router's count of tokens."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.load = nnx.BatchStat(jnp.zeros(4, jnp.int32))


def test_reads_the_state_of_routers_and_dropout_that_earlier_versions_wrote(tmp_path: Path) -> None:
    state = make(1, 2, Counting)
    former = {"load": jnp.asarray([3.0, 0.0, 2.0, 1.0]), "blocks/block/salt": jnp.zeros(3, jnp.uint32)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state.replace(model_state=state.model_state | former), Record())
    found = restore(tmp_path / "1", make(2, 1, Counting, abstract=True))
    assert found.model_state.keys() == state.model_state.keys()
    assert found.model_state["load"].dtype == jnp.int32
    np.testing.assert_array_equal(found.model_state["load"], [3, 0, 2, 1])
    with pytest.raises(ZeroError, match="other: load is unknown"):
        restore(tmp_path / "1", make(2, 1, abstract=True))


@pytest.mark.slow
def test_parts_without_a_state_come_and_go_in_the_optimizer(saved: Path, trained: Any) -> None:
    schedule = optax.constant_schedule(1e-2)
    clipped = (optax.clip_by_global_norm(1.0), optax.scale_by_adam())
    state = restore(saved / "3", make(1, 2, abstract=True, tx=optax.chain(*clipped, optax.scale(-1e-2))))
    assert not state.opt_state[0]
    ours, theirs = (to_canonical(one)["optimizer"] for one in (state, trained))
    jax.tree.map(np.testing.assert_array_equal, ours, {"1": theirs["0"]})
    more = optax.chain(*clipped, optax.scale_by_schedule(schedule))  # which has a state of its own
    with pytest.raises(ZeroError, match=r"does not fit this run: optimizer: 1/count is missing"):
        restore(saved / "3", make(1, 2, abstract=True, tx=more))
    with pytest.raises(ZeroError, match=r"of another optimizer, and this one keeps none\. restore_weights"):
        restore(saved / "3", make(1, 2, abstract=True, tx=optax.sgd(0.1)))


def test_a_checkpoint_of_another_model_is_refused(saved: Path) -> None:
    other = make(2, 4, lambda rngs: Awkward(rngs, width=8), abstract=True)
    for read in (restore, restore_weights):
        with pytest.raises(
            ZeroError, match=r"3 does not fit this run: .*float32\[3, 7\], not float32\[3, 8\]"
        ):
            read(saved / "3", other)


def test_weights_alone_on_another_mesh_under_another_optimizer(saved: Path, trained: Any) -> None:
    mesh, zero = zerojax.make_mesh(3, 2), ZeroConfig.preset("delta", compute_dtype="float32")
    fresh = TrainState.create(Awkward, optax.sgd(1e-2, momentum=0.9), loss, mesh=mesh, zero=zero, seed=7)
    state = restore_weights(str(saved / "3"), fresh)
    assert int(state.step) == 0
    assert int(state.seed) == 7
    for kind in ("params", "other"):
        expected, found = host(to_canonical(trained)[kind]), host(to_canonical(state)[kind])
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert not any(x.any() for x in host(state.opt_state).values())
    replicas, params = host(to_canonical(state)["secondary"]), host(zerojax.gather_params(state))
    assert replicas.keys() <= params.keys()
    np.testing.assert_array_equal(replicas["['first']['kernel']"], params["['first']['kernel']"].astype("f4"))


def test_of_an_old_one_that_is_a_link_the_link_is_deleted(trained: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, Retention(2)) as checkpoints:
        checkpoints.save(3, trained, RECORD)
        checkpoints.wait()
        (folder / "3").rename(tmp_path / "elsewhere")
        (folder / "3").symlink_to(tmp_path / "elsewhere")
        for step in (6, 9):
            checkpoints.save(step, trained, RECORD)
    assert sorted(path.name for path in folder.iterdir()) == ["6", "9"]
    verify(tmp_path / "elsewhere", 3)


def test_an_old_one_that_cannot_be_deleted_is_said_and_saving_goes_on(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an NFS server holds a file; the next start tries again."""

    def rmtree(path: Path, **_: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), f"{path}/.nfs0000000000000012")

    lines: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        with Checkpoints(tmp_path, Retention(2), say=lines.append) as checkpoints:
            (tmp_path / "3.removed").mkdir()  # as an earlier attempt left it
            for step in (3, 6, 9, 12):
                checkpoints.save(step, trained, RECORD)
        assert step_dirs.steps(tmp_path) == [9, 12]
        assert [line.partition(" cannot be deleted: Device or resource busy;")[0] for line in lines] == [
            str(tmp_path / "3.removed-2"),
            str(tmp_path / "6.removed"),
        ]
        Checkpoints(tmp_path, say=lines.append).close()
        assert len(lines) == 5
    Checkpoints(tmp_path, say=lines.append).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["12", "9"]
    assert len(lines) == 5


def test_a_skipped_step_is_not_saved(trained: Any, tmp_path: Path) -> None:
    skipped = trained.replace(skipped_in_row=trained.skipped_in_row + 1)
    with Checkpoints(tmp_path) as checkpoints:
        assert not checkpoints.save(4, skipped, RECORD)
        assert step_dirs.steps(tmp_path) == []
        assert checkpoints.save(4, skipped, RECORD, despite_skips=True)
        assert checkpoints.save(4, skipped, RECORD), "it is there already"
    assert step_dirs.steps(tmp_path) == [4]


def test_keeps_the_newest_and_clears_what_was_torn(trained: Any, tmp_path: Path) -> None:
    with Checkpoints(tmp_path, Retention(newest=2)) as checkpoints:
        for step in (3, 6, 9):
            checkpoints.save(step, trained, Record(skipped=step))
        checkpoints.save(9, trained, Record())  # it is there already
    for name in ("12.unfinished.orbax-checkpoint-tmp", "12.unfinished", "3.removed", "11.damaged"):
        (tmp_path / name).mkdir()
    assert newest_valid(tmp_path).step == 9
    assert read_manifest(tmp_path / "9").record.skipped == 9
    assert len(list(tmp_path.iterdir())) == 6, "reading changes nothing: a run may be saving"
    Checkpoints(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["11.damaged", "6", "9"]


def test_a_save_beside_those_of_later_steps_stays(trained: Any, tmp_path: Path) -> None:
    for saves in ((30, 40), (10, 20, 25)):  # the second as of a loop that does not resume
        with Checkpoints(tmp_path, Retention(newest=2)) as checkpoints:
            for step in saves:
                checkpoints.save(step, trained, Record())
    assert step_dirs.steps(tmp_path) == [20, 25, 30, 40]
