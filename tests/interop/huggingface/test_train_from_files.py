"""Runs that train adapters, or all weights, from a Hugging Face model's files, without an import."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hf_models import FIXTURES, copy_of, tensors, with_model
from micro_run import Stop, die_at, losses, micro_config, train

from zerojax import TrainState, ZeroError, gather_params
from zerojax.cli import main
from zerojax.interop.huggingface import ModelFolder, ModelReader, begin_run
from zerojax.run.build import RunSetup
from zerojax.run.checkpoints import read_manifest
from zerojax.run.config import RunConfig
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import start_run

LORA: dict[str, dict[str, Any]] = {
    "lora": {"rank": 2},
    "zero": {"frozen_weights": "nf4", "precise": []},
    "train": {"steps": 4, "eval_every": 2},
    "checkpoint": {"every": 2},
    "mesh": {"nodes": 1, "local": 2},
}


def test_a_template_that_cannot_be_used_is_named_by_the_models_file(text: Path, tmp_path: Path) -> None:
    model, run = copy_of("llama2", tmp_path / "model"), RunFolder(tmp_path / "run")
    (model / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    chat = {**LORA, "data": {"kind": "chat", "packing": "documents"}}
    source, config = ModelFolder.open(model), with_model(model, micro_config(text, **chat), run)
    with pytest.raises(ZeroError, match=f"^the chat template in {model}/chat_template.jinja: .*by zero"):
        begin_run(source, config, run)
    assert not run.huggingface.exists()


def begun(model: Path, text: Path, folder: Path) -> RunConfig:
    """The settings of a run from a model, whose small files are in its folder."""
    source, run = ModelFolder.open(model), RunFolder(folder)
    config = with_model(model, micro_config(text, **LORA), run)
    begin_run(source, config, run)
    return config


def frozen_of(state: TrainState) -> Any:
    return jax.tree.map(np.asarray, state.frozen)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_on_the_same_base_and_no_other(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, reader = tmp_path / "model", {"reader": ModelReader()}
    shutil.copytree(FIXTURES / "llama2", model)
    config = begun(model, text, tmp_path / "whole")
    whole = train(config, tmp_path / "whole", init_from=model, **reader)
    assert read_manifest(whole.folder.checkpoints / "4").record.base == str(model.resolve())
    assert {leaf.path[-1] for leaf in whole.state.spec.leaves} == {"lora_a", "lora_b"}

    again = replace(config, data=begun(model, text, tmp_path / "again").data)
    with monkeypatch.context() as patch:
        die_at(patch, 3)
        with pytest.raises(Stop):
            train(again, tmp_path / "again", init_from=model, **reader)
    resumed = train(again, tmp_path / "again", **reader)
    assert losses(resumed.folder.path) == losses(whole.folder.path)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, whole.state.params)
    jax.tree.map(np.testing.assert_array_equal, frozen_of(resumed.state), frozen_of(whole.state))

    shutil.rmtree(model)
    with pytest.raises(ZeroError, match=r"were in .*model, which is gone: put it back"):
        train(again, tmp_path / "again", **reader)
    weights = tensors(FIXTURES / "llama2")
    name = "model.layers.1.mlp.up_proj.weight"
    copy_of("llama2", model, None, **{name: weights[name][::-1].copy()})
    with pytest.raises(ZeroError, match="trained on another base"):
        train(again, tmp_path / "again", **reader)


def test_the_command_takes_the_model_and_its_tokenizer_from_the_folder(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, config, run = tmp_path / "model", tmp_path / "tune.toml", tmp_path / "run"
    shutil.copytree(FIXTURES / "llama2", model)
    config.write_text("[train]\nsteps = 1\nbatch_size = 8\nsequence_length = 99\neval_batches = 1\n")
    command = ["train", str(config), "--run-dir", str(run), "--init-from", str(model)]
    command += ["--data.source", str(text), "--data.validation", "0.2", "--mesh.local", "1"]
    command += ["--mesh.nodes", "1", "--lora.rank", "2", "--zero.compute-dtype", "float32"]
    assert main(command) == 2
    assert "train.sequence_length 99 is longer than model.max_seq_len 64: lower it" in capsys.readouterr().err
    command += ["--train.sequence-length", "16"]
    assert main([*command, "--model.layers", "3"]) == 2
    assert "[model] differs from the model in" in capsys.readouterr().err
    assert not run.exists()
    assert main([*command, "--optimizer.learning-rate", "1e-8", "--optimizer.warmup-steps", "0"]) == 0
    assert f"beginning with the weights of {model}" in capsys.readouterr().out
    settings = RunFolder(run).read_config()
    assert settings.model.d_model == ModelFolder.open(model).model.d_model
    assert settings.data.tokenizer == str(run / "tokenizer" / "tokenizer.json")
    assert main(["export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    values = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == str(model)
    assert main(["export", str(run), str(tmp_path / "whole"), "--dtype", "float32"]) == 0
    exported = tensors(tmp_path / "whole")
    for name, values in tensors(model).items():
        np.testing.assert_allclose(exported[name], values.astype(np.float32), rtol=0, atol=1e-4)
    moved = ["--run-dir", str(run.rename(tmp_path / "moved"))]
    assert main([*command, *moved]) == 0
    assert "resuming from step 1; data.tokenizer" not in capsys.readouterr().out
    shutil.rmtree(model)
    assert main([*command, *moved]) == 2
    assert f"{model}, which is gone: put it back." in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_trains_all_weights_starts_with_the_files_weights(text: Path, tmp_path: Path):
    source, run = ModelFolder.open(FIXTURES / "gpt2"), RunFolder(tmp_path / "run")
    config = with_model(source.folder, micro_config(text, mesh={"nodes": 1, "local": 2}), run)
    start = start_run(RunSetup(config), run, None, source.folder, ModelReader())
    assert (start.base, start.notes) == ("", [f"beginning with the weights of {source.folder}"])
    params = gather_params(start.state)
    wanted = tensors(source.folder)
    np.testing.assert_array_equal(params["embed"]["embedding"], wanted["transformer.wte.weight"])
    qkv = params["blocks"]["block"]["attention"]["qkv"]["kernel"]
    np.testing.assert_array_equal(qkv[1], wanted["transformer.h.1.attn.c_attn.weight"])
