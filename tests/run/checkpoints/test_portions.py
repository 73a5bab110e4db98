"""Checkpoints of what is in host memory, written and read in portions."""

import ctypes
import dataclasses
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import psutil
import pytest
from flax import nnx
from jax import numpy as jnp

import zerojax
from zerojax.errors import RunError, ZeroError
from zerojax.run.checkpoints import (
    Checkpoints,
    Record,
    newest_valid,
    portions,
    restore,
    restore_weights,
    store,
)
from zerojax.run.checkpoints.canonical import to_canonical
from zerojax.run.weights import _without_values
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


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def assert_same(found: TrainState, expected: dict[str, np.ndarray]) -> None:
    assert_equal(host(to_canonical(found)), expected)


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "fit_beside_host_state", lambda _: False)
    monkeypatch.setattr(portions, "UNDER_WAY", 1 << 15)  # the first stack's kernel in portions of a layer


@pytest.mark.usefixtures("short_of_memory")
@pytest.mark.parametrize(
    ("mesh", "preset"),
    [
        ((2, 2), "delta"),
        pytest.param((1, 1), "zero3", marks=pytest.mark.slow),
        pytest.param((2, 4), "delta", marks=pytest.mark.slow),
        pytest.param((3, 2), "local", marks=pytest.mark.slow),
        pytest.param((3, 2), "zero++", marks=pytest.mark.slow),
    ],
)
def test_goes_on_where_it_stopped(
    mesh: tuple[int, int], preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    # How gradients are encoded does not matter here, and is half of a compile.
    zero = {"preset": preset, "host": ("optimizer",), "rotation": 0, "rounding": "nearest"}
    state, _ = zerojax.train_step(make(mesh, **zero), BATCH)
    kept, encoded_then = host(to_canonical(state)), host(state.encoded)
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
        again = restore(tmp_path / "1", state)  # of the same spec, so nothing is compiled again
    assert len(encoded) == 1
    assert {x.sharding.memory_kind for x in jax.tree.leaves(again.params)} == {HOST}
    assert_same(again, kept)
    again, found = zerojax.train_step(again, BATCH)
    assert found["loss"] == metrics["loss"]
    assert_same(again, host(to_canonical(state)))

    plain = restore(tmp_path / "1", make(mesh, abstract=True, preset=preset))
    assert_same(plain, kept)
    if preset == "delta":
        return  # the way back is the same, and fresh copies have no differences
    with Checkpoints(tmp_path / "plain") as checkpoints:
        checkpoints.save(1, plain, Record())
    back = restore(tmp_path / "plain" / "1", state)
    assert_same(back, kept)
    if preset == "local":
        assert_equal(host(back.encoded), encoded_then)
        return  # a new run begins with the outer weights
    begun = restore_weights(tmp_path / "1", _without_values(make(mesh, **zero), None))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(begun.params)} == {HOST}
    assert_equal(host(begun.encoded), encoded_then)
    assert_equal(host(begun.params), host(restore(tmp_path / "1", state).params))
    rounded = restore(tmp_path / "1", make(mesh, abstract=True, moments="float8", **zero))
    of_bytes = host(to_canonical(rounded)["optimizer"])
    for name, x in of_bytes.items():
        wanted = kept[f"['optimizer']{name}"]
        np.testing.assert_allclose(np.float32(x), wanted, rtol=0.125, atol=2.0**-29, err_msg=name)
    with Checkpoints(tmp_path / "rounded") as checkpoints:
        checkpoints.save(1, rounded, Record())
    again = restore(tmp_path / "rounded" / "1", rounded)
    assert_equal(host(again.opt_state), host(rounded.opt_state))
    assert_equal(host(to_canonical(again)["optimizer"]), of_bytes)


@pytest.mark.usefixtures("short_of_memory")
def test_what_is_half_written_leaves_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise ValueError("no space left [os_error_code='28']")

    state = make((1, 1), host=("optimizer",))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, Record())
    monkeypatch.setattr(portions, "merge", stopped)
    with monkeypatch.context() as patch:
        patch.setattr(store.step_dirs, "clear_failed", lambda *_: None)  # as if the process was killed there
        with pytest.raises(RunError, match="2: No space left on device; older ones are intact"):
            checkpoints.save(2, state, Record())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.unfinished"]
    assert newest_valid(tmp_path).step == 1
    with pytest.raises(RunError):
        Checkpoints(tmp_path).save(2, state, Record())
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.usefixtures("short_of_memory")
def test_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make((1, 1), host=("optimizer",)), Record())
    numbers = max((tmp_path / "1" / "params").rglob("d/*"), key=lambda file: file.stat().st_size)
    numbers.write_bytes(bytes(numbers.stat().st_size))
    with pytest.raises(ZeroError, match=r"1 cannot be read: "):
        restore(tmp_path / "1", make((1, 1), abstract=True, host=("optimizer",)))


@pytest.mark.parametrize("stack", [(), (12,), (2, 12)])
def test_portions_are_all_of_an_array_once(stack: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = dataclasses.replace(make((1, 2), abstract=True).spec.leaves[0], stack=stack)
    layer = leaf.owned * 2 * 4
    monkeypatch.setattr(portions, "UNDER_WAY", portions._AT_ONCE * 5 * layer)
    found = np.zeros(leaf.unsharded_shape, int)
    cut = portions.portions_of(leaf, 4)
    for part in cut:
        found[portions._box(part, (slice(None),) * found.ndim)] += 1
    assert (found == 1).all()
    assert len(cut) == (leaf.layers // 4 if stack else 1)
    if stack:
        assert {part.leaf.stack for part in portions.portions_of(leaf, 4, at_least=7)} == {
            (*(1 for _ in stack[1:]), 6)
        }


@pytest.mark.slow
def test_memory_besides_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process: to save 400 MB of state takes at most four times 16 MB, and some for the rest."""

    class Large(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.blocks = zerojax.Stack(lambda rngs: nnx.Linear(1024, 1024, rngs=rngs), 32, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.blocks(x)

    def create(*, abstract: bool = False) -> TrainState:
        how = TrainState.abstract if abstract else TrainState.create
        zero = ZeroConfig(host=("optimizer",))
        return how(Large, ADAMW, loss, mesh=zerojax.make_mesh(1, 1), zero=zero)

    def more(run: Callable[[], Any]) -> float:
        """MB at the most while it runs, above what there is before."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or what was freed before is taken again, and not seen
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = psutil.Process().memory_info().rss
        run()
        [most] = [
            line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
        ]
        return int(most) / 1e3 - before / 1e6

    monkeypatch.setattr(portions, "UNDER_WAY", 16 << 20)
    state = jax.block_until_ready(create())
    state_size = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state))) / 1e6
    taken = []
    for step, copies in enumerate((False, False, True)):
        monkeypatch.setattr(store, "fit_beside_host_state", lambda _, copies=copies: copies)
        with Checkpoints(tmp_path) as checkpoints:
            taken.append(more(partial(checkpoints.save, step, state, Record())))
    assert state_size == pytest.approx(403, abs=2)
    assert taken[1] < 4 * 17 + 50
    assert taken[2] > 0.98 * state_size  # pages are counted roughly
    del state
    again = []
    taken.append(more(lambda: again.append(restore(tmp_path / "1", create(abstract=True)))))
    assert state_size < taken[3] < state_size + 70 + 4 * 17 + 50  # encoded weights included
