"""Models with images, and layers that predict further tokens: a run trains the text and keeps the rest."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hf_models import FIXTURES, run_config, tensors
from safetensors.numpy import load_file, save_file

import zerojax
from zerojax import TrainState, gather_model
from zerojax.cli.trained import open_trained
from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import (
    ModelFolder,
    adapter_base,
    adapter_frozen,
    adapter_lora,
    check_quantizable,
    export_adapter,
    export_model,
    import_model,
    load_adapter,
    load_weights,
    plan_export,
)
from zerojax.interop.huggingface.families import FAMILIES, read_model
from zerojax.interop.huggingface.quantized import WeightFormat
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.run.config import MeshSection
from zerojax.run.run_dir import RunFolder

FOLDER = FIXTURES / "families"
IMAGES = sorted(path.name for path in FOLDER.glob("*-images"))


def copied(name: str, folder: Path, more: dict[str, np.ndarray], tokens: str = "llama2") -> Path:
    """A committed model with more tensors, a tokenizer, and a file for images."""
    folder.mkdir()
    (folder / "config.json").write_bytes((FOLDER / name / "config.json").read_bytes())
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((FIXTURES / tokens / file).read_bytes())
    (folder / "preprocessor_config.json").write_text('{"size": 8}')
    save_file(tensors(FOLDER / name) | more, folder / "model.safetensors")
    return folder


def imported(model: Path, folder: RunFolder) -> TrainState:
    source = ModelFolder.open(model)
    config = replace(run_config(source.model, "zero3"), mesh=MeshSection(nodes=1, local=1))
    data = replace(config.data, tokenizer=str(folder.tokenizer.absolute()))
    return import_model(source, replace(config, data=data), folder)


KEYS_OF_READERS = {
    f"model.layers.{layer}.self_attn.{name}.weight": np.ones((2, 3), np.float32)
    for layer in (4, 6)
    for name in ("k_proj", "v_proj", "k_norm")
}
"""Published files of Gemma 4 E2B have keys and values of layers that read an earlier layer's."""
MTP = {"mtp.fc.weight": np.ones((3, 5), np.float32), "mtp.scale": np.array(3, np.float16)}


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("qwen3-5-images", MTP, r"model.visual, mtp"),
        pytest.param("gemma3-images", {}, "multi_modal_projector, vision_tower", marks=pytest.mark.slow),
        ("gemma4-images", {}, "model.embed_vision, model.vision_tower"),
        ("gemma4-e2b", KEYS_OF_READERS, "model.layers"),
        pytest.param("qwen3-next", MTP, "mtp", marks=pytest.mark.slow),
        pytest.param(
            "glm4-moe",
            {"model.layers.3.eh_proj.weight": np.ones((2, 2), np.int8)},
            "model.layers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_all_other_tensors_pass_through_unchanged(name, more, said, tmp_path: Path, capsys):
    model, run = copied(name, tmp_path / "model", more), RunFolder(tmp_path / "run")
    state = imported(model, run)
    source, before = ModelFolder.open(model), tensors(model)
    carried = {one for one in before if source.family.carries(one, source.model)}
    assert carried >= more.keys()
    printed = capsys.readouterr().err
    assert f"zerojax: {len(carried)} tensors (" in printed
    assert f"are kept for exports, and not trained: {said}\n" in printed
    target = plan_export(state, run.read_config(), run, None)
    export_model(state, run.read_config(), run, target, tmp_path / "out", None, 5000)
    after = tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for tensor, values in before.items():
        assert (after[tensor].dtype, after[tensor].shape) == (values.dtype, values.shape), tensor
        assert after[tensor].tobytes() == values.tobytes(), tensor
    for file in ("config.json", "preprocessor_config.json"):
        assert json.loads((tmp_path / "out" / file).read_text()) == json.loads((model / file).read_text())
    if source.family.composite:
        with pytest.raises(ConfigurationError, match=r"parts of .*ForConditionalGeneration as quantized"):
            check_quantizable(state, target, WeightFormat("int8", 4, "input"))


def test_a_run_opens_and_its_text_part_has_transformers_logits(tmp_path: Path):
    model, run = copied("gemma3-images", tmp_path / "model", {}), RunFolder(tmp_path / "run")
    imported(model, run)
    trained = open_trained(run, run.read_config(), MeshSection(nodes=1, local=1))
    expected = dict(np.load(FOLDER / "gemma3-images" / "expected.npz"))
    logits = GPT.__call__(gather_model(trained.state), expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)


def test_adapters_of_peft_come_and_go(tmp_path: Path):
    folder, files = FOLDER / "gemma3-images", FIXTURES / "adapters" / "gemma3-images"
    model = ModelFolder.open(folder).model
    state = zerojax.TrainState.create(
        lambda rngs: GPT(model, rngs=rngs),
        optax.sgd(0.1),
        lm_loss,
        mesh=zerojax.make_mesh(1, 1, devices=jax.devices()[:1]),
        zero=zerojax.ZeroConfig(compute_dtype="float32", frozen=adapter_frozen(files, model)),
        lora=adapter_lora(files, model),
    )
    state = load_adapter(load_weights(state, folder), files, model)
    tokens = np.load(folder / "expected.npz")["tokens"]
    expected = np.load(files / "expected.npz")["logits"]
    logits = nnx.jit(GPT.__call__)(zerojax.gather_model(state), tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    assert adapter_base(folder, RunFolder(tmp_path), model)[0] == str(folder)
    export_adapter(state, model, tmp_path / "out", base=str(folder))
    export_adapter(state, model, tmp_path / "named", family="gemma3")
    for out in (tmp_path / "out", tmp_path / "named"):
        ours, theirs = (load_file(one / "adapter_model.safetensors") for one in (out, files))
        assert ours.keys() == theirs.keys()
        for name, x in theirs.items():
            np.testing.assert_array_equal(ours[name], x, err_msg=name)
    # PEFT compares whole names with a pattern; the vision tower has modules of these names, too.
    pattern = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]
    words = [f"model.language_model.layers.{i}.{word}" for i in range(2) for word in ("self_attn.q_proj",)]
    assert all(re.fullmatch(pattern, word) for word in words)
    assert not re.fullmatch(pattern, "model.vision_tower.encoder.layers.0.self_attn.q_proj")


def with_text(name: str, **keys: Any) -> dict[str, Any]:
    values = json.loads((FOLDER / name / "config.json").read_text())
    return values | {"text_config": values["text_config"] | keys}


def test_keys_of_published_files_are_read():
    published = {
        "attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "full_attention_interval": 4,
    }  # fmt: skip
    plain = read_model(with_text("qwen3-5-images"), "").model
    assert read_model(with_text("qwen3-5-images", **published), "").model == plain
    gemma = with_text("gemma3-images")
    for name in ("vocab_size", "num_attention_heads", "max_position_embeddings", "num_key_value_heads"):
        del gemma["text_config"][name]
    found = read_model(gemma, "").model
    assert (found.vocab_size, found.heads, found.kv_heads, found.max_seq_len) == (262208, 8, 4, 131072)


def test_the_whole_model_says_whether_embeddings_are_tied():
    values = with_text("qwen3-5-images")
    assert (values["tie_word_embeddings"], values["text_config"]["tie_word_embeddings"]) == (True, False)
    assert read_model(values, "").model.tied


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"text_config": None}, "text_config = None should be a table"),
        ({"text_config": {"model_type": "llama"}}, "model_type = 'llama', but a qwen3_5 with 'qwen3_5_text'"),
        ({"architectures": ["Qwen3_5ForCausalLM"]}, "Qwen3_5ForConditionalGeneration or Qwen3_5Model"),
    ],
)
def test_other_text_parts_are_refused(keys, message):
    with pytest.raises(ConfigurationError, match=message):
        read_model(with_text("qwen3-5-images") | keys, "config.json")


def test_experts_that_lie_together_are_read():
    folder = FOLDER / "qwen3-5-moe"
    found, names = tensors(folder), FAMILIES["qwen3_5_moe_text"]
    model = ModelFolder.open(folder).model
    joined = {name: x for name, x in found.items() if ".experts." not in name}
    for layer in range(model.layers):
        block = f"model.layers.{layer}.mlp.experts"
        each = [
            [found[f"{block}.{i}.{kind}_proj.weight"] for i in range(4)] for kind in ("gate", "up", "down")
        ]
        gate, up, down = map(np.stack, each)
        joined |= {f"{block}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{block}.down_proj": down}
    one_by_one, together = (names.parts(model, set(every)) for every in (found, joined))
    for leaf, width in (("gate", 12), ("up", 12), ("down", 16)):
        pairs = zip(*(parts.at((f"block/mlp/{leaf}", 1)) for parts in (one_by_one, together)), strict=True)
        for expert, (alone, part) in enumerate(pairs):
            own = joined[part.name.format(layer=1)][expert, part.first : part.first + width]
            assert (part.expert, part.transposed) == (expert, True)
            np.testing.assert_array_equal(own, found[alone.name.format(layer=1)])


def test_layers_behind_the_last_one_are_kept_by_their_number():
    family, model = FAMILIES["glm4_moe"], GPTConfig(layers=3)
    assert family.carries("model.layers.3.eh_proj.weight", model)
    assert family.carries("layers.12.eh_proj.weight", model)
    assert not family.carries("model.layers.2.eh_proj.weight", model)
    assert not FAMILIES["llama"].carries("model.layers.3.eh_proj.weight", model)
