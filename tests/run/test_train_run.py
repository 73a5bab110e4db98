"""Runs: their files, resuming, stopping, and refused settings."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from micro_run import Stop, die_at, losses, micro_config, poison, train

from zerojax.errors import RunError, ZeroError
from zerojax.network import nccl
from zerojax.run import train_run
from zerojax.run.checkpoints.canonical import to_canonical
from zerojax.run.config import RunConfig
from zerojax.run.data.dataset import TOKENIZER, is_prepared
from zerojax.run.data.tokenizer import ByteTokenizer
from zerojax.run.metrics.files import read_metrics
from zerojax.run.run_dir import RunFolder, RunLock
from zerojax.run.train_run import TrainRun

EVERYTHING = {"preset": "delta", "error_feedback": True}


def arrays(trainer: TrainRun) -> dict[str, np.ndarray]:
    flat, _ = jax.tree_util.tree_flatten_with_path(to_canonical(trainer.state))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def test_a_run_learns_and_leaves_its_files(finished: RunFolder, finished_copy: RunFolder, text: Path) -> None:
    assert sorted(path.name for path in finished.path.iterdir()) == [
        "checkpoints",
        "config.toml",
        "data",
        "lock",
        "loss.png",
        "metrics.jsonl",
        "run.json",
        "tensorboard",
    ]
    assert sorted(path.name for path in finished_copy.checkpoints.iterdir()) == ["6", "8"]
    assert finished.read_config().data.source == str(text)
    lines = read_metrics(finished.metrics)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["step"] for line in lines if "validation_loss" in line] == [4, 8]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    wanted = {"loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds", "skipped"}
    assert wanted | {"memory_bytes", "internode_bytes"} <= lines[0].keys()
    assert lines[0]["learning_rate"] == pytest.approx(0.005)
    assert lines[2]["learning_rate"] == pytest.approx(0.01)
    summary = finished.read_summary()
    assert (summary["status"], summary["step"], summary["skipped"]) == ("finished", 8, 0)
    assert summary["validation_loss"] == lines[-1]["validation_loss"]


@pytest.mark.slow  # test_restore.py holds the same of the state, test_soak.py of the whole program
@pytest.mark.parametrize(
    "sections", [{"train": {"batch_size": 16, "accumulate": 2}}, {"zero": EVERYTHING}], ids=["exact", "all"]
)
def test_a_resumed_run_is_bit_identical(
    sections: dict[str, Any], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = micro_config(text, **sections)
    whole = train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        die_at(patch, 6)
        with pytest.raises(Stop):
            train(config, tmp_path / "torn")
    resumed = train(config, tmp_path / "torn", resume="must")
    assert losses(tmp_path / "torn") == losses(tmp_path / "whole")
    expected, found = arrays(whole), arrays(resumed)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
def test_resumes_with_another_mesh_and_stage(finished_copy: RunFolder, text: Path) -> None:
    with TrainRun.open(finished_copy.read_config(), finished_copy) as trainer:
        before = arrays(trainer)
    other = micro_config(text, train={"steps": 10}, mesh={"nodes": 4, "local": 2}, zero={"stage": 1})
    with TrainRun.open(other, finished_copy) as trainer:
        assert trainer.step == 8
        for name, value in arrays(trainer).items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)
        trainer.train()
    assert [step for step, _, _ in losses(finished_copy.path)] == list(range(1, 11))


def test_a_bad_step_is_skipped_and_counted(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {3, 5})
    trainer = train(micro_config(text), tmp_path / "run")
    lines = read_metrics(trainer.folder.metrics)
    assert [line["skipped"] for line in lines] == [0, 0, 1, 0, 1, 0, 0, 0]
    assert [line["skipped_total"] for line in lines] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert lines[2]["loss"] is None
    # The learning rate goes by updates, as the optimizer's own count does.
    rates = [line["learning_rate"] for line in lines]
    assert rates[3] == rates[2]
    assert trainer.folder.read_summary()["skipped"] == 2


@pytest.mark.slow
def test_too_many_bad_steps_stop_the_run(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {2, *range(4, 100)})
    with pytest.raises(RunError, match=r"not finite in 3 steps in a row, from step 4 on"):
        train(micro_config(text, train={"steps": 20}), tmp_path / "run")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["skipped_in_row"] for line in lines] == [0, 1, 0, 1, 2, 3]
    assert RunFolder(tmp_path / "run").read_summary()["status"] == "failed"


class TestRefusals:
    """Wrong use is refused with a message that names the way out."""

    def refuse(self, config: RunConfig, folder: Path, match: str, **options: Any) -> None:
        with pytest.raises(ZeroError, match=match):
            TrainRun.open(config, RunFolder(folder), **options)

    def test_a_batch_that_does_not_divide_is_refused(self, text: Path, tmp_path: Path) -> None:
        config = micro_config(text, train={"batch_size": 12})
        self.refuse(config, tmp_path / "run", r"batch_size 12 .* 8 devices .*: set it to 16")
        assert not (tmp_path / "run").exists()

    def test_a_mesh_larger_than_the_devices_is_refused(self, text: Path, tmp_path: Path) -> None:
        self.refuse(micro_config(text, mesh={"nodes": 9}), tmp_path / "run", "does not fit the 12 devices")

    def test_a_vocabulary_smaller_than_the_tokenizer_s_is_refused(self, text: Path, tmp_path: Path) -> None:
        config = micro_config(text, model={"vocab_size": 100})
        self.refuse(config, tmp_path / "run", r"vocabulary of 256, but model\.vocab_size is 100")

    def test_sequence_longer_than_the_data(self, text: Path, tmp_path: Path) -> None:
        long = {"max_seq_len": 1 << 20}
        config = micro_config(text, model=long, train={"sequence_length": 1 << 20})
        self.refuse(config, tmp_path / "run", "too few for one sequence")

    def test_a_folder_that_cannot_be_created_is_refused(self, text: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        self.refuse(micro_config(text), tmp_path / "file" / "run", "cannot create the run folder")

    def test_resume_must_without_a_checkpoint(self, text: Path, tmp_path: Path) -> None:
        self.refuse(micro_config(text), tmp_path / "run", "there is no checkpoint", resume="must")

    def test_another_model_in_the_same_folder(self, finished: RunFolder, text: Path) -> None:
        self.refuse(micro_config(text), finished.path, "holds a run at step 8", resume="never")
        wider = micro_config(text, model={"d_model": 32})
        self.refuse(wider, finished.path, r"started with model\.d_model = 16 and cannot resume with 32")
        seed = micro_config(text, train={"seed": 1})
        self.refuse(seed, finished.path, r"train\.seed")


@pytest.mark.slow  # tests/train/test_fp8_report.py has the numbers
def test_losses_in_fp8_are_logged_with_every_evaluation(text: Path, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 3, "eval_every": 2},
        "zero": {"preset": "delta", "matmul_dtype": "fp8"},
        "log": {"fp8": True},
    }
    train(micro_config(text, **sections), tmp_path / "run")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    found = [{name for name in line if name.startswith("fp8/")} for line in lines]
    kinds = {name.rpartition("/")[2] for name in found[1]}
    assert kinds == {"saturated", "underflowed", "error"}
    assert found == [set(), found[1], found[1]]
    assert all(0.005 < lines[-1][name] < 0.2 for name in found[2] if name.endswith("error"))


def test_losses_in_fp8_need_fp8_matmuls(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroError, match=r"log\.fp8 .* set zero\.matmul_dtype"):
        train(micro_config(text, log={"fp8": True}), tmp_path / "run")


def test_what_nccl_was_told_is_printed_at_the_start_and_recorded(
    finished_copy: RunFolder, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nccl, "_applied", [nccl.Setting(nccl.THREADS, "4", "a link of 25 Gb/s")])
    with TrainRun.open(micro_config(text), finished_copy):
        pass
    line = "NCCL_SOCKET_NTHREADS=4: a link of 25 Gb/s"
    assert line in capsys.readouterr().out
    assert line in finished_copy.read_summary()["sessions"][-1]["notes"]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("there", [False, True])
def test_a_refused_start_leaves_its_folder_as_it_was(text: Path, tmp_path: Path, there: bool) -> None:
    """Prepared tokens too: beside them, settings that make the data fit would be refused."""
    folder = tmp_path / "new/run"
    if there:
        (folder / "data").mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
        ByteTokenizer().save(folder / "data" / TOKENIZER)
    before = files_of(tmp_path)
    with pytest.raises(ZeroError, match="validation"):
        TrainRun.open(micro_config(text, train={"batch_size": 4096}), RunFolder(folder))
    assert files_of(tmp_path) == before
    assert folder.exists() == there


def test_a_start_in_a_folder_in_use_removes_nothing_of_it(text: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with RunLock(folder):
        folder.data.mkdir()
        before = files_of(tmp_path)
        with pytest.raises(ZeroError, match="is in use"):
            TrainRun.open(micro_config(text), folder)
        assert files_of(tmp_path) == before


def test_a_start_that_ends_otherwise_keeps_its_tokens(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_run, "start_run", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        TrainRun.open(micro_config(text), RunFolder(tmp_path))
    assert is_prepared(tmp_path / "data")
