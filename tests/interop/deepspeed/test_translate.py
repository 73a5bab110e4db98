"""DeepSpeed configs: the translation of each key, and that none is lost."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerojax.cli import main
from zerojax.errors import ZeroError
from zerojax.interop.deepspeed import translate
from zerojax.run.config import RunConfig, load_config

FULL = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 25,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 8,
        "zero_quantized_gradients": True,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-4, "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 3e-4,
            "warmup_num_steps": 500,
            "warmup_type": "linear",
            "total_num_steps": 10000,
        },
    },
    "wandb": {"enabled": True, "project": "big"},
    "wall_clock_breakdown": False,
    "my_own_key": {"deep": [1, 2]},
}


def batch(**values: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, **values}


def test_a_whole_config_is_translated() -> None:
    result = translate(FULL, nodes=2, local=8)
    assert result.sections == {
        "train": {"batch_size": 256, "accumulate": 4, "steps": 10000},
        "mesh": {"nodes": 2, "local": 8},
        "zero": {"preset": "zero++-paper", "host": ["optimizer"], "compute_dtype": "bfloat16"},
        "optimizer": {
            "name": "adamw",
            "learning_rate": 3e-4,
            "beta1": 0.9,
            "beta2": 0.98,
            "eps": 1e-7,
            "weight_decay": 0.1,
            "clip_norm": 0.5,
            "schedule": "linear",
            "final_fraction": 0.0,
            "warmup_steps": 500,
        },
        "log": {"every": 25, "trackers": ["wandb"], "project": "big"},
    }
    assert [line.partition(" = ")[0] for line in result.left_out] == [
        "my_own_key.deep",
        "wall_clock_breakdown",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.overlap_comm",
    ]


@pytest.mark.parametrize(
    ("zero", "wanted"),
    [
        ({}, {"preset": "zero3", "stage": 0}),
        ({"stage": 1}, {"preset": "zero3", "stage": 1}),
        ({"stage": 3}, {"preset": "zero3"}),
        ({"stage": 3, "zero_quantized_weights": True}, {"preset": "zero3", "weights": "int8"}),
        ({"stage": 3, "zero_hpz_partition_size": 4}, {"preset": "zero3", "hpz": True}),
        ({"stage": 3, "zero_quantized_gradients": True}, {"preset": "zero3", "grads": ["int4", "int4"]}),
    ],
)
def test_stages_and_parts_of_zeropp_are_translated(zero: dict[str, Any], wanted: dict[str, Any]) -> None:
    result = translate(batch(zero_optimization=zero))
    assert result.sections["zero"] == wanted | {"compute_dtype": "float32"}
    assert result.left_out == []


@pytest.mark.parametrize(
    ("zero", "host"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, ["optimizer"]),
        ({"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}, None),
        (
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            ["optimizer", "weights"],
        ),
        ({"cpu_offload": True}, ["optimizer"]),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, ["optimizer"]),
        ({"offload_param": {"device": "cpu"}}, ["optimizer", "weights"]),
    ],
)
def test_offloaded_stores_are_kept_in_host_memory(zero: dict[str, Any], host: list[str] | None) -> None:
    result = translate(batch(zero_optimization={"stage": 3, **zero}))
    assert result.sections["zero"].get("host") == host
    assert list(result.config().zero.host) == (host or [])
    alone = "offload_optimizer" not in zero and "offload_param" in zero
    assert any("offload" in line for line in result.differs) == ("nvme" in str(zero) or alone)


ARGUMENTS = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 2e-5,
    "lr_scheduler_type": "cosine", "warmup_ratio": 0.03, "bf16": True, "max_steps": 1000,
    "weight_decay": 0.0, "adam_beta2": 0.95, "fsdp": "full_shard auto_wrap", "deepspeed": "ds.json",
}  # fmt: skip
FILLED_IN = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ARGUMENTS, "arguments of the Hugging Face Trainer, not a DeepSpeed config.*--trainer-args"),
        ({"bf16": False, "learning_rate": 1}, "arguments of the Hugging Face Trainer"),
        ({"model_type": "llama", "hidden_size": 8}, "no key of DeepSpeed.*hidden_size"),
        ({}, "no key of DeepSpeed"),
    ],
)
def test_a_file_of_another_program_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ZeroError, match=message):
        translate(data)


def test_the_trainers_arguments_fill_in_what_is_auto() -> None:
    result = translate(FILLED_IN, nodes=2, local=4, trainer=ARGUMENTS)
    assert result.sections["train"] == {"steps": 1000, "batch_size": 64, "accumulate": 2}
    assert result.sections["zero"] == {"preset": "zero3", "compute_dtype": "bfloat16"}
    assert result.sections["optimizer"] == {
        "name": "adamw", "learning_rate": 2e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
        "weight_decay": 0.0, "clip_norm": 1.0, "schedule": "constant", "warmup_steps": 30,
    }  # fmt: skip
    assert not any("auto" in line for line in result.left_out)
    FILLED_IN["optimizer"]["params"]["lr"] = "auto"  # was not changed in place


def test_without_a_scheduler_the_trainer_makes_its_own() -> None:
    data = {"zero_optimization": {"stage": 2}}
    schedule = translate(data, trainer=ARGUMENTS).sections["optimizer"]
    assert (schedule["schedule"], schedule["final_fraction"], schedule["warmup_steps"]) == (
        "warmup-cosine",
        0.0,
        30,
    )
    assert schedule["learning_rate"] == 2e-5
    linear = translate(data, trainer={"max_steps": 50, "warmup_steps": 5}).sections
    assert (linear["optimizer"]["schedule"], linear["optimizer"]["learning_rate"]) == ("linear", 5e-5)
    assert (linear["optimizer"]["warmup_steps"], linear["train"]["steps"]) == (5, 50)
    other = translate(data, trainer={"lr_scheduler_type": "polynomial", "max_steps": 9})
    assert other.sections["optimizer"]["schedule"] == "constant"
    assert any("scheduler = " in line and "polynomial" in line for line in other.left_out)


@pytest.mark.parametrize("trainer", [[], {"learning_rate": "2e-5"}, {"bf16": 1}, {"lr_scheduler_type": 3}])
def test_wrong_arguments_of_the_trainer_are_refused(trainer: Any) -> None:
    with pytest.raises(ZeroError, match="--trainer-args: "):
        translate(FILLED_IN, nodes=1, local=1, trainer=trainer)


def test_the_command_takes_the_trainers_arguments(tmp_path: Path) -> None:
    for name, data in {"ds": FILLED_IN, "args": ARGUMENTS}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    out, devices = tmp_path / "run.toml", ["--nodes", "2", "--gpus-per-node", "4"]
    arguments = [str(tmp_path / "ds.json"), "--trainer-args", str(tmp_path / "args.json"), "--out", str(out)]
    assert main(["from-deepspeed", *arguments, *devices]) == 0
    assert load_config(out).optimizer.learning_rate == 2e-5
    assert main(["from-deepspeed", str(tmp_path / "args.json")]) == 2


def test_hpz_says_how_many_devices_a_node_has() -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 4}
    assert translate(batch(zero_optimization=zero), nodes=2).sections["mesh"] == {"nodes": 2, "local": 4}
    result = translate(batch(zero_optimization=zero), nodes=1, local=8)
    assert result.sections["mesh"] == {"nodes": 1, "local": 8}
    assert "zero_hpz_partition_size = 4" in result.differs[0]


def test_half_precision_becomes_bfloat16_and_its_scaling_is_listed() -> None:
    result = translate(batch(fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 16}))
    assert result.sections["zero"]["compute_dtype"] == "bfloat16"
    assert [line.partition(" = ")[0] for line in result.left_out] == [
        "fp16.initial_scale_power",
        "fp16.loss_scale",
    ]
    assert "train.max_skips" in result.differs[0]


@pytest.mark.parametrize(
    ("kind", "params", "wanted"),
    [
        ("Adam", {}, {"name": "adamw", "learning_rate": 1e-3, "beta2": 0.999, "weight_decay": 0.0}),
        ("OneBitAdam", {"lr": 1, "freeze_step": 9}, {"name": "adamw", "learning_rate": 1.0}),
        ("Lion", {"betas": [0.95, 0.98]}, {"name": "lion", "beta1": 0.95, "beta2": 0.98}),
        ("SGD", {"momentum": 0.8}, {"name": "sgd", "beta1": 0.8}),
        ("Muon", {"lr": 0.02}, {"name": "muon", "beta1": 0.95}),
        ("Lamb", {}, {"name": "adamw"}),
    ],
)
def test_optimizers_are_translated(kind: str, params: dict[str, Any], wanted: dict[str, Any]) -> None:
    result = translate(batch(optimizer={"type": kind, "params": params}))
    found = result.sections["optimizer"]
    assert found | wanted == found
    assert result.config().optimizer.name == wanted["name"]
    assert any(kind in line for line in result.differs) == (kind in ("OneBitAdam", "Lamb", "Muon"))
    assert ("freeze_step" in str(result.left_out)) == ("freeze_step" in params)


@pytest.mark.parametrize(
    ("kind", "params", "wanted"),
    [
        (
            "WarmupLR",
            {"warmup_max_lr": 1e-4},
            {"schedule": "constant", "learning_rate": 1e-4, "warmup_steps": 1000},
        ),
        (
            "WarmupCosineLR",
            {"total_num_steps": 90, "warmup_num_steps": 9},
            {"schedule": "warmup-cosine", "warmup_steps": 9, "final_fraction": 1e-4, "learning_rate": 1e-3},
        ),
        ("OneCycle", {"cycle_min_lr": 1e-4}, {"schedule": "constant", "warmup_steps": 0}),
        (None, {}, {"schedule": "constant", "warmup_steps": 0}),
    ],
)
def test_schedules_are_translated(kind: Any, params: dict[str, Any], wanted: dict[str, Any]) -> None:
    given = {"optimizer": {"type": "Adam"}} | (
        {"scheduler": {"type": kind, "params": params}} if kind else {}
    )
    result = translate(batch(**given))
    found = result.sections["optimizer"]
    assert found | wanted == found
    listed = [line for line in result.left_out if line.startswith("scheduler")]
    assert len(listed) == (kind == "OneCycle")
    assert all("the learning rate stays constant" in line for line in listed)


AUTO = "auto"
TRAINER = {
    "fp16": {"enabled": AUTO, "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": AUTO},
    "optimizer": {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": AUTO, "warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO,
        },
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": AUTO,
    },
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "steps_per_print": AUTO,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
}  # fmt: skip
"""As for Hugging Face's Trainer, which fills everything in."""


def test_an_auto_means_zerojaxs_default() -> None:
    result = translate(TRAINER)
    assert result.sections == {
        "train": {"batch_size": 32, "accumulate": 1},
        "zero": {"preset": "zero3"},
        "optimizer": {"name": "adamw", "schedule": "linear", "final_fraction": 0.0},
        "log": {"trackers": []},
    }
    config, plain = result.config(), RunConfig()
    assert config.zero.compute_dtype == "bfloat16"
    assert replace(config.optimizer, schedule="warmup-cosine", final_fraction=0.1) == plain.optimizer
    assert config.train == plain.train


def test_the_value_in_place_of_an_auto_is_listed() -> None:
    notes = dict(line.split(" = 'auto': ") for line in translate(TRAINER).left_out if "'auto'" in line)
    asked = {path for path, value in leaves(TRAINER) if value == AUTO}
    assert notes.keys() == asked
    for path, setting in {
        "gradient_clipping": "optimizer.clip_norm = 1.0, its default",
        "bf16.enabled": "zero.compute_dtype = bfloat16, its default",
        "optimizer.params.betas": "optimizer.beta1 = 0.9, its default and "
        "optimizer.beta2 = 0.95, its default",
        "scheduler.params.warmup_num_steps": "optimizer.warmup_steps = 100, its default",
        "optimizer.params.lr": "optimizer.learning_rate = 0.0003, its default",
        "scheduler.params.warmup_max_lr": "optimizer.learning_rate = 0.0003, its default",
        "steps_per_print": "log.every = 10, its default",
        "train_batch_size": "train.batch_size = 32",
    }.items():
        assert notes[path] == f"Hugging Face's Trainer would fill it in: here {setting}"


def leaves(data: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in data.items():
        found += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found


def test_a_set_value_is_not_overridden_by_an_auto() -> None:
    """A rate, a dtype or a batch given in the file is never overridden by an "auto"."""
    data = TRAINER | {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 7e-4}}}
    result = translate(data, batch_size=64)
    assert result.sections["zero"]["compute_dtype"] == "bfloat16"
    assert result.sections["optimizer"]["learning_rate"] == 7e-4
    assert result.sections["optimizer"]["beta2"] == 0.999  # not given at all: DeepSpeed's
    assert result.sections["train"]["batch_size"] == 64
    assert not any("has no batch size" in line for line in result.differs)
    assert "zero.compute_dtype = bfloat16" in next(n for n in result.left_out if n.startswith("fp16.enabled"))
    assert "compute_dtype" in translate(TRAINER | {"bf16": {"enabled": False}, "fp16": {}}).sections["zero"]


TUTORIAL = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 10000000,
        "reduce_scatter": True,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 16,
        "zero_quantized_gradients": True,
        "contiguous_gradients": True,
        "overlap_comm": True,
    }
}
"""The complete config of DeepSpeed's ZeRO++ tutorial, whose script sets the batch."""


def test_the_zeropp_tutorials_config_is_translated() -> None:
    result = translate(TUTORIAL)
    assert result.sections["train"] == {"batch_size": 32, "accumulate": 1}
    assert result.sections["mesh"] == {"nodes": 0, "local": 16}
    assert result.sections["zero"] == {"preset": "zero++-paper", "compute_dtype": "float32"}
    assert result.differs[-1].startswith(
        "the config has no batch size (the training script sets it): train.batch_size = 32 is"
    )
    assert "--batch-size" in result.differs[-1]
    assert translate(TUTORIAL, nodes=3).sections["train"]["batch_size"] == 48
    assert translate(TUTORIAL, nodes=3, batch_size=96).sections["train"]["batch_size"] == 96


def test_a_key_with_a_dot_is_not_lost() -> None:
    assert translate(batch(**{"zero_optimization.stage": 3})).left_out == [
        "zero_optimization\\.stage = 3: no counterpart"
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be a JSON object"),
        (batch(zero_optimization={"stage": 2, "zero_quantized_weights": True}), "need stage 3"),
        (
            batch(zero_optimization={"stage": 7}),
            r"^zero_optimization\.stage = 7: .*zero\.stage = 7 should be one of",
        ),
        (batch(zero_optimization={"stage": "3"}), r"zero_optimization\.stage = '3' should be a whole number"),
        (batch(bf16={"enabled": True}, fp16={"enabled": True}), "exclude each other"),
        (batch(bf16={"enabled": 1}), r"bf16\.enabled = 1 should be true or false"),
        (batch(optimizer={"type": "Adam", "params": {"betas": [1]}}), "should be two numbers"),
        (
            batch(optimizer={"type": "Adam", "params": {"lr": -1}}),
            r"^optimizer\.params\.lr = -1: .*optimizer\.learning_rate = -1\.0 must be positive",
        ),
        (
            batch(optimizer={"type": "Adam", "params": {"betas": [0.9, 7]}}),
            r"^optimizer\.params\.betas = \[0\.9, 7\]: .*optimizer\.beta2 = 7\.0 must lie",
        ),
        (
            batch(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10**26}}),
            r"^scheduler\.params\.",
        ),
        (batch(steps_per_print=0), r"^steps_per_print = 0: .*log\.every = 0 must be"),
        (
            batch(zero_optimization={"stage": 3, "zero_hpz_partition_size": 99_999_999}),
            r"^zero_optimization\.",
        ),
        (batch(train_batch_size=10**26), r"^train_batch_size = 10{26}: "),
        (batch(train_batch_size=True), "should be a whole number"),
    ],
)
def test_contradictory_configs_are_refused(data: Any, message: str) -> None:
    with pytest.raises(ZeroError, match=message):
        translate(data)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "ds.json", tmp_path / "run.toml"
    # With the byte order mark that editors on Windows write.
    source.write_text(json.dumps(FULL | {"odd\n[train]\nsteps": "\x07"}), encoding="utf-8-sig")
    options = ["--nodes", "2", "--gpus-per-node", "8"]
    assert main(["from-deepspeed", str(source), "--out", str(out), *options]) == 0
    listed = capsys.readouterr().err
    config = load_config(out)
    assert (config.train.steps, config.optimizer.schedule) == (10000, "linear")
    sent = config.to_zero()
    assert (sent.weights, sent.grads, sent.rotation, sent.hpz) == ("int8", ("int4", "int4"), 0, True)
    for line in translate(FULL, nodes=2, local=8).left_out:
        assert line in listed
        assert f"# - {line}" in out.read_text()
    assert main(["from-deepspeed", str(source), *options]) == 0
    assert capsys.readouterr().out == out.read_text()
    source.write_text(json.dumps(TUTORIAL))
    assert main(["from-deepspeed", str(source), "--batch-size", "96"]) == 0
    assert "batch_size = 96\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ('{"a": 1, "a": 2}', "given twice: 'a'"),
        ('{"train_batch_size": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"train_batch_size": 7, "gradient_accumulation_steps": 2}', "7 does not divide"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert main(["from-deepspeed", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert main(["from-deepspeed", str(tmp_path / "none.json")]) == 2


KEYS = st.sampled_from(
    [
        *("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "stage", "lr"),
        *(
            "zero_optimization",
            "optimizer",
            "scheduler",
            "params",
            "type",
            "betas",
            "enabled",
            "bf16",
            "fp16",
        ),
        *(
            "zero_quantized_weights",
            "zero_hpz_partition_size",
            "warmup_num_steps",
            "total_num_steps",
            "wandb",
        ),
    ]
) | st.text(max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
LEAVES = LEAVES | st.sampled_from(["auto", "AdamW", "WarmupLR", 1, 3, 8])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5)
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=8))
def test_any_json_is_refused_or_translated(data: dict[str, Any]) -> None:
    data = {"train_batch_size": 8, "steps_per_print": 5} | data
    before = json.dumps(data)
    try:
        result = translate(data, nodes=1, local=2)
    except ZeroError:
        pass
    else:
        assert result.config()
        text = result.toml("ds.json")
        text.encode()
        assert tomllib.loads(text) == {k: v for k, v in result.sections.items() if v}
    assert json.dumps(data) == before
