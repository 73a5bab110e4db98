"""A bad update: earlier checkpoints are kept, and a command rewinds to them."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from environment import zerojax as program
from micro_run import Stop, die_at, losses, micro_config, poison, train

from zerojax.cli import main
from zerojax.errors import EXIT_DIVERGED, DivergedError, Stopped, ZeroError
from zerojax.run import loop
from zerojax.run import train_run as run_module
from zerojax.run.checkpoints import step_dirs
from zerojax.run.config import RunConfig, dump_config
from zerojax.run.metrics.files import read_metrics
from zerojax.run.run_dir import RunFolder

LOOSE = {"every": 1, "keep": 1}


def config(text: Path, **sections: Any) -> RunConfig:
    sections["train"] = {"steps": 12, "eval_every": 0} | sections.get("train", {})
    sections.setdefault("checkpoint", LOOSE)
    return micro_config(text, **sections)


def break_at(patch: pytest.MonkeyPatch, step: int, factor: float = 1e30) -> None:
    """Make the update of this step give absurd, though finite, weights, which the next loss shows."""
    real = loop.train_step  # which may be patched already

    def train_step(state: Any, batch: Any) -> Any:
        state, metrics = real(state, batch)
        if int(state.step) == step:
            state = state.with_params(jax.tree.map(lambda x: x * factor, state.params))
        return state, metrics

    patch.setattr(loop, "train_step", train_step)


def steps_in(folder: Path) -> list[int]:
    return step_dirs.steps(folder / "checkpoints")


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(config(text), folder)
    return folder


@pytest.fixture(scope="module")
def broken_once(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights broke with the update of step 5, killed during the skipped steps that follow."""
    folder = tmp_path_factory.mktemp("broken") / "a run"
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, 8)
        break_at(patch, 5)
        with pytest.raises(Stop):
            train(config(text, train={"max_skips": 5}), folder)
    assert [line["skipped"] for line in read_metrics(folder / "metrics.jsonl")] == [0] * 5 + [1, 1]
    return folder


@pytest.fixture
def broken(broken_once: Path, tmp_path: Path) -> Path:
    """A copy of it, to resume or change."""
    return shutil.copytree(broken_once, tmp_path / "a run")


@pytest.mark.slow
def test_rewinding_gives_the_same_run(
    broken: Path, whole: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However often the run is restarted in between, no good checkpoint is deleted."""
    for _ in range(2):
        with pytest.raises(DivergedError) as caught:
            train(config(text), broken)
        assert str(caught.value).startswith(
            "the loss or gradient was not finite in 3 steps in a row, from step 6 on; none of them changed "
            "the parameters. The update of step 5 may have broken the weights: "
            f"`zerojax checkpoints '{broken}' --rewind 4` goes back to the newest earlier checkpoint. "
        )
        assert steps_in(broken) == [4, 5]
        assert RunFolder(broken).read_summary()["status"] == "failed"
    capsys.readouterr()
    assert main(["checkpoints", str(broken), "--rewind", "4"]) == 0
    out = capsys.readouterr().out
    assert f"{broken} will resume from step 4\n" in out
    assert "later checkpoints are kept as 5.undone\n" in out
    assert "lines of later steps are kept in metrics.jsonl.undone\n" in out
    assert [line["step"] for line in read_metrics(broken / "metrics.jsonl.undone")] == [5, 6, 7, 8]
    train(config(text), broken, resume="must")
    assert losses(broken) == losses(whole)
    assert (broken / "checkpoints" / "5.undone").is_dir()
    assert main(["checkpoints", str(broken), "--delete", "5.undone"]) == 0
    assert not (broken / "checkpoints" / "5.undone").exists()


def test_impossible_rewinds_are_refused(finished_copy: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_copy.path
    assert main(["checkpoints", str(run), "--rewind", "3", "--delete", "6"]) == 2
    assert "give --delete in a second command" in capsys.readouterr().err
    assert main(["checkpoints", str(run), "--rewind", "3"]) == 2
    assert "has no checkpoint of step 3; there are: 6, 8" in capsys.readouterr().err
    (run / "checkpoints" / "6" / "manifest.json").unlink()
    assert main(["checkpoints", str(run), "--rewind", "6"]) == 2
    assert "6 is damaged: manifest.json is missing" in capsys.readouterr().err
    assert steps_in(run) == [6, 8]
    assert not (run / "metrics.jsonl.undone").exists()


def test_files_moved_aside_are_not_overwritten(finished_copy: RunFolder) -> None:
    """As if a run broke twice."""
    run = finished_copy.path
    finished_copy.samples.write_text('{"step": 6}\n{"step": 8}\n', encoding="utf-8")
    for number in range(2):
        if number:
            shutil.copytree(run / "checkpoints" / "8.undone", run / "checkpoints" / "8")
            shutil.copy(run / "metrics.jsonl.undone", run / "metrics.jsonl")
        assert main(["checkpoints", str(run), "--rewind", "6"]) == 0
    aside = sorted(path.name for path in run.rglob("*undone*"))
    metrics = ["metrics.jsonl.undone", "metrics.jsonl.undone-2"]
    assert aside == ["8.undone", "8.undone-2", *metrics, "samples.jsonl.undone"]
    assert finished_copy.samples.read_text(encoding="utf-8") == '{"step": 6}\n'


@pytest.mark.slow
def test_a_due_save_waits_for_a_step_that_is_not_skipped(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {3, 4, 6, 12})
    train(config(text, checkpoint={"every": 3, "keep": 9}), tmp_path / "run")
    # The last step has an evaluation of its own.
    assert steps_in(tmp_path / "run") == [5, 7, 9, 12]


class Asked:
    """A ``StopRequest`` that has received a signal."""

    received = True

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("bad", [range(1, 3), range(1, 13)])
def test_a_stop_waits_for_a_step_that_is_not_skipped(
    bad: range, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "StopRequest", Asked)
    poison(monkeypatch, set(bad))
    with pytest.raises(Stopped if len(bad) == 2 else DivergedError):
        train(config(text), tmp_path / "run")
    assert steps_in(tmp_path / "run") == ([3] if len(bad) == 2 else [])


@pytest.mark.slow
def test_weights_broken_by_the_last_update(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_at(monkeypatch, 12)
    with pytest.raises(DivergedError, match=r"validation loss at the end is not finite.*--rewind 11"):
        train(config(text), tmp_path / "run")
    assert steps_in(tmp_path / "run") == [11, 12]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (1, "No step made an update. Lower"),
        (2, "step 1 may have broken the weights, and there is no earlier checkpoint"),
        (5, "step 4 may have broken the weights; the newest checkpoint, of step 3, is earlier"),
    ],
)
def test_no_rewind_is_suggested_where_none_helps(
    first: int, message: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, set(range(first, 13)))
    with pytest.raises(DivergedError, match=message):
        train(config(text, checkpoint={"every": 3}), tmp_path / "run")


def strange(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Replace the batches of some steps by uniformly random bytes that the text does not contain."""
    real = run_module.make_batches

    def make_batches(*arguments: Any) -> Any:
        batches, validation = real(*arguments)
        plain, count = type(batches).__next__, iter(range(1, 100))

        def following(self: Any) -> Any:
            batch = plain(self)
            if next(count) in steps:
                noise = np.random.default_rng(0).integers(128, 256, batch["tokens"].shape)
                return {"tokens": noise.astype(batch["tokens"].dtype)}
            return batch

        monkeypatch.setattr(type(batches), "__next__", following)
        return batches, validation

    monkeypatch.setattr(run_module, "make_batches", make_batches)


SPIKES = {"spike_deviations": 4.0, "spike_window": 4}


@pytest.mark.slow
def test_a_spike_is_skipped(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strange(monkeypatch, {9})
    train(config(text, train=SPIKES), tmp_path / "run")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["spike"] for line in lines] == [0] * 8 + [1] + [0] * 3
    assert [line["skipped"] for line in lines] == [line["spike"] for line in lines]
    assert [line["loss_limit"] is None for line in lines] == [True] * 4 + [False] * 8
    assert lines[8]["loss"] > lines[8]["loss_limit"]
    assert steps_in(tmp_path / "run")[-1] == 12


@pytest.mark.slow
def test_a_spike_stops_the_run(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strange(monkeypatch, {9})
    message = (
        r"the loss of step 9 is a spike: \d.*, above \d.*; it did not change the parameters\. .*--rewind 7"
    )
    with pytest.raises(DivergedError, match=message):
        train(config(text, train=SPIKES | {"on_spike": "stop"}), tmp_path / "run")
    assert steps_in(tmp_path / "run") == [7, 8]


@pytest.mark.slow
def test_weights_that_stay_worse_end_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All losses after a bad update are spikes: the run skips as many as allowed, and says how to go back."""
    break_at(monkeypatch, 8, factor=9.0)
    message = "not finite, or the loss a spike, in 3 steps in a row, from step 9 on.*--rewind 7"
    with pytest.raises(DivergedError, match=message):
        train(config(text, train=SPIKES), tmp_path / "run")


@pytest.mark.parametrize("change", [{"spike_window": 1}, {"spike_deviations": -1.0}, {"on_spike": "cry"}])
def test_an_invalid_spike_rule_is_refused(change: dict[str, Any], text: Path) -> None:
    with pytest.raises(ZeroError, match=f"train.{next(iter(change))}"):
        config(text, train=change)


@pytest.mark.slow
def test_two_processes_agree_and_are_not_restarted(
    text: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path, run = tmp_path / "micro.toml", tmp_path / "run"
    mesh = {"nodes": 2, "local": 1, "emulate": True}
    rate = {"learning_rate": 1e30, "clip_norm": 0.0}
    path.write_text(dump_config(config(text, mesh=mesh, optimizer=rate)))
    launch = ("launch", "--nodes", 2, "--devices-per-node", 1, "--restarts", 3)
    done = program(*launch, path, "--run-dir", run)
    assert done.returncode == EXIT_DIVERGED, done.stdout + done.stderr
    assert "starting again" not in done.stderr
    for rank in range(2):
        assert (
            f"[rank {rank}] zerojax: the loss or gradient was not finite in 3 steps in a row" in done.stdout
        )
    assert "Traceback" not in done.stdout
