"""The folder of a run, what it begins with, and dry runs."""

from dataclasses import replace
from pathlib import Path

import pytest
from hf_models import FIXTURES
from micro_run import micro_config

from zerojax import ZeroError
from zerojax.cli import main
from zerojax.cli.run_options import RunOptions, read_run
from zerojax.cli.train import Options
from zerojax.models import GPTConfig
from zerojax.run.checkpoints import Record
from zerojax.run.checkpoints.manifest import write_manifest
from zerojax.run.config import DataSection, spelled_out
from zerojax.run.data.prepare import prepare
from zerojax.run.run_dir import RunFolder


def test_a_config_names_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama-3.2.toml").touch()
    for config in ("llama-3.2", "llama-3.2.toml", str(tmp_path / "llama-3.2.toml")):
        assert RunOptions(config).folder.path == Path("runs/llama-3.2")
    assert RunOptions("llama-3.2", run_dir=tmp_path / "mine").folder.path == tmp_path / "mine"


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["checkpoints", "~/run"]) == 2
    assert str(tmp_path / "run") in capsys.readouterr().err


def test_a_name_of_the_hub_gets_the_way_to_its_folder(tmp_path, capsys):
    run = ["--run-dir", str(tmp_path / "run")]
    assert main(["train", "gpt-tiny", "--init-from", "Qwen/Qwen3-0.6B", *run]) == 2
    error = capsys.readouterr().err
    assert "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`, and pass --init-from Qwen3-0.6B" in error
    assert main(["train", "gpt-tiny", "--init-from", str(tmp_path / "no" / "where"), *run]) == 2
    assert "where: no such folder\n" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_brings_its_shape_and_tokenizer(finished, tmp_path):
    theirs = finished.read_config()
    arguments = ["gpt-tiny", "--init-from", str(finished.path), "--run-dir", str(tmp_path / "run")]
    length = ["--train.sequence-length", str(theirs.train.sequence_length)]
    _, settings, _ = read_run(Options, "train", [*arguments, *length])
    assert settings.model == replace(theirs.model, attention=GPTConfig.attention)
    assert settings.data.tokenizer == theirs.data.tokenizer
    _, changed, _ = read_run(Options, "train", [*arguments, *length, "--model.dropout", "0.25"])
    assert changed.model == replace(settings.model, dropout=0.25)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.write_config(settings)
    arguments[2] = "gone"
    assert read_run(Options, "train", [*arguments, *length])[1] == settings, "a restart repeats the command"


def test_a_run_brings_the_tokenizer_of_its_tokens_not_that_of_its_settings(text, tmp_path, monkeypatch):
    """Of a run on prepared tokens; with neither them nor a copy of the tokenizer, one must be named."""
    settings = micro_config(text, data={"tokenizer": "bpe", "vocab_size": 300}, model={"vocab_size": 300})
    prepare(settings.data, tmp_path / "tokens")
    theirs, run = replace(settings, data=DataSection(source="tokens")), RunFolder(tmp_path / "theirs")
    (run.checkpoints / "4").mkdir(parents=True)
    write_manifest(run.checkpoints / "4", 4, 0.0, Record(spelled_out(theirs)))
    (tmp_path / "new.toml").touch()

    def tokenizer(*more: str) -> str:
        own = ["new.toml", "--init-from", "theirs", "--train.sequence-length", "16", *more]
        _, settings, _ = read_run(Options, "train", own)
        return settings.data.tokenizer

    monkeypatch.chdir(tmp_path)
    assert tokenizer() == str(tmp_path / "tokens/tokenizer.json")
    (tmp_path / "tokens").rename(tmp_path / "moved")
    with pytest.raises(
        ZeroError, match=r"theirs/checkpoints/4: its tokenizer is gone; name one in data\.tok"
    ):
        tokenizer()
    assert tokenizer("--data.tokenizer", "byte") == "byte"
    (tmp_path / "moved").rename(tmp_path / "tokens")
    prepare(theirs.data, run.data)
    (tmp_path / "tokens").rename(tmp_path / "moved")
    assert tokenizer() == str(run.data / "tokenizer.json")


def test_a_hugging_face_model_brings_its_shape_and_the_command_line_its_own_head(tmp_path):
    (tmp_path / "config.toml").write_text("[model]\nkv_heads = 2\n[train]\nsequence_length = 512\n")
    own = ["--train.sequence-length", "32", "--model.outputs", "1", "--model.dropout", "0.25"]
    where = [
        f"--init-from={FIXTURES / 'gpt2'}",
        str(tmp_path / "config.toml"),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    _, settings, source = read_run(Options, "train", [*own, *where])
    assert source is not None
    assert (settings.model.layers, settings.model.kv_heads) == (source.model.layers, None)
    assert (settings.model.outputs, settings.model.tied, settings.model.dropout) == (1, False, 0.25)


def test_a_dry_run_shows_the_plan_and_writes_nothing(finished, tmp_path, capsys):
    run = tmp_path / "run"
    command = ["train", "gpt-tiny", "--dry-run", "--train.steps", "2000", "--run-dir", str(run)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "between nodes, per node and step" in out
    would = "would begin with random weights, and train until step 2,000; nothing was written"
    assert out.endswith(f"{run}: {would}\n")
    assert main([*command, "--train.batch-size", "3"]) == 2
    assert "train.batch_size 3 does not divide" in capsys.readouterr().err
    assert main([*command, "--data.source", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
    assert main([*command, "--resume", "must"]) == 2
    assert not run.exists()


def refused(capsys, *arguments: str) -> str:
    """What a dry run says of a command that it refuses."""
    assert main([*arguments, "--dry-run"]) == 2
    return capsys.readouterr().err


def test_a_dry_run_refuses_what_the_run_would(finished, tmp_path, capsys):
    resumed = ["train", str(finished.config), "--run-dir", str(finished.path)]
    assert main([*resumed, "--dry-run"]) == 0
    assert "would resume from step 8" in capsys.readouterr().out
    error = refused(capsys, *resumed, "--model.layers", "2")
    assert "was started with model.layers = 1 and cannot resume with 2" in error
    assert f"set it back, as in {finished.config}, or choose another" in error
    assert "A run started with --init-from has it from there: repeat the option." in error
    assert "--init-from" not in refused(capsys, *resumed, "--train.seed", "7")
    (tmp_path / "file").touch()
    for place in ("file", "file/run"):
        error = refused(capsys, "train", "gpt-tiny", "--run-dir", str(tmp_path / place))
        assert f"{place}: cannot create the run folder: {tmp_path}/file is a file" in error
    new = ["train", "gpt-tiny", "--run-dir", str(tmp_path / "run")]
    error = refused(capsys, *new, "--data.tokenizer", "missing.json")
    assert "data.tokenizer 'missing.json' must be 'byte', 'bpe' or an existing file" in error
    chat = ["--data.kind", "chat", "--data.packing", "documents", "--data.chat-template"]
    assert "data.chat_template 'missing.jinja'" in refused(capsys, *new, *chat, "missing.jinja")
    error = refused(capsys, *new, "--model.vocab-size", "100")
    assert "the tokenizer has a vocabulary of 256, but model.vocab_size is 100" in error
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_post_training_refuses_what_the_run_would(finished, tmp_path, capsys):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    run = ["posttrain", str(finished.config), "--data.source", str(rows), "--run-dir", str(tmp_path / "run")]
    first, pairs = ["--init-from", str(finished.path)], ["--data.kind", "completion"]
    pairs += ["--data.packing", "documents", "--posttrain.method"]
    assert 'posttrain.method is "none": set it to one of grpo' in refused(capsys, *run, *first)
    assert "starts with a trained model" in refused(capsys, *run, *pairs, "dpo")
    assert "there is no reward: set posttrain.reward" in refused(capsys, *run, *first, *pairs, "grpo")
    error = refused(capsys, *run, *first, *pairs, "dpo", "--data.tokenizer", "missing.json")
    assert "data.tokenizer 'missing.json'" in error
    assert main([*run, *first, *pairs, "dpo", "--dry-run"]) == 0
    assert f"would begin with the weights of {finished.checkpoints}/8" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_dry_run_knows_the_tokenizer_of_a_hugging_face_model(text, tmp_path, capsys):
    run = ["train", "gpt-tiny", "--init-from", str(FIXTURES / "gpt2"), "--train.sequence-length", "32"]
    run += ["--data.source", str(text), "--run-dir", str(tmp_path / "run")]
    assert main([*run, "--dry-run"]) == 0
    assert f"would begin with the weights of {FIXTURES / 'gpt2'}" in capsys.readouterr().out
    error = refused(capsys, *run, "--data.tokenizer", str(tmp_path / "missing.json"))
    assert "missing.json' must be 'byte', 'bpe' or an existing file" in error
    assert not (tmp_path / "run").exists()


def test_all_settings_that_do_not_fit_are_reported_at_once(tmp_path, capsys):
    wrong = ["--train.steps", "0", "--data.validation", "2", "--optimizer.learning-rate", "-1"]
    assert main(["train", "gpt-tiny", "--run-dir", str(tmp_path / "run"), *wrong]) == 2
    count, messages = capsys.readouterr().err.strip().split(": ", 2)[1:]
    assert count == "3 settings cannot be used"
    assert sorted(messages.split("; ")) == [
        "data.validation = 2.0 must lie between 0 and 1",
        "optimizer.learning_rate = -1.0 must be positive",
        "train.steps = 0 must be at least 1",
    ]
    (tmp_path / "wrong.toml").write_text("[train]\nsteps = 0\n[data]\nvalidation = 2.0\n[mesh]\nnodes = -1\n")
    assert main(["train", str(tmp_path / "wrong.toml")]) == 2
    assert "wrong.toml: 3 settings cannot be used: train.steps" in capsys.readouterr().err
