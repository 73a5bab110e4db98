"""zerojax.run.checkpoints.snapshots: a run that dies continues from memory, bit for bit."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from grids import grid
from jax.sharding import NamedSharding, PartitionSpec
from micro_run import Stop, die_at, losses, micro_config, train

import zerojax
from zerojax.errors import ConfigurationError, RunError
from zerojax.multihost import snapshot_memory
from zerojax.multihost.background import Worker
from zerojax.multihost.snapshot_memory import Generation, Intervals, SnapshotMemory
from zerojax.run import recovery
from zerojax.run.checkpoints import snapshot_moves, snapshots
from zerojax.run.checkpoints.manifest import Manifest, Record, parse_manifest
from zerojax.run.checkpoints.snapshot_moves import FromCopies, FromNode
from zerojax.run.config import spelled_out
from zerojax.validation.untrusted import dump_checked


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Memory as from a launcher, in which a run keeps as many snapshots as it can."""
    descriptor = snapshot_memory.create()
    monkeypatch.setattr(snapshots, "_SHARE", float("inf"))
    yield descriptor
    os.close(descriptor)


def wait_for_workers(others: list[threading.Thread]) -> None:
    """Wait until threads of this test have done their work."""
    for thread in threading.enumerate():
        assert thread in others or not isinstance(thread, Worker) or thread.wait(60)


def die(
    monkeypatch: pytest.MonkeyPatch, memory: int, text: Path, folder: Path, step: int, **sections: Any
) -> None:
    """Train until the process dies instead of taking a step; then set what a restart finds."""
    others = threading.enumerate()  # of earlier tests in this process
    take, early = zerojax.train_step, iter(range(4))

    def train_step(state: Any, batch: Any) -> Any:
        if next(early, None) is None:  # on a busy machine no snapshot would be written in time
            wait_for_workers(others)
        return take(state, batch)

    with monkeypatch.context() as patch:
        patch.setenv(snapshot_memory.VARIABLE, f"{memory} 0 0 0")
        patch.setattr(zerojax, "train_step", train_step)
        die_at(patch, step)
        with pytest.raises(Stop):
            train(micro_config(text, **sections), folder)
    wait_for_workers(others)  # a process that dies would have no thread left
    monkeypatch.setenv(snapshot_memory.VARIABLE, f"{memory} 0 0 0")
    now = time.monotonic()
    monkeypatch.setenv(recovery.VARIABLE, f"{now} {now} lost rank 0")


def steps_in(descriptor: int) -> list[int]:
    """The steps of the snapshots in memory, the newest first."""
    texts = [one.text() for one in SnapshotMemory(os.dup(descriptor)).generations]
    return sorted((parse_manifest(text).step for text in texts if text), reverse=True)


def damage(descriptor: int, step: int) -> None:
    """Change a byte of the snapshot of a step."""
    for one in SnapshotMemory(os.dup(descriptor)).generations:
        if (text := one.text()) and (found := parse_manifest(text)).step == step:
            *_, last = one.arrays(found.files).values()
            last[-1] += 1


@pytest.fixture
def undisturbed(text: Path, tmp_path: Path) -> list[tuple[int, float, float | None]]:
    train(micro_config(text, checkpoint={"every": 0}), tmp_path / "undisturbed")
    return losses(tmp_path / "undisturbed")


PLAINLY = {"rotation": 0, "rounding": "nearest"}
"""How gradients are rounded changes no field of a state, and is half of a compile."""
EXACT = {"preset": "zero3", "compute_dtype": "float32"}
LOCAL = {"preset": "local", "every": 4, "compute_dtype": "float32", **PLAINLY}
# Without error feedback their format changes none, either.
DELTA = {"preset": "delta", "compute_dtype": "float32", "grads": ("fp32", "fp32"), **PLAINLY}


def preset_of(zero: dict[str, Any]) -> str:
    return zero["preset"]


@pytest.mark.parametrize(
    "zero",
    grid([EXACT, DELTA, LOCAL, EXACT | {"preset": "zero++"}], DELTA, LOCAL),
    ids=preset_of,
)
def test_a_run_continues_from_memory(
    zero: dict[str, Any],
    text: Path,
    tmp_path: Path,
    memory: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sections = {
        "zero": zero,
        "train": {"eval_every": 0},
        "checkpoint": {"every": 0},
        "model": {"dropout": 0.1},
    }
    die(monkeypatch, memory, text, tmp_path / "a", 7, **sections)
    newest = steps_in(memory)[0]
    assert newest >= 4, "a snapshot while other steps are under way"
    assert not [*(tmp_path / "a" / "checkpoints").glob("*")]
    died = train(micro_config(text, **sections), tmp_path / "a")
    assert f"resuming from step {newest}, which is in memory" in capsys.readouterr().out
    monkeypatch.delenv(snapshot_memory.VARIABLE, raising=False)
    whole = train(micro_config(text, **sections), tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    ours, theirs = (snapshots._arrays(one.state) for one in (died, whole))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(np.asarray(x), np.asarray(theirs[name])) for name, x in ours.items())
    assert (tmp_path / "a" / "checkpoints" / "8").is_dir(), "the end is saved to disk"


def test_one_node_does_not_take_a_snapshot_of_delta_on_several(text: Path) -> None:
    """It would lack the replica."""

    def settings(preset: str, nodes: int) -> Any:
        zero = {"preset": preset, "state_spread": "node"}
        return snapshots._settings(spelled_out(micro_config(text, zero=zero, mesh={"nodes": nodes})))

    assert settings("delta", 1) != settings("delta", 2) == settings("delta", 3)
    assert settings("zero3", 1) == settings("zero3", 2)


@pytest.mark.parametrize(
    ("zero", "left"), [(EXACT, 2), (EXACT, 1), pytest.param(DELTA, 2, marks=pytest.mark.slow)]
)
def test_fewer_nodes_continue_from_memory_like_a_fresh_start(
    zero: dict[str, Any],
    left: int,
    text: Path,
    tmp_path: Path,
    memory: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The whole state is in every node. Its padding depends on the number of nodes."""
    sections: dict[str, Any] = {
        "zero": zero | {"state_spread": "node", "block_size": 64},
        "train": {"batch_size": 12, "eval_every": 0},
        "model": {"layers": 1},
        # No warm-up: it takes at most half of a run, and the fresh start is shorter.
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0, "schedule": "constant"},
        "checkpoint": {"every": 0},
    }
    three, two = ({"mesh": {"nodes": nodes, "local": 2}} for nodes in (3, left))
    die(monkeypatch, memory, text, tmp_path / "a", 7, **sections, **three)
    newest = steps_in(memory)[0]
    # Another padding of a larger model changes the size of the memory. The run dies before its first step.
    monkeypatch.setattr(snapshot_memory, "_TEXT", 1 << 19)
    die(monkeypatch, memory, text, tmp_path / "a", 1, **sections, **two)
    assert steps_in(memory) == [newest]
    train(micro_config(text, **sections, **two), tmp_path / "a")
    assert capsys.readouterr().out.count(f"resuming from step {newest}, which is in memory") == 2
    monkeypatch.delenv(snapshot_memory.VARIABLE, raising=False)
    begin = sections | {"train": sections["train"] | {"steps": newest}}
    train(micro_config(text, **begin, **three), tmp_path / "b")
    train(micro_config(text, **sections, **two), tmp_path / "b")
    assert losses(tmp_path / "a")[newest:] == losses(tmp_path / "b")[newest:]


def test_a_damaged_snapshot_is_not_used(
    text: Path,
    tmp_path: Path,
    memory: int,
    undisturbed: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The one before it is; and when both are damaged, the run begins again."""
    die(monkeypatch, memory, text, tmp_path / "a", 7, checkpoint={"every": 0})
    newest, older = steps_in(memory)
    damage(memory, newest)
    die(monkeypatch, memory, text, tmp_path / "a", 2, checkpoint={"every": 0})
    assert f"resuming from step {older}, which is in memory" in capsys.readouterr().out
    for step in steps_in(memory):
        damage(memory, step)
    train(micro_config(text, checkpoint={"every": 0}), tmp_path / "a")
    out = " ".join(capsys.readouterr().out.split())
    assert "no snapshot in memory is newer than the last checkpoint, whole in all processes" in out
    assert losses(tmp_path / "a") == undisturbed


def test_a_newer_checkpoint_and_other_settings_count_more(
    text: Path,
    tmp_path: Path,
    memory: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    die(monkeypatch, memory, text, tmp_path, 6)
    config = micro_config(text, train={"max_skips": 2})
    train(config, tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    assert "resuming from step 3;" in out
    assert "in memory is newer" in out


def keep(generation: Generation, step: int, config: dict[str, Any]) -> None:
    """Write a snapshot of one small array."""

    def describe(files: snapshot_memory.Checksums) -> str:
        return dump_checked(asdict(Manifest(step, 0.0, Record(config=config), files)))

    generation.write({"x": 8}, lambda places: places["x"].fill(step), describe)


def test_the_newest_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stands by checks it before it may use it. Another process has made the memory larger."""
    memory = SnapshotMemory(snapshot_memory.create())
    mine = snapshots.Snapshots(memory, Intervals(5.0), zerojax.make_mesh(1, 1))
    mine.check()
    theirs = SnapshotMemory(os.dup(memory._descriptor))
    theirs.resize(8, 1)
    for generation, step in zip(theirs.generations, (4, 5), strict=True):
        keep(generation, step, {})
    looks: list[Any] = []
    is_intact = Generation.is_intact
    monkeypatch.setattr(
        Generation, "is_intact", lambda self, sums: looks.append(self) or is_intact(self, sums)
    )
    mine.check()
    mine.check()
    (newest,) = looks
    assert newest is memory.generations[1]
    found = snapshots._read(newest)
    assert found is not None
    assert mine._is_intact(found)
    assert looks == [newest]
    newest.memory[:] = 0
    mine.check()
    assert looks == [newest, memory.generations[0]]


@pytest.mark.parametrize(
    ("theirs", "expected"), [([4], (4, None)), ([], (5, FromNode(0)))], ids=["a common one", "none there"]
)
def test_a_common_snapshot_is_preferred_to_a_newer_one_of_one_node(
    theirs: list[int], expected: tuple[int, FromNode | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"zero": {"state_spread": "node"}}
    memory = SnapshotMemory(snapshot_memory.create())
    memory.resize(8, 1)
    for generation, step in zip(memory.generations, (4, 5), strict=True):
        keep(generation, step, config)

    def gather(own: Any) -> list[Any]:
        """This process's value, and the value of another, which has the snapshots of ``theirs``."""
        if isinstance(own, list):
            return [own, [theirs, []]]
        return [own, own if theirs or isinstance(own, str) else False]

    monkeypatch.setattr(snapshots, "gather_from_all", gather)
    monkeypatch.setattr(snapshots, "node_leaders", lambda _: [0, 1])
    found = snapshots.Snapshots(memory, Intervals(5.0), zerojax.make_mesh(1, 1)).choose(config, None)
    assert found is not None
    assert (found.step, found.move) == expected
    assert found.generation is not None


@pytest.mark.parametrize("damaged", [False, True])
def test_a_host_that_has_lost_its_memory_gets_its_state_from_another(
    damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest snapshot of which another host has a copy, unless that is damaged."""
    config = {"zero": {"preset": "delta"}}
    memory = SnapshotMemory(snapshot_memory.create(), 5)
    memory.resize(8, 1)
    for generation, step in zip(memory.generations, (4, 9, 8, 4, 3), strict=True):
        keep(generation, step, config)
    if damaged:
        text = memory.generations[3].text()
        assert text is not None
        memory.generations[3].arrays(parse_manifest(text).files)["x"][-1] += 1

    def gather(own: Any) -> list[Any]:
        return [own, [[], []] if isinstance(own, list) else None if isinstance(own, str) else False]

    monkeypatch.setattr(snapshots, "gather_from_all", gather)
    monkeypatch.setattr(snapshots, "node_leaders", lambda _: [0, 1])
    mine = snapshots.Snapshots(memory, Intervals(5.0, 60.0, 1), zerojax.make_mesh(1, 1))
    found = mine.choose(config, None)
    if damaged:
        assert found is None
        return
    assert found is not None
    assert (found.step, found.move) == (4, FromCopies((1,), 1))
    assert found.generation is memory.generations[0]
    assert found.copy is not None
    assert found.copy.generation is memory.generations[3]
    assert (mine._kept, mine._next_copy) == (0, 4), "both stay until there is a newer copy"


def test_a_restart_keeps_the_newest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """And continues from a newer snapshot, which it overwrites last."""
    config = {"zero": {"preset": "delta"}}
    memory = SnapshotMemory(snapshot_memory.create(), 5)
    memory.resize(8, 1)
    for generation, step in zip(memory.generations, (8, 9, 4, 4, 3), strict=True):
        keep(generation, step, config)
    monkeypatch.setattr(snapshots, "gather_from_all", lambda own: [own, own])
    mine = snapshots.Snapshots(memory, Intervals(5.0, 60.0, 1), zerojax.make_mesh(1, 1))
    found = mine.choose(config, None)
    assert found is not None
    assert (found.step, found.move) == (9, None)
    assert (mine._kept, mine._next_copy, mine._oldest) == (2, 4, [0, 2, 1])


@pytest.mark.parametrize("spec", [("node",), (("local", "node"),), ("local",), ()], ids=str)
def test_nodes_get_back_what_others_have_copied(spec: tuple[Any, ...]) -> None:
    """Each device of the node before last gets its own bytes again."""
    mesh = zerojax.make_mesh(3, 2)
    x = jax.device_put(np.arange(36, dtype=np.float32), NamedSharding(mesh, PartitionSpec(*spec)))
    copy = snapshot_moves.of_neighbours(x, 2)
    lost = [
        part.data * np.nan if part.device in mesh.devices[1] else part.data for part in x.addressable_shards
    ]
    own = jax.make_array_from_single_device_arrays(x.shape, x.sharding, lost)
    back = snapshot_moves.moved(FromCopies((1,), 2), own, copy)
    for part, wanted in zip(back.addressable_shards, x.addressable_shards, strict=True):
        np.testing.assert_array_equal(part.data, wanted.data)
    if "node" in str(spec):
        assert not np.array_equal(np.asarray(copy), np.asarray(x)), "another node's"


def test_the_snapshot_of_the_newest_copy_stays(
    text: Path, tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(snapshot_memory.VARIABLE, f"{memory} 0 1000 1")
    train(micro_config(text, mesh={"nodes": 1, "local": 2}, checkpoint={"every": 0}), tmp_path)
    *own, copy, other = (one.text() for one in SnapshotMemory(os.dup(memory), 5).generations)
    kept, before, newest = sorted(parse_manifest(one).step for one in own if one)
    assert copy is not None
    assert kept == parse_manifest(copy).step < before < newest
    assert other is None, "a second copy is not due"


@pytest.mark.parametrize(
    ("zero", "mesh", "message"),
    [({"state_spread": "node"}, {}, "has the whole state"), ({}, {"nodes": 2}, "a process for each node")],
)
def test_copies_that_cannot_be_are_refused(
    zero: dict[str, Any],
    mesh: dict[str, Any],
    message: str,
    text: Path,
    tmp_path: Path,
    memory: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(snapshot_memory.VARIABLE, f"{memory} 0 1000 1")
    with pytest.raises(ConfigurationError, match=message):
        train(micro_config(text, zero=zero, mesh=mesh), tmp_path)


def test_a_host_without_room_is_refused(
    text: Path, tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(snapshot_memory.VARIABLE, f"{memory} 0 0 0")
    monkeypatch.setattr(snapshots, "memory_limits", lambda: {"host": 1000})
    with pytest.raises(ConfigurationError, match=r"two snapshots of .* are free.*--snapshot-seconds 0"):
        train(micro_config(text), tmp_path)


def test_memory_that_cannot_be_locked_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RunError("CUDA's cuMemHostRegister_v2 failed: out of memory (2)")

    memory = SnapshotMemory(snapshot_memory.create())
    memory.resize(1000, 1)
    monkeypatch.setattr(snapshots, "page_locked", fails)
    with pytest.raises(RunError, match=r"cannot lock .* out of memory.*--snapshot-seconds 0"):
        snapshots.Snapshots(memory, Intervals(5.0), zerojax.make_mesh(1, 1))


def test_waiting_for_snapshots_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(snapshots.time, "monotonic", lambda: now)
    memory = SnapshotMemory(snapshot_memory.create())
    taken = snapshots.Snapshots(memory, Intervals(5.0), zerojax.make_mesh(1, 1))
    taken._written, taken._pause = 2.0, 0.05
    now = 102.9
    assert not taken.is_due
    now = 103.1
    assert taken.is_due, "a failure just before the next one is complete repeats five seconds"
    taken._pause = 1.0
    now = 149.0
    assert not taken.is_due, "one second in fifty is 2%"
    now = 151.0
    assert taken.is_due
    assert not taken.is_busy


@pytest.mark.parametrize("why", ["saves", "busy"])
def test_no_snapshot_is_begun_in_vain(
    why: str, text: Path, tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while one is being written, and not beside a checkpoint."""
    if why == "busy":
        monkeypatch.setattr(snapshots.Snapshots, "is_busy", True)
    die(monkeypatch, memory, text, tmp_path, 3, checkpoint={"every": 1 if why == "saves" else 0})
    assert steps_in(memory) == []


def test_processes_wait_for_the_log_before_they_write_a_snapshot(
    text: Path, tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one could have a snapshot of steps whose lines process zero loses as it dies."""
    logged, written, write = list[int](), list[int](), snapshots.Snapshots._write

    def gather(value: Any) -> list[Any]:
        logged.append(len(losses(tmp_path)))
        return [value]

    def write_once_logged(self: snapshots.Snapshots, generation: Generation, step: int, *more: Any) -> None:
        written.append(step)
        if logged.pop() == step:
            write(self, generation, step, *more)

    monkeypatch.setattr(snapshots, "gather_from_all", gather)
    monkeypatch.setattr(snapshots.Snapshots, "_write", write_once_logged)
    die(monkeypatch, memory, text, tmp_path, 7, checkpoint={"every": 0})
    assert len(written) > 1
    assert steps_in(memory) == written[:-3:-1]


def test_each_part_of_an_array_is_copied_once():
    mesh = zerojax.make_mesh(1, 2)
    numbers = {name: np.arange(size).astype(np.int8) for name, size in {"a": 40, "b": 6}.items()}
    arrays = jax.device_put(numbers, NamedSharding(mesh, PartitionSpec("local")))
    arrays["on both"] = jax.device_put(np.arange(5, dtype=np.int32), NamedSharding(mesh, PartitionSpec()))
    places = {name: np.zeros(size, np.uint8) for name, size in snapshots._sizes(arrays).items()}
    snapshots._copy(arrays, places)
    assert arrays == {}, "the copies' memory is free again"
    for name, expected in numbers.items():
        found = np.concatenate([places[f"{name}.0"], places[f"{name}.1"]])
        np.testing.assert_array_equal(found.view(np.int8), expected)
    np.testing.assert_array_equal(places.pop("on both.0").view(np.int32), np.arange(5))
    assert len(places) == 4
