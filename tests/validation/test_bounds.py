"""Absurd numbers are refused at once, in one line, in files and on command lines."""

import json
import re
import typing

import pytest
from environment import ROOT
from fuzzing import time_limit

from zerojax.cli import main
from zerojax.errors import ZeroError
from zerojax.interop.huggingface.families import read_model
from zerojax.models import GPTConfig
from zerojax.run.config import ConfigError, RunConfig, config_from_dict
from zerojax.run.config.keys import keys_of, section_of
from zerojax.zero_config import ZeroConfig

NUMBERS = [
    (top.name, key.name, key.kind)
    for top in keys_of(RunConfig)
    for key in keys_of(typing.cast(type, section_of(top.kind)))
    if key.kind in (int, float)
]


@pytest.mark.parametrize(("section", "name", "kind"), NUMBERS, ids=lambda part: str(part))
def test_every_number_of_a_config_has_bounds(section: str, name: str, kind: type):
    absurd = (10**26, 2**33, -(10**26)) if kind is int else (float("inf"), -1e39, 1e39, float("nan"))
    for value in absurd:
        with time_limit(1), pytest.raises(ZeroError, match=rf"\b{name}\b") as error:
            config_from_dict({section: {name: value}})
        assert str(error.value).isprintable()


def test_they_are_all_looked_at():
    assert len(NUMBERS) > 50


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mesh": {"nodes": 99_999_999}}, "at most 1,048,576 devices$"),
        ({"mesh": {"nodes": 99_999, "local": 99_999}}, "at most 1,048,576 devices$"),
        ({"mesh": {"nodes": 1024, "local": 8, "emulate": True}}, "at most 4,096 devices can be emulated"),
        ({"train": {"steps": 10**9}}, r"train\.steps = 1000000000 must be at most 16,777,216"),
        ({"train": {"batch_size": 2**31}}, "tokens per step"),
        ({"model": {"layers": 10**9}}, "layers = 1000000000 must be at most 10,000"),
        ({"model": {"layers": 1001, "scan": False}}, "layers = 1001 must be at most 1,000 without scan"),
        ({"model": {"d_model": 2**32 - 4, "heads": 1}}, "parameters, and at most 1e"),
        ({"model": {"vocab_size": 2**32 - 1, "d_model": 2**20, "heads": 1}}, "parameters, and at most 1e"),
        (
            {"data": {"mixture": [{"source": "a", "weight": float("nan")}]}},
            "weight = nan must be a finite number",
        ),
    ],
)
def test_sizes_that_no_machine_has(values: dict[str, dict[str, object]], message: str):
    with time_limit(1), pytest.raises(ConfigError, match=message):
        config_from_dict(values)


def test_the_library_has_the_same_bounds():
    for options in ({"chunks": 10**9}, {"accumulate": 10**26}, {"delta_resync": 10**26}):
        with pytest.raises(ZeroError, match="ZeroConfig"):
            ZeroConfig.preset("delta", **options)
    with pytest.raises(ZeroError, match=r"\[model\] init_std = inf must be a finite number"):
        GPTConfig(init_std=float("inf"))


HUGE = ["--nodes", "2", "--gpus-per-node", "4", "--gpu", "h100", "--bandwidth", "100gbit"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["plan", "gpt-tiny", "--mesh.nodes", "99999999", "--mesh.local", "1"], "at most 4,096 devices"),
        (
            ["plan", "gpt-tiny", "--mesh.nodes", "2", "--mesh.local", "4096"],
            "at most 4,096 devices can be emulated",
        ),
        (["comm", "gpt-tiny", "--model.layers", "1" + "0" * 26], "must be between"),
        (["train", "gpt-tiny", "--optimizer.learning-rate", "inf"], r"learning_rate = inf must be a finite"),
        (["train", "gpt-tiny", "--optimizer.eps", "nan"], r"eps = nan must be a finite"),
        (["plan", "gpt-tiny", *HUGE, "--peak-tflops", "inf"], "--peak-tflops = inf must be a finite"),
        (["plan", "gpt-tiny", *HUGE, "--peak-tflops", "1e30"], "must be above 0 and below"),
        (["plan", "gpt-tiny", *HUGE, "--nodes", "99999999"], "at most 1,048,576 GPUs"),
        (["plan", "gpt-tiny", *HUGE, "--bandwidth", "9" * 400 + "gbit"], "--bandwidth: .* is not a rate"),
        (["sample", "runs/x", "--tokens", "9999999999"], "--tokens"),
        (["sample", "runs/x", "--temperature", "nan"], "--temperature = nan"),
        (["from-deepspeed", "x.json", "--nodes", "1" + "0" * 26], "--nodes must be between"),
        (["from-deepspeed", "x.json", "--batch-size", "1" + "0" * 26], "--batch-size must be between"),
    ],
)
def test_a_command_line(command: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with time_limit():
        assert main(command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("zerojax: ")
    assert re.search(message, line)


LLAMA = json.loads((ROOT / "tests" / "fixtures" / "huggingface" / "llama2" / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**26),
        ("num_hidden_layers", 10**9),
        ("hidden_size", 2**32),
        ("vocab_size", 2**40),
        ("max_position_embeddings", 2**33),
        ("rms_norm_eps", float("inf")),
    ],
)
def test_a_hugging_face_config(name: str, value: float):
    with time_limit(1), pytest.raises(ZeroError, match=r"^config\.json: \[model\] "):
        read_model(LLAMA | {name: value}, "config.json")
