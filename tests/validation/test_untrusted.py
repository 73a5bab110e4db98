"""Any untrusted file gives a refusal in one line or a right result, quickly, and nothing else.

Each parser reads at least 1,000 randomly damaged files. What it accepts is compared with a second reader, or
with what it writes back itself.
"""

import dataclasses
import gzip
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import Damage, json_text, time_limit, toml_text
from hf_models import FIXTURES
from safetensors import safe_open

from zerojax.cli.from_deepspeed import read_json
from zerojax.errors import ZeroError
from zerojax.interop.deepspeed import translate
from zerojax.interop.huggingface import ModelFolder
from zerojax.interop.huggingface.families import describe_model, read_model
from zerojax.interop.huggingface.safetensors_files import SINGLE, SafetensorFiles
from zerojax.models import GPTConfig
from zerojax.run.config import MixtureSource, RunConfig, config_to_dict, dump_config, load_config
from zerojax.run.data.source import TextSource

COUNT = 500
MEGABYTES = 300
"""A bound on the memory for all of these small files together."""


def fuzz(files: Callable[[int], bytes], path: Path, read: Callable[[Path], Any], count: int = COUNT) -> None:
    """Read damaged files, each in a few seconds at most; some must be accepted and some refused."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusals = []
    for number in range(count):
        raw = files(number)
        path.write_bytes(raw)
        try:
            with time_limit():
                read(path)
        except ZeroError as error:
            refusals.append(str(error))
        except BaseException as error:
            raise AssertionError(f"file {number}: {error!r}: {raw[:2000]!r}") from error
    assert 0 < len(refusals) < count
    assert [line for line in refusals if not line.isprintable() or len(line) > 2000] == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES << 10  # KiB


def test_config_toml(tmp_path: Path):
    damage = Damage(0)
    mixture: list[dict[str, Any]] = [{"source": "a", "weight": 0.5, "column": "c"}, {"source": "b"}]
    values = config_to_dict(RunConfig()) | {
        "zero": {"preset": "zero++", "grads": ["int8", "int4"], "remat": "full"}
    }
    values["data"] |= {"mixture": mixture}
    values["model"] |= {"kv_heads": 4, "ffn": 64}
    values["mesh"] |= {"nodes": 2, "local": 2, "emulate": True}

    def read(path: Path) -> None:
        config = load_config(path)
        path.write_text(dump_config(config))
        assert load_config(path) == config

    assert MixtureSource(**mixture[0]) == load_from(values, tmp_path).data.mixture[0]
    fuzz(lambda _: damage.of_file(values, toml_text), tmp_path / "run.toml", read)


def load_from(values: dict[str, Any], folder: Path) -> RunConfig:
    (folder / "whole.toml").write_text(toml_text(values))
    return load_config(folder / "whole.toml")


DEEPSPEED = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 25,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 8,
        "zero_quantized_gradients": True,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu"},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-4, "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 500, "total_num_steps": 10000},
    },
    "wandb": {"enabled": True, "project": "big"},
    "communication_data_type": "fp32",
}


def test_deepspeed_json(tmp_path: Path):
    damage = Damage(1)

    def read(path: Path) -> None:
        translation = translate(read_json(path), nodes=2, local=8)
        path.write_text(translation.toml(path.name))
        assert load_config(path) == translation.config()

    fuzz(lambda _: damage.of_file(DEEPSPEED, json_text), tmp_path / "ds_config.json", read)


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama3"])
def test_hugging_face_config(family: str, tmp_path: Path):
    damage = Damage(2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURES / family / name, tmp_path)
    values = json.loads((FIXTURES / family / "config.json").read_text())
    if family == "llama3":
        values |= {"rope_scaling": values.pop("rope_parameters"), "rope_theta": 5e5}

    def read(path: Path) -> None:
        model = ModelFolder.open(path.parent).model
        assert resolved(read_model(describe_model(model)[1], "written")[1]) == resolved(model)

    fuzz(lambda _: damage.of_file(values, json_text), tmp_path / "config.json", read, COUNT // 3 + 1)


def resolved(model: GPTConfig) -> GPTConfig:
    """The same model with every field explicit."""
    return dataclasses.replace(
        model, head_width=model.head_dim, kv_heads=model.key_value_heads, ffn=model.ffn_width
    )


def safetensors(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_safetensors(tmp_path: Path):
    """The safetensors library accepts the same files, and reads the same."""
    damage = Damage(3)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, size in (("a", "F32", [2, 3], 24), ("b", "BF16", [4], 8), ("c", "I64", [], 8)):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    data = np.random.default_rng(0).bytes(end)
    whole = safetensors(header, data)

    def damaged(number: int) -> bytes:
        if number % 2:
            return damage.of_bytes(whole)
        text = damage.of_file(header, json_text)
        return len(text).to_bytes(8, "little") + text + data

    def read(path: Path) -> None:
        files = SafetensorFiles(path.parent)
        with safe_open(path, framework="numpy") as library:
            assert set(library.keys()) == files.specs.keys()
            for name, spec in files.specs.items():
                ours = files.read(name)
                if not spec.dtype.startswith("F8"):  # which the library reads by PyTorch alone
                    theirs = library.get_tensor(name)
                    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
                    assert ours.tobytes() == theirs.tobytes()

    fuzz(damaged, tmp_path / SINGLE, read)


def test_safetensors_index(tmp_path: Path):
    damage = Damage(4)
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (FIXTURES / "llama2").glob("*.safetensors"):
        shutil.copy(file, folder)
    shutil.copy(folder / "model-00001-of-00005.safetensors", tmp_path / "outside.safetensors")
    values = json.loads((FIXTURES / "llama2" / f"{SINGLE}.index.json").read_text())

    def read(path: Path) -> None:
        files = SafetensorFiles(path.parent)
        listed = json.loads(path.read_text())["weight_map"]
        assert files.specs.keys() == listed.keys()
        assert listed.items() <= values["weight_map"].items()

    fuzz(lambda _: damage.of_file(values, json_text), folder / f"{SINGLE}.index.json", read)


ROWS = [
    {"id": i, "text": f"document {i}: grüße\n\t\u2028" * (i % 3 + 1), "tags": ["a", {"b": 1.5}]}
    for i in range(4)
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_json_lines(name: str, tmp_path: Path):
    damage = Damage(5)
    whole = b"\n".join(json.dumps(row, ensure_ascii=row["id"] % 2 == 0).encode() for row in ROWS)
    packed = gzip.compress(whole, mtime=0)

    def damaged(number: int) -> bytes:
        if number % 2:
            raw = b"\n".join(damage.of_file(row, json_text).replace(b"\n", b" ") for row in ROWS[:2])
        else:
            raw = damage.of_bytes(whole)
        if name.endswith(".gz"):
            return gzip.compress(raw, mtime=0) if number % 3 else damage.of_bytes(packed)
        return raw

    def read(path: Path) -> None:
        found = [document.text.decode() for document in TextSource(str(path)).documents()]
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if name.endswith(".gz") else raw
        lines = [line.decode("utf-8-sig") for line in raw.split(b"\n") if line.strip(b" \t\n\r\x0b\x0c")]
        rows = [json.loads(line)["text"] for line in lines]
        assert found == [text for text in rows if text]

    fuzz(damaged, tmp_path / name, read, COUNT // 2)


def test_plain_text(tmp_path: Path):
    damage = Damage(6)
    whole = "".join(f"line {i}: grüße\r\n" for i in range(100)).encode()

    def read(path: Path) -> None:
        assert b"".join(document.text for document in TextSource(str(path)).documents()) == path.read_bytes()

    fuzz(lambda _: damage.of_bytes(whole), tmp_path / "text.txt", read)
