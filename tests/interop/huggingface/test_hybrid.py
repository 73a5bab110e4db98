"""Keys of families with recurrent layers that no committed model has."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hf_models import FIXTURES

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.families import read_model

FAMILIES = FIXTURES / "families"


def values(name: str) -> dict[str, Any]:
    return json.loads((FAMILIES / name / "config.json").read_text())


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({"intermediate_size": 12288}, 8192),  # LFM2-1.2B
        ({"intermediate_size": 8192, "block_ff_dim": 12288}, 8192),
        ({"intermediate_size": 10240, "block_ffn_dim_multiplier": 1.0}, 6912),
        ({"intermediate_size": 30, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.5}, 32),
    ],
)
def test_the_width_of_lfm2_is_rounded_as_its_files_say(keys, width):
    given = values("lfm2") | {"block_auto_adjust_ff_dim": True} | keys
    assert read_model(given, "config.json")[1].ffn == width


def test_lfm2_has_older_names_of_its_width_and_tie():
    given = {name: value for name, value in values("lfm2").items() if name != "intermediate_size"}
    assert not read_model(given | {"block_ff_dim": 8, "tie_embedding": False}, "config.json").model.tied
    with pytest.raises(ConfigurationError, match="block_ff_dim is missing"):
        read_model(given, "config.json")


def test_layers_follow_from_other_keys_without_layer_types():
    given = values("lfm2")
    del given["layer_types"]
    assert read_model(given, "config.json")[1].recurrent_layers == (0, 2)
    given = values("qwen3-5") | {"num_hidden_layers": 8}
    del given["layer_types"]
    assert read_model(given, "config.json")[1].recurrent_layers == (0, 1, 2, 4, 5, 6)
    given |= {"full_attention_interval": 2}
    assert read_model(given, "config.json")[1].recurrent_layers == (0, 2, 4, 6)


def test_published_keys_of_granite_4_are_read():
    given = values("granitemoehybrid")
    published = given | {"normalization_function": "rmsnorm", "rope_scaling": None}
    assert read_model(published, "config.json").model == read_model(given, "config.json").model
    with pytest.raises(ConfigurationError, match="normalization_function = 'layernorm' is not supported"):
        read_model(given | {"normalization_function": "layernorm"}, "config.json")


def test_positions_of_images_are_not_needed_for_text():
    given = values("qwen3-5")
    given["rope_parameters"] |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    assert read_model(given, "config.json")[1] == read_model(values("qwen3-5"), "config.json")[1]


def test_the_layers_of_nemotron_are_words_or_letters():
    given = values("nemotron-3")
    model = read_model(given, "config.json").model
    assert (model.recurrent_layers, model.mlp_layers, model.expert_layers) == ((0,), (1, 3, 4), (1, 3))
    assert read_model(given | {"moe_latent_size": None}, "config.json").model == replace(
        model, expert_latent=0
    )
    del given["layers_block_type"]
    older = given | {"hybrid_override_pattern": "ME*E-", "num_hidden_layers": 5}
    assert read_model(older, "config.json").model == model
    for changes, message in (
        ({"hybrid_override_pattern": "MX"}, "layers_block_type = .*'X'.* must be words, each one of "),
        ({"attention_head_dim": 4}, "attention_head_dim = 4 is not supported, only 8"),
        ({"hybrid_override_pattern": None}, "layers_block_type is missing"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            read_model(older | changes, "config.json")


def test_kimis_first_files_count_layers_from_one():
    given = values("kimi-linear")
    model = read_model(given, "config.json").model
    assert (model.recurrent_layers, model.dense_layers) == ((0, 2), (0,))
    first = {name: x for name, x in given.items() if not name.startswith(("linear_", "layer_", "mlp_"))}
    first |= {"first_k_dense_replace": 1, "head_dim": 72, "use_grouped_topk": True, "moe_layer_freq": 1}
    table = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 8, "num_heads": 3}
    table |= {"short_conv_kernel_size": 3}
    assert read_model(first | {"linear_attn_config": table}, "config.json").model == model
    for changes, message in (
        ({"kda_layers": [1]}, r"full_attn_layers = \[2\] and kda_layers = \[1\] must list each layer"),
        ({"head_first": True}, "head_first = True"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            read_model(first | {"linear_attn_config": table | changes}, "config.json")
    with pytest.raises(ConfigurationError, match="mla_use_nope = False is not supported, only True"):
        read_model(given | {"mla_use_nope": False}, "config.json")


def test_other_kinds_of_layers_are_refused():
    with pytest.raises(ConfigurationError, match=r"layer_types = .* words, each "):
        read_model(values("qwen3-5") | {"layer_types": ["linear_attention", "moe"]}, "config.json")
