"""Keys missing from a config.json have the defaults that transformers documents.

The values are those of `GPT2Config`, `OPTConfig` and `LlamaConfig` and of their base class, in transformers 4
and 5 alike; the epsilon of OPT's norms, which has no key, is that of `torch.nn.LayerNorm`.
"""

from typing import Any

import pytest

from zerojax.errors import ZeroError
from zerojax.interop.huggingface.config_keys import HARMLESS, ConfigKeys
from zerojax.interop.huggingface.families import FAMILIES
from zerojax.models import GPTConfig

SHAPE: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 100, "n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 32},
    "opt": {
        "vocab_size": 100,
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "ffn_dim": 24,
        "max_position_embeddings": 32,
    },
    "llama": {
        "vocab_size": 100,
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
    },
}
"""Keys that transformers always writes, and without which nothing is imported."""

SAME: dict[str, Any] = {"vocab_size": 100, "layers": 2, "d_model": 16, "heads": 4, "max_seq_len": 32}
MODELS = {
    "gpt2": GPTConfig(
        **SAME, ffn=None, norm="layer", positions="learned", position_offset=0, mlp="gelu", tied=True,
        biases=True, kv_heads=None, head_width=None, norm_eps=1e-5,
    ),
    "opt": GPTConfig(
        **SAME, ffn=24, norm="layer", positions="learned", position_offset=2, mlp="relu", tied=True,
        biases=True, kv_heads=None, head_width=None, norm_eps=1e-5,
    ),
    "llama": GPTConfig(
        **SAME, ffn=24, norm="rms", positions="rope", position_offset=0, mlp="swiglu", tied=False,
        biases=False, kv_heads=None, head_width=None, norm_eps=1e-6, rope_theta=10000.0, rope_scaling="none",
    ),
}  # fmt: skip

KEYS: dict[str, dict[str, tuple[Any, Any]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu"),
        "layer_norm_epsilon": (1e-5, 1e-6),
        "n_inner": (None, 24),
        "tie_word_embeddings": (True, False),
        "scale_attn_weights": (True, False),
        "scale_attn_by_inverse_layer_idx": (False, True),
        "reorder_and_upcast_attn": (False, True),
        "add_cross_attention": (False, True),
    },
    "opt": {
        "activation_function": ("relu", "gelu"),
        "do_layer_norm_before": (True, False),
        "_remove_final_layer_norm": (False, True),
        "enable_bias": (True, False),
        "layer_norm_elementwise_affine": (True, False),
        "tie_word_embeddings": (True, False),
        "word_embed_proj_dim": (16, 8),
    },
    "llama": {
        "hidden_act": ("silu", "gelu"),
        "attention_bias": (False, True),
        "mlp_bias": (False, True),
        "head_dim": (4, 8),
        "num_key_value_heads": (None, 2),
        "pretraining_tp": (1, 2),
        "rms_norm_eps": (1e-6, 1e-5),
        "rope_parameters": ({"rope_type": "default", "rope_theta": 10000.0}, {"rope_theta": 5e5}),
        "rope_scaling": (
            {"type": "default", "partial_rotary_factor": 1.0},
            {"type": "linear", "factor": 2.0},
        ),
        "rope_theta": (10000.0, 5e5),
        "tie_word_embeddings": (False, True),
    },
}
"""Every other key that the logits depend on: its documented default, and another value."""
TRAINING = {
    "gpt2": {"resid_pdrop", "embd_pdrop", "attn_pdrop"},
    "opt": {"dropout", "attention_dropout", "activation_dropout", "layerdrop"},
    "llama": {"attention_dropout"},
}
UNUSED = {
    "gpt2": {
        *("n_ctx", "summary_type", "summary_use_proj", "summary_activation"),
        *("summary_proj_to_labels", "summary_first_dropout"),
    },
    "opt": {"init_std"},
    "llama": set(),
}
PAIRS = [(family, key) for family, keys in KEYS.items() for key in keys]


def read(family: str, **more: Any) -> GPTConfig:
    keys = ConfigKeys(SHAPE[family] | more, "config.json")
    model = FAMILIES[family].read(keys)
    keys.finish()
    return model


@pytest.mark.parametrize("family", KEYS)
def test_without_any_of_them(family: str):
    assert read(family) == MODELS[family]


@pytest.mark.parametrize(("family", "key"), PAIRS)
def test_leaving_a_key_out_is_writing_its_default(family: str, key: str):
    default, _ = KEYS[family][key]
    assert read(family, **{key: default}) == MODELS[family]
    assert read(family, **{key: None}) == MODELS[family]


@pytest.mark.parametrize(("family", "key"), PAIRS)
def test_another_value_is_another_model_or_is_refused(family: str, key: str):
    _, other = KEYS[family][key]
    try:
        model = read(family, **{key: other})
    except ZeroError as error:
        refusal = str(error)
    else:
        assert model != MODELS[family]
        return
    assert key in refusal


@pytest.mark.parametrize(("family", "key"), [(family, key) for family, keys in SHAPE.items() for key in keys])
def test_a_shape_is_never_guessed(family: str, key: str):
    with pytest.raises(ZeroError, match=f"{key} is missing"):
        read(family, **{key: None})


@pytest.mark.parametrize("family", KEYS)
def test_these_are_all_the_keys_that_are_read(family: str):
    keys = ConfigKeys(SHAPE[family], "config.json")
    FAMILIES[family].read(keys)
    assert keys._seen - HARMLESS == {*SHAPE[family], *KEYS[family], *TRAINING[family], *UNUSED[family]}
    for name in TRAINING[family]:
        keys = ConfigKeys(SHAPE[family] | {name: 0.3}, "config.json")
        assert FAMILIES[family].read(keys) == MODELS[family]
        assert keys.notes == [f"{name} = 0.3 is not imported (see model.dropout)"]
