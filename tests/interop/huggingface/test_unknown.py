"""Unknown keys and tensors are refused by name, and nothing is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_models import FIXTURES, copy_of, run_config, tensors

from zerojax.errors import ZeroError
from zerojax.interop.huggingface import ModelFolder, import_model
from zerojax.interop.huggingface.families import describe_model
from zerojax.interop.huggingface.importing import _write_new
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles
from zerojax.interop.huggingface.weight_files import WeightFiles
from zerojax.models import GPTConfig
from zerojax.run.run_dir import RunFolder

FP8 = {"quant_method": "fp8"}
OLD_ROPE = {"rope_parameters": None}  # as before transformers 5
YARN = {"rope_type": "yarn", "factor": 4.0}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "llama2",
            {"model_type": "deepseek_v32"},
            "'deepseek_v32' is not supported: .* chooses the tokens",
        ),
        (
            "llama2",
            {"model_type": "llamas", "attention_sinks": 4},
            "model_type = 'llamas' is not supported. The nearest .* is llama, which has no attention_sinks",
        ),
        ("llama2", {"model_type": "ollama"}, "The nearest .* is llama, which has the same keys but other"),
        ("llama2", {"mlp_bias": True}, "mlp_bias = true is not supported without attention_bias = true"),
        (
            "llama2",
            {"sliding_window": 64},
            "unknown keys; delete those that do not change its logits: sliding_window = 64",
        ),
        ("llama2", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ("llama2", {"pretraining_tp": 2}, "pretraining_tp = 2"),
        ("llama2", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope' is not supported"),
        ("llama2", {"rope_parameters": YARN | {"finetuned": True}}, "finetuned = True"),
        ("llama2", {"rope_parameters": {"rope_type": "dynamic"}}, "factor is missing"),
        ("llama2", {"rope_parameters": ROPE}, "original_max_position_embeddings is missing"),
        (
            "llama2",
            OLD_ROPE | {"rope_scaling": {"type": "linear", "factor": "4"}},
            "factor = '4' should be float",
        ),
        ("llama2", OLD_ROPE | {"rope_scaling": {"type": "linear", "beta": 1, "factor": 2}}, "beta = 1"),
        (
            "llama2",
            {"quantization_config": {"bits": 4}},
            "quantization_config with quant_method = None is not",
        ),
        ("llama2", {"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt = 'e5m2' is not supported"),
        ("llama2", {"quantization_config": FP8 | {"weight_block_size": [128]}}, r"\[128\] should be two"),
        (
            "llama2",
            {"quantization_config": FP8 | {"weight_block_size": [0, 128]}},
            r"\[0, 128\] should be two",
        ),
        ("llama2", {"architectures": ["LlamaForSequenceClassification"]}, "Use a causal language model"),
        ("llama2", {"num_hidden_layers": "2"}, "num_hidden_layers = '2' should be int"),
        ("llama2", {"hidden_size": None}, "hidden_size is missing"),
        (
            "opt",
            {"word_embed_proj_dim": 12},
            "word_embed_proj_dim = 12 are supported only if",
        ),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before = False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function = 'tanh'"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(name, keys, message, tmp_path):
    with pytest.raises(ZeroError, match=message):
        ModelFolder.open(copy_of(name, tmp_path / "model", keys))


def test_dropout_is_noted():
    assert any("resid_pdrop = 0.1" in note for note in ModelFolder.open(FIXTURES / "gpt2").notes)
    assert ModelFolder.open(FIXTURES / "llama2").notes == []


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("llama2", {"model.norm.weight": None}, "the files lack model.norm.weight"),
        (
            "llama2",
            {"model.norm.weight": np.ones(15, np.float32)},
            r"has shape \(15,\), but the config needs \(16,\)",
        ),
        ("llama2", {"model.norm.weight": np.ones(16, np.int32)}, "of dtype I32: weights are one of"),
        ("llama2", {"model.extra.weight": np.ones(16, np.float32)}, "the model has no model.extra.weight"),
        (
            "llama3",
            {"lm_head.weight": np.ones((80, 16), np.float32)},
            "lm_head.weight differs from the token",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(name, changed, message, tmp_path):
    source = ModelFolder.open(copy_of(name, tmp_path / "model", None, **changed))
    with pytest.raises(ZeroError, match=message):
        import_model(source, run_config(source.model), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.toml").exists()


def test_unreadable_files_are_refused(tmp_path: Path):
    with pytest.raises(ZeroError, match=r"no model\.safetensors"):
        SafetensorFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ZeroError, match="run code when they are read"):
        SafetensorFiles(tmp_path)
    assert tensors(FIXTURES / "gpt2").keys() == SafetensorFiles(FIXTURES / "gpt2").specs.keys()


def test_another_model_and_an_existing_run_are_refused(tmp_path):
    source, folder = ModelFolder.open(FIXTURES / "opt"), RunFolder(tmp_path)
    other = run_config(GPTConfig(vocab_size=80, layers=1, d_model=8, heads=1, max_seq_len=16))
    with pytest.raises(ZeroError, match=r"\[model\]"):
        import_model(source, other, folder)
    folder.config.touch()
    with pytest.raises(ZeroError, match="already holds a run"):
        import_model(source, run_config(source.model), folder)


def test_an_interrupted_import_may_be_repeated(tmp_path):
    source, folder = ModelFolder.open(FIXTURES / "opt"), RunFolder(tmp_path)
    (folder.checkpoints / "0.unfinished").mkdir(parents=True)
    for _ in range(2):
        _write_new(source, WeightFiles(source.folder, None), folder)
    (folder.checkpoints / "0").mkdir()
    with pytest.raises(ZeroError, match="already holds a run"):
        _write_new(source, WeightFiles(source.folder, None), folder)


def test_a_model_that_no_family_has_is_refused():
    with pytest.raises(ZeroError, match=r"no Hugging Face family.*GPT-2 has 'layer'.*LLaMA has 'rope'"):
        describe_model(GPTConfig(norm="rms"))
    with pytest.raises(
        ZeroError, match=r"nearest: model\.sliding_window = 8, but GPT-2 has None \|.*;"
    ) as error:
        describe_model(GPTConfig(sliding_window=8))
    assert len(str(error.value)) < 300  # not all families
    like_llama: Any = {"norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": False}
    gemma = like_llama | {"mlp": "geglu", "norm_offset": 1.0, "d_model": 768, "embedding_scale": 768**0.5}
    olmo: Any = {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_joint": True}
    more: dict[str, Any] = {"post_norms": True, "logit_softcap": 3.0}
    for field, value in more.items():
        with pytest.raises(ZeroError, match=f"model.{field} = {value}, but LLaMA has"):
            describe_model(GPTConfig(**like_llama, **{field: value}))
    with pytest.raises(ZeroError, match=r"model\.query_scalar = 2\.5, but Gemma has whole numbers"):
        describe_model(GPTConfig(**gemma, post_norms=True, query_scalar=2.5))
    windowed = GPTConfig(**gemma, post_norms=True, qk_norm=True, sliding_window=8, rope_scaling="linear")
    with pytest.raises(ZeroError, match=r"model\.rope_local_theta = None with rope_scaling = 'linear'"):
        describe_model(windowed)
    with pytest.raises(ZeroError, match=r"model\.attention_softcap = 2\.0, but Gemma 3 has None"):
        describe_model(GPTConfig(**gemma, post_norms=True, qk_norm=True, attention_softcap=2.0))
    for model, kind in (
        (GPTConfig(), "gpt2"),
        (GPTConfig(position_offset=2, mlp="relu"), "opt"),
        (GPTConfig(**like_llama), "llama"),
        (GPTConfig(**like_llama, sliding_window=8), "mistral"),
        (GPTConfig(**like_llama, qkv_biases=True), "qwen2"),
        (GPTConfig(**like_llama, qk_norm=True), "qwen3"),
        (GPTConfig(**like_llama, no_rope_layers=(1,)), "smollm3"),
        (GPTConfig(**like_llama, **olmo), "olmo2"),
        (GPTConfig(**like_llama, **olmo, sliding_window=8, sliding_window_pattern=4), "olmo3"),
        (GPTConfig(**like_llama, logit_divisor=4.0), "granite"),
        (GPTConfig(**like_llama, query_scalar=3.0), "granite"),
        (GPTConfig(positions="rope"), "starcoder2"),
        (GPTConfig(positions="rope", branches="parallel"), "gpt_neox"),
        (GPTConfig(positions="rope", branches="parallel_one_norm", kv_heads=3), "falcon"),
        (GPTConfig(**like_llama | {"mlp": "relu2"}), "arcee"),
        (GPTConfig(**like_llama | {"norm": "layer"}, norm_biases=True), "stablelm"),
        (GPTConfig(**like_llama, qk_norm=True, qk_norm_rotated=True), "hunyuan_v1_dense"),
        (GPTConfig(**like_llama, rope_fraction=0.5), "phi3"),
        (GPTConfig(**like_llama, rope_fraction=0.5, rope_interleaved=True), "glm"),
        (GPTConfig(**like_llama, rope_query_growth=0.1), "ministral3"),
        (GPTConfig(**gemma), "gemma"),
        (GPTConfig(**gemma, post_norms=True), "gemma2"),
        (GPTConfig(**gemma, post_norms=True, qk_norm=True), "gemma3_text"),
    ):
        assert describe_model(model)[0].model_type == kind
