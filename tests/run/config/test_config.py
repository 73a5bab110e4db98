"""Settings: defaults, TOML, and errors that name the way out."""

import dataclasses
from pathlib import Path
from typing import cast

import pytest
from environment import ROOT

from zerojax.errors import ZeroError
from zerojax.matmul.lora import LoRA
from zerojax.run.config import (
    ConfigError,
    DataSection,
    RunConfig,
    config_from_dict,
    config_to_dict,
    dump_config,
    find_config,
    load_config,
    with_settings,
)
from zerojax.run.config.keys import keys_of, section_of
from zerojax.zero_config.config import PRESETS, Preset, ZeroConfig


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == RunConfig()


def test_values_of_a_file_reach_the_settings(tmp_path: Path) -> None:
    config = load_config(
        write(
            tmp_path,
            """
            [train]
            steps = 5
            [optimizer]
            learning_rate = 1
            [model]
            layers = 2
            [zero]
            preset = "zero++"
            grads = ["int8", "int4"]
            precise = [["*embed*", "int8"]]
            [mesh]
            nodes = 2
            local = 4
            emulate = true
            """,
        )
    )
    assert config.train.steps == 5
    assert config.optimizer.learning_rate == 1.0
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.model.layers == 2
    assert config.zero.grads == ("int8", "int4")
    assert config.zero.precise == (("*embed*", "int8"),)
    assert config.mesh.emulate


def test_a_written_config_is_read_as_the_same(tmp_path: Path) -> None:
    config = config_from_dict(
        {
            "train": {"steps": 7, "seed": 3},
            "zero": {"grads": ["int8", "compute"], "precise": [["*", "int4"]]},
            "lora": {"rank": 4, "pieces": [["*qkv*", 16, 4, 8.0], ["*qkv*", 0, 0, 8]]},
            "optimizer": {"learning_rate": 1.25e-3, "schedule": "wsd"},
            "data": {"source": 'a "quoted" \\ path'},
        }
    )
    assert load_config(write(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstpes = 5", r"unknown key train\.stpes \(did you mean train\.steps\?\)"),
        ("[trian]\nsteps = 5", r"unknown key trian \(did you mean train\?\)"),
        ("[train]\nlearning_rate = 1.0", r"did you mean optimizer\.learning_rate\?"),
        ("[train]\nqqqqqq = 1", r"unknown key train\.qqqqqq$"),
        ("steps = 5", r"unknown key steps \(did you mean train\.steps\?\)"),
        ("train = 5", r"train = 5 should be a table, \[train\]"),
        ('[train]\nsteps = "5"', r"train\.steps = '5' should be a whole number"),
        ("[train]\nsteps = 5.5", r"train\.steps = 5\.5 should be a whole number"),
        ("[train]\nsteps = true", r"train\.steps = true should be a whole number"),
        ("[optimizer]\neps = false", r"optimizer\.eps = false should be a number"),
        ("[mesh]\nemulate = 1", r"mesh\.emulate = 1 should be true or false"),
        ('[zero]\nremat = "some"', r"zero\.remat = 'some' should be one of full, attention, none"),
        ('[zero]\ngrads = ["int4"]', r"zero\.grads = .* should be a list"),
        ('[zero]\ngrads = "int4"', r"zero\.grads = 'int4' should be a list"),
        ('[optimizer]\nname = "adam"', r"one of adamw, nadamw, adopt, lion, muon, sgd"),
        ("[train]\nsteps = 0", r"train\.steps = 0 must be at least 1"),
        ("[train]\nbatch_size = 9\naccumulate = 2", r"9 does not divide into"),
        ("[train]\nsequence_length = 4096", r"longer than model\.max_seq_len 1024"),
        ("[zero]\nsequence_parallel = 3", r"256 does not divide by zero\.sequence_parallel 3: set it to 258"),
        ("[model]\nd_model = 10\nheads = 3", r"d_model = 10 does not divide into heads = 3"),
        ("[mesh]\nemulate = true", r"mesh\.emulate needs mesh\.nodes and mesh\.local"),
        ("[data]\nvalidation = 1.0", r"data\.validation = 1\.0 must lie between 0 and 1"),
        ('[data]\nsource = ""', r"data\.source is empty"),
        ("[train\nsteps = 5", r"not valid TOML"),
        ("\x00", r"not valid TOML"),
        ("a = " + "[" * 5000, r"not valid TOML: nested too deeply"),
        ("a = " + "{a = " * 5000, r"not valid TOML: nested too deeply"),
        (".".join("a" * 5000) + " = 1", r"not valid TOML: nested too deeply"),
        ("train.steps" + ".a" * 100 + " = 1", r"not valid TOML: nested too deeply"),
        ("x = 1\n" * 200_000, r"1,200,000 characters, but a settings file has"),
        ("[train]\nsteps = " + "9" * 5000, r"not valid TOML"),
        ("[train]\nsteps = 0x" + "f" * 5000, r"a whole number of more than 300 digits"),
        ("[optimizer]\nlearning_rate = 1e400", r"inf is not a finite number"),
        ("[[data.mixture]]\nsource = 'a'\nweight = true", r"data\.mixture\.weight = true should be a number"),
        ("[data.mixture]\nsource = 'a'", r"should be a list of tables, \[\[data\.mixture\]\]"),
        ("[[data.mixture]]\nweight = 1", r"data\.mixture: each table needs the key source"),
        (
            '[log]\ntrackers = ["wand"]',
            r"log\.trackers = 'wand' should be one of tensorboard, wandb, mlflow$",
        ),
        ('[log]\ntrackers = "wandb"', r"should be a list: one of tensorboard, wandb, mlflow$"),
        ('"\\u001b[1m\\n" = 1', r"unknown key \\x1b\[1m\\n$"),
    ],
)
def test_errors_name_file_key_and_way_out(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(write(tmp_path, text))
    assert "run.toml" in str(error.value)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 5\n", encoding="utf-8-sig")
    assert load_config(tmp_path / "run.toml").train.steps == 5


def test_a_name_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(ZeroError, match=r"data\.source = 'caf\\udce9' is not valid Unicode: rename"):
        RunConfig(data=DataSection(source="caf\udce9"))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "run.toml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml")


def test_configs_of_other_programs_name_the_page_about_them(tmp_path: Path) -> None:
    for name in ("base.yml", "llama.yaml"):
        (tmp_path / name).write_text("ici_fsdp_parallelism: 8\n")
        with pytest.raises(ConfigError, match=r"configs are TOML files\. .*docs/migrate\.md"):
            find_config(str(tmp_path / name))
    (tmp_path / "ds.json").write_text("{}")
    with pytest.raises(ConfigError, match="zerojax from-deepspeed"):
        find_config(str(tmp_path / "ds.json"))
    torchtitan = {"job": {"dump_folder": "x"}, "model": {"name": "llama3"}, "training": {"seq_len": 8}}
    with pytest.raises(ConfigError, match=r"a config of torchtitan: .*docs/migrate\.md"):
        config_from_dict(torchtitan)
    with pytest.raises(ConfigError, match=r"unknown key training \(did you mean train\?\)"):
        config_from_dict({"training": {}})


def test_configs_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.toml").touch()
    assert find_config("mine") == Path("configs/mine.toml")
    assert find_config("configs/mine.toml") == Path("configs/mine.toml")
    with pytest.raises(ConfigError, match=r"did you mean mine\?"):
        find_config("mien")
    with pytest.raises(ConfigError, match="no such file"):
        find_config("../secret.toml")


def test_every_field_of_the_library_is_a_key() -> None:
    """`units` comes from the model, `accumulate` from [train]."""
    for section, no_keys in ((ZeroConfig, {"units", "accumulate"}), (LoRA, set())):
        keys = {key.field: key for key in keys_of(section)}
        assert keys.keys() == {f.name for f in dataclasses.fields(section)} - no_keys
        assert all(key.meaning for key in keys.values())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_the_options_of_zero(preset: Preset) -> None:
    config = config_from_dict({"zero": {"preset": preset}, "train": {"accumulate": 2}})
    assert config.to_zero() == ZeroConfig.preset(preset, accumulate=2)
    assert config_to_dict(config)["zero"] == {"preset": preset}


def test_an_option_overrides_its_preset() -> None:
    table = {"preset": "zero++", "weights": "compute", "grads": ["int8", "compute"]}
    config = config_from_dict({"zero": table})
    zero = config.zero
    assert config_to_dict(config)["zero"]["weights"] == "compute"
    assert with_settings(config, {"zero": {"preset": "zero3"}}).zero == ZeroConfig(grads=("int8", None))
    assert zero.weights is None
    assert zero.grads == ("int8", None)
    assert zero.hpz
    with pytest.raises(ConfigError, match=r"zero.preset = 'zero9' should be one of zero3, zero\+\+, zero"):
        config_from_dict({"zero": {"preset": "zero9"}})


def test_the_number_of_options_is_known() -> None:
    """A new option is a promise: it needs help text, a reason and a line here."""
    options = {top.name: len(keys_of(cast(type, section_of(top.kind)))) for top in keys_of(RunConfig)}
    del options["model"], options["zero"]
    assert options == {
        "train": 13,
        "data": 16,
        "optimizer": 12,
        "lora": 6,
        "posttrain": 33,
        "critic": 10,
        "mesh": 3,
        "checkpoint": 8,
        "cluster": 7,
        "log": 4,
    }


CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_that_come_with_zerojax(path: Path) -> None:
    load_config(path)
    assert "Expected" in path.read_text()
