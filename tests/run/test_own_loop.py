"""Resuming and trackers in a training loop of your own."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax import checkpoints, trackers
from zerojax.run.run_dir import RunFolder
from zerojax.run.trackers.clients import TrackedRun


def abstract(width: int = 4) -> zerojax.TrainState:
    return zerojax.TrainState.abstract(
        lambda rngs: nnx.Linear(width, 2, rngs=rngs),
        optax.sgd(0.1),
        lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        mesh=zerojax.make_mesh(1, 2),
        zero=zerojax.ZeroConfig(stage=1),
    )


def filled(state: zerojax.TrainState, value: float) -> zerojax.TrainState:
    """A state in which every number is ``value``; compiles nothing."""

    def fill(x: Any) -> jax.Array:
        return jax.device_put(np.full(x.shape, value, x.dtype), x.sharding)

    fields = ("step", "skipped_in_row", "seed", "params", "opt_state", "model_state")
    values = {name: jax.tree.map(fill, getattr(state, name)) for name in fields}
    return state.replace(**values | {"skipped_in_row": values["skipped_in_row"] * 0})


def save(folder: Path, *steps: int) -> None:
    with checkpoints.Checkpoints(folder) as store:
        for step in steps:
            position = {"row": 10 * step, "of": ["a", "b"]}
            store.save(step, filled(abstract(), step), checkpoints.Record(position=position))


def kernel(state: zerojax.TrainState) -> float:
    (value,) = np.unique(zerojax.gather_params(state)["kernel"])
    return float(value)


def test_no_checkpoint_to_resume_from(tmp_path):
    assert checkpoints.resume(tmp_path / "never", abstract()) is None
    assert checkpoints.resume(str(tmp_path), abstract()) is None


def test_the_newest_is_resumed(tmp_path):
    save(tmp_path, 3, 7)
    found = checkpoints.resume(tmp_path, abstract())
    assert found is not None
    assert (found.step, int(found.state.step), kernel(found.state)) == (7, 7, 7.0)
    assert found.record.position == {"row": 70, "of": ["a", "b"]}


def test_a_damaged_checkpoint_is_moved_aside_and_reported(tmp_path):
    save(tmp_path, 3, 7)
    file = next(
        path for path in (tmp_path / "7" / "params").rglob("*") if path.is_file() and path.stat().st_size
    )
    file.write_bytes(file.read_bytes()[:-1])
    said = []
    found = checkpoints.resume(tmp_path, abstract(), say=said.append)
    assert found is not None
    assert (found.step, kernel(found.state)) == (3, 3.0)
    assert len(said) == 1
    assert "7 is damaged" in said[0]
    assert said[0].endswith("it is now called 7.damaged")
    save(tmp_path, 7)
    again = checkpoints.resume(tmp_path, abstract(), say=said.append)
    assert again is not None
    assert (again.step, len(said)) == (7, 1)


def test_another_model_is_refused(tmp_path):
    save(tmp_path, 3)
    with pytest.raises(
        zerojax.ZeroError, match=r"3 does not fit this run: params: kernel is float32\[4, 2\]"
    ):
        checkpoints.resume(tmp_path, abstract(width=5))


def test_a_folder_of_damaged_checkpoints_is_refused(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "3" / "manifest.json").unlink()
    with pytest.raises(zerojax.ZeroError, match="no checkpoint can be used"):
        checkpoints.resume(tmp_path, abstract())
    assert (tmp_path / "3").is_dir()


class Spy:
    """A tracker that records its calls."""

    runs: list["Spy"]

    def __init__(self, run: TrackedRun):
        self.opened = (run.folder.path.name, run.project, run.settings, run.start, run.known)
        self.rows: dict[int, Any] = {}
        self.runs.append(self)

    @property
    def identity(self) -> str:
        return "the run"

    def write(self, step: int, values: Any) -> None:
        self.rows[step] = dict(values)

    def close(self, *, failed: bool) -> None:
        self.failed = failed


@pytest.fixture
def spies(monkeypatch: pytest.MonkeyPatch) -> list[Spy]:
    monkeypatch.setattr(Spy, "runs", [], raising=False)
    monkeypatch.setitem(trackers._TRACKERS, "tensorboard", (Spy, *trackers._TRACKERS["tensorboard"][1:]))
    return Spy.runs


def fail_at_step_2(log: trackers.Trackers) -> None:
    with log:
        log.write(2, {"loss": 1.0})
        raise OSError("away")


def test_trackers_are_written_and_resumed(tmp_path, spies):
    folder, settings = tmp_path / "new" / "mine", {"rate": 0.1, "model": {"width": 4}}
    with trackers.track(folder, settings=settings) as log:
        log.write(1, {"loss": 2.0})
    with pytest.raises(OSError, match="away"):
        fail_at_step_2(trackers.track(str(folder), project="p", start=1))
    first, second = spies
    assert first.opened == ("mine", "zerojax", settings, 0, None)
    assert second.opened == ("mine", "p", {}, 1, "the run")
    assert (first.rows, second.rows) == ({1: {"loss": 2.0}}, {2: {"loss": 1.0}})
    assert (first.failed, second.failed) == (False, True)
    assert RunFolder(folder).read_summary()["trackers"] == {"tensorboard": "the run"}


def test_only_process_zero_writes(tmp_path, spies, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with trackers.track(tmp_path / "run") as log:
        log.write(1, {"loss": 2.0})
    assert spies == []
    assert not (tmp_path / "run").exists()


def test_unknown_trackers_are_refused(tmp_path):
    with pytest.raises(
        zerojax.ZeroError, match="no tracker 'tensorbord': there are 'tensorboard', 'wandb', 'mlf"
    ):
        trackers.track(tmp_path, ["tensorboard", "tensorbord"])
    assert list(tmp_path.iterdir()) == []
