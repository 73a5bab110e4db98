"""zerojax.Trainer: the same numbers as a plain loop, and the same bits after an interruption."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax import checkpoints
from zerojax.errors import RunError, Stopped
from zerojax.run.checkpoints import step_dirs
from zerojax.run.metrics.files import read_metrics
from zerojax.run.weights import CHECKPOINTS

RUN: dict[str, Any] = {
    "model": lambda rngs: nnx.Linear(4, 2, rngs=rngs),
    "tx": optax.adam(0.1),
    "loss_fn": lambda model, batch: jnp.mean((model(batch["x"]) - 1) ** 2),
    "zero": zerojax.ZeroConfig(stage=1, compute_dtype="float32"),
}
HELD_OUT = [{"x": np.full((4, 4), value, np.float32)} for value in (0.5, -0.5)]


def abstract() -> zerojax.TrainState:
    return zerojax.TrainState.abstract(**RUN, mesh=zerojax.make_mesh(1, 2))


def draw(step: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(step).standard_normal((4, 4), dtype=np.float32)}


def drawn() -> Any:
    return map(draw, itertools.count())


class Positioned:
    """Batches that know where they stand, and are never read again."""

    def __init__(self) -> None:
        self.at, self.read = 0, 0

    def __iter__(self) -> "Positioned":
        return self

    def __next__(self) -> dict[str, Any]:
        self.at, self.read = self.at + 1, self.read + 1
        return draw(self.at - 1)

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Watch(zerojax.Callback):
    """Notes what it is told; may interrupt after a step, or end the training."""

    def __init__(self, *, kill_at: int = 0, end_at: int = 0) -> None:
        self.told: list[Any] = []
        self.values: dict[int, dict[str, float]] = {}
        self.kill_at, self.end_at = kill_at, end_at

    def on_train_begin(self, trainer: zerojax.Trainer) -> None:
        self.told.append("begin")

    def on_step_end(self, trainer: zerojax.Trainer) -> None:
        self.told.append(trainer.step)
        trainer.should_stop = trainer.step == self.end_at
        if trainer.step == self.kill_at:
            os.kill(os.getpid(), signal.SIGTERM)
            while not trainer_was_asked():
                pass

    def on_log(self, trainer: zerojax.Trainer, step: int, values: Any) -> None:
        self.values[step] = dict(values)

    def on_save(self, trainer: zerojax.Trainer) -> None:
        self.told.append(f"save {trainer.step}")

    def on_train_end(self, trainer: zerojax.Trainer) -> None:
        self.told.append("end")


REQUESTS: list[Any] = []


def trainer_was_asked() -> bool:
    return REQUESTS[-1].received


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerojax.run import loop

    class Noted(loop.StopRequest):
        def __enter__(self):
            REQUESTS.append(self)
            return super().__enter__()

    monkeypatch.setattr(loop, "StopRequest", Noted)


def weights(state: zerojax.TrainState) -> list[np.ndarray]:
    params = zerojax.gather_params(state)
    return [params["bias"], params["kernel"]]


@pytest.fixture(scope="module")
def plain() -> dict[int, list[np.ndarray]]:
    """The weights of a loop by hand after each step."""
    state = zerojax.TrainState.create(**RUN, mesh=zerojax.make_mesh(1, 2))
    found = {}
    for step in range(8):
        state, _ = zerojax.train_step(state, draw(step))
        found[step + 1] = weights(state)
    return found


def same(state: zerojax.TrainState, expected: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, weights(state), expected))


def test_it_trains_evaluates_logs_and_saves(tmp_path: Path, plain: Any) -> None:
    watch = Watch()
    trainer = zerojax.Trainer(
        abstract(), tmp_path, evaluate=HELD_OUT, evaluate_every=2, save_every=3, callbacks=[watch]
    )
    state = trainer.fit(drawn(), steps=5)
    assert same(state, plain[5])
    assert watch.told == ["begin", 1, 2, 3, "save 3", 4, 5, "save 5", "end"]
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(watch.values) == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 5]
    bias, kernel = plain[5]
    losses = [np.mean((batch["x"] @ kernel + bias - 1) ** 2) for batch in HELD_OUT]
    assert lines[-1]["validation_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert trainer.evaluate()["validation_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    shown = f"<Trainer: step 5, mesh 1 x 2, folder {tmp_path}, loss {lines[-1]['loss']:.4f}, validation loss "
    assert repr(trainer).startswith(shown)
    assert f'<td style="text-align: left">{tmp_path}</td>' in trainer._repr_html_()
    assert "loss" not in repr(zerojax.Trainer(abstract(), tmp_path))
    newest = tmp_path / "checkpoints" / "5"
    saved = checkpoints.read_manifest(newest).record.config["zero"]
    assert (saved["preset"], saved["stage"]) == ("zero3", 1)
    assert CHECKPOINTS.tokenizer(newest) is CHECKPOINTS.outputs(newest) is None


@pytest.mark.parametrize("make", [drawn, Positioned, lambda: [draw(step) for step in range(8)]])
def test_a_stopped_training_resumes_to_the_bit(make: Any, tmp_path: Path, plain: Any) -> None:
    with pytest.raises(Stopped, match=r"at step 4 of 8, and saved") as stopped:
        zerojax.Trainer(abstract(), tmp_path, callbacks=[Watch(kill_at=3)]).fit(make(), steps=8)
    assert stopped.value.code == 75
    batches = make()
    trainer = zerojax.Trainer(abstract(), tmp_path)
    assert trainer.step == 4
    assert same(trainer.fit(batches, steps=8), plain[8])
    assert getattr(batches, "read", 4) == 4
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 9))


def test_calls_follow_one_another_and_resume_in_their_order(tmp_path: Path, plain: Any) -> None:
    def both(trainer: zerojax.Trainer) -> zerojax.TrainState:
        trainer.fit([draw(0), draw(1), draw(2)], steps=3)
        return trainer.fit(map(draw, itertools.count(3)), steps=8)

    with pytest.raises(Stopped):
        both(zerojax.Trainer(abstract(), tmp_path, callbacks=[Watch(kill_at=5)]))
    assert same(both(zerojax.Trainer(abstract(), tmp_path)), plain[8])


def test_a_callback_ends_it_and_a_list_begins_anew(tmp_path: Path, plain: Any) -> None:
    watch = Watch(end_at=4)
    trainer = zerojax.Trainer(abstract(), tmp_path, callbacks=[watch])
    trainer.fit([draw(0), draw(1)], steps=8)
    assert (trainer.step, watch.told[-2:]) == (5, ["save 5", "end"])
    assert watch.values[3]["loss"] != watch.values[1]["loss"]
    assert zerojax.Trainer(abstract(), tmp_path).step == 5


def test_a_callback_changes_the_working_directory(tmp_path: Path, monkeypatch: Any) -> None:
    class Leave(zerojax.Callback):
        def on_step_end(self, trainer: zerojax.Trainer) -> None:
            monkeypatch.chdir(tmp_path)

    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    zerojax.Trainer(abstract(), "run", callbacks=[Leave()]).fit(drawn(), steps=2)
    assert [path.name for path in tmp_path.iterdir()] == ["start"]
    assert zerojax.Trainer(abstract(), tmp_path / "start" / "run").step == 2


def test_without_a_folder_nothing_is_written(plain: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    state = zerojax.TrainState.create(**RUN, mesh=zerojax.make_mesh(1, 2))
    batches = drawn()
    trainer = zerojax.Trainer(
        state, evaluate=lambda state: {"validation_norm": float(state.step)}, callbacks=[watch := Watch()]
    )
    trainer.fit(batches, steps=2)
    assert same(trainer.fit(batches, steps=4), plain[4])
    assert watch.values[4]["validation_norm"] == 4.0
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_never_replaces_the_metrics_of_a_step() -> None:
    state = zerojax.TrainState.create(**RUN, mesh=zerojax.make_mesh(1, 2))
    far = {"x": np.full((4, 4), 100, np.float32)}
    watch = Watch()
    trainer = zerojax.Trainer(
        state, evaluate=lambda state: zerojax.eval_step(state, far) | {"tokens": 4}, callbacks=[watch]
    )
    trainer.fit(drawn(), steps=1)
    assert watch.values[1]["validation_loss"] > 100 * watch.values[1]["loss"]
    assert "validation_tokens" not in watch.values[1]
    twice = zerojax.Trainer(trainer.state, evaluate=lambda _: {"validation_loss": 1.0, "loss": 2.0})
    with pytest.raises(zerojax.ZeroError, match="evaluate returned 'validation_loss' and also 'loss'"):
        twice.evaluation()


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zerojax.ZeroError, match="save_every needs folder="):
        zerojax.Trainer(abstract(), save_every=1)
    with pytest.raises(zerojax.ZeroError, match="evaluate_every needs evaluate="):
        zerojax.Trainer(abstract(), evaluate_every=1)
    odd: list[tuple[str, Any]] = [
        ("evaluate has no batch", {"evaluate": []}),
        ("dict in place of batches: give a list", {"evaluate": draw(0)}),
        ("give a list of zerojax.Callback", {"callbacks": [print]}),
        ("Retention\\(newest=3\\)", {"retention": 3}),
        ("no tracker 'wandbb'", {"trackers": ["wandbb"], "folder": tmp_path}),
        ("give a list, such as", {"trackers": "wandb", "folder": tmp_path}),
    ]
    for words, options in odd:
        with pytest.raises(zerojax.ZeroError, match=words):
            zerojax.Trainer(abstract(), **options)
    returned: list[tuple[str, Any]] = [("return scalars by name", 1.0), ("return a scalar", {"x": [1.0]})]
    for words, values in returned:
        with pytest.raises(zerojax.ZeroError, match=words):
            zerojax.Trainer(abstract(), evaluate=lambda _, values=values: values).evaluation()
    trainer = zerojax.Trainer(abstract())
    with pytest.raises(zerojax.ZeroError, match="call fit first"):
        trainer.save()
    with pytest.raises(zerojax.ZeroError, match="dict in place of batches"):
        trainer.fit(draw(0), steps=3)
    with pytest.raises(RunError, match="the batches ended after 2: give more"):
        trainer.fit(iter([draw(0), draw(1)]), steps=3)
    assert trainer.step == 2
    before = trainer.state
    trainer.fit([draw(2)], steps=3)
    with pytest.raises(zerojax.ZeroError, match="use the state that train_step returned"):
        zerojax.Trainer(before)

    class Opaque(Positioned):
        def get_state(self) -> Any:
            return b"12"

    with pytest.raises(zerojax.ZeroError, match="returns a bytes, which JSON cannot hold"):
        trainer.fit(Opaque(), steps=4)


def test_a_last_step_that_is_skipped_is_not_saved_and_says_so(tmp_path: Path, capsys: Any) -> None:
    nan = {"x": np.full((4, 4), np.nan, np.float32)}
    zerojax.Trainer(abstract(), tmp_path).fit([draw(0), nan], steps=2)
    assert "step 2 was skipped, so no checkpoint of it is saved" in capsys.readouterr().out
    zerojax.Trainer(abstract(), tmp_path, evaluate=HELD_OUT).fit([draw(0), nan], steps=2)
    assert step_dirs.steps(tmp_path / "checkpoints") == [2]
