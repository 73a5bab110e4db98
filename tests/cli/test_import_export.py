"""``zerojax import`` and ``zerojax export``, and commands on their results."""

import io
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import peft_by_hand
import pytest
from hf_models import FIXTURES, copy_of, tensors

from zerojax.cli import main
from zerojax.cli.export_model import rounding_note
from zerojax.cli.train import start_from
from zerojax.errors import RunError, ZeroError
from zerojax.interop.huggingface.exporting import new_folder
from zerojax.run.build import abstract_model
from zerojax.run.data.chat_template import CHATML
from zerojax.run.run_dir import RunFolder, RunLock
from zerojax.run.train_run import TrainRun
from zerojax.train.state import TrainState

MESH = ["--mesh.nodes", "2", "--mesh.local", "4", "--zero.compute-dtype", "float32"]
TRAINING = ["--train.batch-size", "8", "--train.sequence-length", "16", "--train.eval-batches", "2"]
LLAMA = """[train]
sequence_length = 16
[model]
vocab_size = 256
layers = 1
d_model = 64
heads = 2
ffn = 64
max_seq_len = 32
norm = "rms"
positions = "rope"
mlp = "swiglu"
biases = false
"""


def test_the_folder_of_an_export_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("nothing")
    for out in (".", "..", "/", "link"):
        with pytest.raises(ZeroError, match="exists: choose another folder"), new_folder(Path(out)):
            pass


def test_an_export_to_a_full_disk_says_so(tmp_path: Path):
    full = pytest.raises(RunError, match=r"cannot write to .*/out\.unfinished: No space left")
    with full, new_folder(tmp_path / "out"):
        Path("/dev/full").write_text("x")
    assert not (tmp_path / "out").exists()


def test_a_model_is_imported_evaluated_trained_and_exported(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = str(tmp_path / "run")
    data = ["--data.source", str(text), "--data.validation", "0.2"]
    assert main(["import", str(FIXTURES / "llama2"), run, *MESH, *TRAINING, *data]) == 0
    assert "8,016 parameters, read into the shards of 2 x 4 devices" in capsys.readouterr().out
    run = str((tmp_path / "run").rename(tmp_path / "moved"))  # with its tokenizer
    assert main(["eval", run]) == 0
    before = float(capsys.readouterr().out.split("validation loss ")[1].split()[0])
    # Settings of the training may still change, the model's dropout among them; its shape may not.
    again = ["train", f"{run}/config.toml", "--run-dir", run]
    assert main([*again, "--model.norm-eps", "0.1"]) == 2
    assert "holds an imported model with model.norm_eps" in capsys.readouterr().err
    steps = ["--train.steps", "4", "--optimizer.learning-rate", "1e-2", "--optimizer.warmup-steps", "1"]
    assert main([*again, *steps, "--zero.remat", "none", "--model.dropout", "0.1"]) == 0
    assert f"beginning with the weights of {run}/checkpoints/0" in capsys.readouterr().out
    after = json.loads((tmp_path / "moved" / "run.json").read_text())["validation_loss"]
    assert after < before - 0.1
    out = tmp_path / "out"
    assert main(["export", run, str(out), "--dtype", "bfloat16"]) == 0
    exported, original = tensors(out), tensors(FIXTURES / "llama2")
    assert exported.keys() == original.keys()
    changed = [np.abs(exported[n].astype(np.float32) - x).max() > 1e-3 for n, x in original.items()]
    assert all(changed)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


FAMILIES = FIXTURES / "families"
ALWAYS = ("glm4-moe",)
STATE = {"choice_bias", "load", "scale"}
"""What the models of ``ALWAYS`` keep besides weights: all that any family's model does."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=() if path.name in ALWAYS else pytest.mark.slow)
        for path in sorted(FAMILIES.iterdir())
    ],
)
def test_every_family_by_the_commands(name: str, text: Path, tmp_path: Path):
    model, run, out = tmp_path / "model", str(tmp_path / "run"), tmp_path / "out"
    shutil.copytree(FAMILIES / name, model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURES / "llama2" / file, model)
    one = ["--mesh.nodes", "1", "--mesh.local", "1", "--train.sequence-length", "8", "--train.steps", "1"]
    few = ["--train.batch-size", "2", "--train.eval-batches", "1", "--optimizer.warmup-steps", "1"]
    data = ["--data.source", str(text), "--data.validation", "0.2"]
    assert main(["import", str(model), run, *one, *few, *data]) == 0
    config = RunFolder(tmp_path / "run").read_config()
    kept = abstract_model(config).spec.adapter.abstract_model_state
    assert {place.rpartition("/")[2] for place in kept} <= STATE
    assert main(["export", run, str(out)]) == 0
    before, exported = tensors(model), tensors(out)
    assert before.keys() == exported.keys()
    assert all(exported[tensor].tobytes() == values.tobytes() for tensor, values in before.items())
    sample = ["sample", run, "--prompt", "the", "--tokens", "2"]
    assert main(sample) == 0
    assert main(["train", f"{run}/config.toml", "--run-dir", run]) == 0
    assert main(sample) == 0
    assert main(["export", run, str(tmp_path / "trained")]) == 0
    trained = tensors(tmp_path / "trained")
    assert {tensor: x.shape for tensor, x in trained.items()} == {t: x.shape for t, x in before.items()}


@pytest.mark.slow
def test_a_models_chat_template_is_kept_used_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model, run, out = copy_of("llama2", tmp_path / "model"), str(tmp_path / "run"), tmp_path / "out"
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    one = ["--mesh.nodes", "1", "--mesh.local", "1", *TRAINING]
    chat = ["--data.kind", "chat", "--data.packing", "documents"]
    assert main(["import", str(model), run, *one, *chat]) == 0
    # Without training, and without any data.
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    capsys.readouterr()
    assert main(["chat", run, "--tokens", "3"]) == 0
    assert capsys.readouterr().out.count("\n") == 2
    # Another template than the model's is written in its place.
    for wanted in (template, CHATML):
        assert main(["export", run, str(out)]) == 0
        assert (out / "chat_template.jinja").read_text() == wanted
        # The import had no such file; llama2's tokenizer writes <|end|>, the first of its tokens, in both.
        ends = json.loads((out / "generation_config.json").read_text())
        assert ends == {"bos_token_id": 0, "eos_token_id": 0}
        shutil.rmtree(out)
        folder = RunFolder(tmp_path / "run")
        config = folder.read_config()
        folder.write_config(replace(config, data=replace(config.data, chat_template="chatml")))


@pytest.mark.parametrize(
    ("stored", "frozen", "noted"), [("nf4", 2, True), (None, 2, False), ("int8", 0, False)]
)
def test_an_export_says_how_frozen_weights_were_rounded(stored: str | None, frozen: int, noted: bool):
    spec = SimpleNamespace(zero=SimpleNamespace(frozen_weights=stored), frozen=["a weight"] * frozen)
    note = rounding_note(cast(TrainState, SimpleNamespace(spec=spec)))
    assert (note is not None and "the rounding of nf4" in note) == noted


@pytest.mark.slow
def test_train_from_an_adapter_and_export_both_ways(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, run, adapter = FIXTURES / "llama2", str(tmp_path / "run"), FIXTURES / "adapters" / "llama2"
    data = ["--data.source", str(text), "--data.validation", "0.2", *TRAINING]
    mesh = ["--mesh.nodes", "1", "--mesh.local", "1", "--zero.compute-dtype", "float32"]
    assert main(["import", str(model), run, *mesh, *data, "--lora.rank", "3"]) == 0  # frozen later
    assert main(["export", run, str(tmp_path / "none"), "--adapter"]) == 2
    assert "has trained no adapters" in capsys.readouterr().err
    config = Path(run, "config.toml")
    config.write_text(config.read_text().replace("rank = 3", "rank = 0"))
    again = ["train", str(config), "--run-dir", run, "--train.steps", "1"]
    again += ["--optimizer.warmup-steps", "0", "--optimizer.learning-rate", "1e-6", "--zero.block-size", "64"]
    assert main([*again, "--adapter", str(adapter), "--lora.rank", "0"]) == 2
    assert "--lora.rank 0 has none: leave it out" in capsys.readouterr().err
    assert main([*again, "--adapter", str(adapter)]) == 0
    assert f"beginning with the adapters of {adapter}" in capsys.readouterr().out
    out, whole = tmp_path / "adapter", tmp_path / "whole"
    assert main(["export", run, str(whole)]) == 0
    assert main(["export", run, str(out), "--adapter"]) == 0
    assert f"{out}: adapters of down_proj, q_proj, v_proj, from step 1" in capsys.readouterr().out
    base, exported = tensors(model), tensors(whole)
    assert peft_by_hand.settings(out)["base_model_name_or_path"] == str(model)
    assert exported.keys() == base.keys()
    for name, values in peft_by_hand.merged(base, out).items():
        np.testing.assert_allclose(exported[name], values, rtol=0, atol=1e-6)
    for name, values in peft_by_hand.merged(base, adapter).items():  # after one small step
        np.testing.assert_allclose(exported[name], values, rtol=0, atol=1e-4)
    assert main(["sample", run, "--prompt", "all work", "--tokens", "2"]) == 0


def test_an_adapter_needs_the_base_that_it_was_trained_on():
    trainer = cast(TrainRun, SimpleNamespace(base=""))
    with pytest.raises(ZeroError, match="--adapter files: the other weights of this run are random"):
        start_from(Path("files"), trainer)


@pytest.mark.slow
def test_a_model_with_adapters_is_exported_quantized(text: Path, tmp_path: Path):
    config = tmp_path / "own.toml"
    config.write_text(LLAMA)
    run, out = str(tmp_path / "run"), tmp_path / "out"
    data = ["--data.source", str(text), "--data.validation", "0.2", "--train.steps", "2"]
    data += ["--optimizer.warmup-steps", "0", "--optimizer.learning-rate", "1e-2", "--lora.rank", "4"]
    assert main(["train", str(config), "--run-dir", run, *MESH, *TRAINING, *data]) == 0
    assert main(["export", run, str(out), "--weights", "int8", "--block-size", "64"]) == 0
    report = json.loads((out / "zerojax.json").read_text())
    assert report["perplexity"] != report["perplexity_full"]
    assert report["perplexity"] == pytest.approx(report["perplexity_full"], rel=1e-3)
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    assert report["validation_loss_full"] == pytest.approx(summary["validation_loss"], rel=1e-5)


def test_import_refuses_a_folder_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    with RunLock(RunFolder(run)):
        assert main(["import", str(FIXTURES / "llama2"), str(run), *MESH, *TRAINING]) == 2
    assert f"{run} is in use by process {os.getpid()} " in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == ["lock"]


@pytest.mark.slow
def test_a_trained_run_is_exported_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config, rows = tmp_path / "own.toml", tmp_path / "rows.jsonl"
    config.write_text(LLAMA)
    # With the tokens that begin and end it, each document fills a row of 16 tokens and one more.
    every = [{"prompt": f"{i:3} + 1", "completion": f"  = {i + 1:4}"} for i in range(200)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in every))
    run = str(tmp_path / "run")
    data = ["--data.source", str(rows), "--data.validation", "0.2", "--train.steps", "1"]
    data += ["--data.kind", "completion", "--data.packing", "documents"]
    data += ["--optimizer.warmup-steps", "0", "--optimizer.learning-rate", "1e-2"]
    assert main(["train", str(config), "--run-dir", run, *MESH, *TRAINING, *data]) == 0
    out = tmp_path / "out"
    assert main(["export", run, str(out), "--weights", "int2", "--block-size", "64"]) == 0
    report = json.loads((out / "zerojax.json").read_text())
    assert f"perplexity per token: {report['perplexity']:.4f} with int2 weights" in capsys.readouterr().out
    assert report["perplexity"] == pytest.approx(math.exp(report["validation_loss"]))
    assert report["perplexity"] != report["perplexity_full"]
    assert report["validation_tokens"] == 2 * 8 * 9  # completions with their ends, in two batches
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    assert report["validation_loss_full"] == pytest.approx(summary["validation_loss"], rel=1e-5)
    settings = json.loads((out / "config.json").read_text())
    group = settings["quantization_config"]["config_groups"]["group_0"]
    assert group["weights"]["num_bits"] == 2
    assert group["weights"]["group_size"] == 64
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert (out / "tokenizer.json").is_file()
    assert main(["import", str(out), str(tmp_path / "again")]) == 2
    assert "quant_method = 'compressed-tensors' is not supported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import"], "name the model's folder and the run's"),
        (["import", "nowhere", "run"], "nowhere/config.json: No such file or directory"),
        (["import", "MODEL", "run", "--model.layers", "3"], "[model] differs from the model in"),
        (["import", "BARE", "run"], "has no tokenizer: choose one with --data.tokenizer"),
        (["export", "nowhere", "out"], "nowhere is not a run folder"),
        (["export", "RUN", "out", "--block-size", "64"], "add --weights"),
        (
            ["export", "RUN", "out", "--weights", "int8", "--block-size", "63"],
            "--block-size 63: must be a power",
        ),
        (
            ["export", "RUN", "out", "--weights", "int8", "--block-size", "0"],
            "--block-size 0: must be a power",
        ),
        (["export", "RUN", "out", "--weights", "fp8-blocks", "--block-size", "0"], "two positive integers"),
        (["export", "RUN", "out", "--shard-gb", "0"], "above 0"),
        (["export", "RUN", "out", "--adapter", "--weights", "int8"], "drop --weights, --shard-gb"),
        (["export", "RUN", "out"], "has no checkpoint yet"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_written(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    bare = copy_of("llama2", tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").touch()
    words = {"MODEL": str(FIXTURES / "llama2"), "BARE": str(bare), "RUN": "begun"}
    try:
        code = main([words.get(word, word) for word in arguments])
    except SystemExit as exit_:
        code = exit_.code
    seen = "".join(capsys.readouterr())
    assert code == 2
    assert message in " ".join(seen.split())
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out").exists()
