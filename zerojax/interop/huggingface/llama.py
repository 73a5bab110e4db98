"""LLaMA 1 to 3, and families that differ from it in a few keys.

Rotary positions, RMS norms, SwiGLU, grouped keys and values. Other modules build on ``like_llama`` and
``LLAMA_NAMES``.
"""

from collections.abc import Mapping
from typing import Any, Literal

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import REQUIRED, ConfigKeys
from zerojax.interop.huggingface.config_table import (
    ANY,
    Choice,
    Dropouts,
    Entry,
    Fixed,
    Key,
    Only,
    Unused,
)
from zerojax.interop.huggingface.layer_types import NoRope, Windows, unrotated
from zerojax.interop.huggingface.mapping import Module, Names
from zerojax.interop.huggingface.rope_keys import Rope
from zerojax.models import GPTConfig

_GELUS = {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_exact", "relu": "relu"}
SILU = Only("hidden_act", "silu", "swish")
QKV = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
LLAMA_BLOCK: dict[str, Module] = {
    "norm_attention": "input_layernorm",
    "attention/qkv": QKV,
    "attention/out": "self_attn.o_proj",
    "norm_mlp": "post_attention_layernorm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
QK_NORMS: dict[str, Module] = {
    "attention/query_norm": "self_attn.q_norm",
    "attention/key_norm": "self_attn.k_norm",
}
LLAMA_NAMES = Names(LLAMA_BLOCK)


class HeadDim(Entry):
    """``head_dim``, by default a head's part of the width, or what the family says."""

    def __init__(self, default: int | None):
        self.default = default

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        width = keys.take("head_dim", int, self.default)
        found["head_width"] = None if width is None or width * found["heads"] == found["d_model"] else width

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        return {"head_dim": model.head_dim}

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        del model
        return {"head_width": ANY}


class Biases(Entry):
    """``attention_bias`` and ``mlp_bias``, which zerojax has together or not at all."""

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        found["biases"] = keys.take("attention_bias", bool, False)
        if found["biases"] != keys.take("mlp_bias", bool, False):
            raise ConfigurationError("attention_bias and mlp_bias are supported together or not at all")

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        return {"attention_bias": model.biases, "mlp_bias": model.biases}

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        del model
        return {"biases": ANY}


class AttentionMultiplier(Entry):
    """Granite's factor of the attention scores, here the inverse square root of ``query_scalar``."""

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        factor = keys.take("attention_multiplier", float, 1.0)
        if not 1e-9 < factor < 1e9:
            raise ConfigurationError(
                f"attention_multiplier = {factor} is not supported, only from 1e-9 to 1e9"
            )
        found["query_scalar"] = factor**-2

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        scale = model.head_dim**-0.5 if model.attention_scale is None else model.attention_scale
        return {"attention_multiplier": float(f"{scale:.15g}")}  # without the rounding of two powers

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        del model
        return {"query_scalar": ANY}


def like_llama(
    *entries: Entry,
    kv_heads: Any = REQUIRED,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    tied: bool = False,
    rope: Rope | None = None,
    norm: Literal["rms", "layer"] = "rms",
    **fixed: Any,
) -> tuple[Entry, ...]:
    """A table of the keys that these families share, and more.

    Args:
        *entries: more keys.
        kv_heads: without num_key_value_heads; null is as many as heads.
        head_dim: without the key; None is hidden_size / num_attention_heads.
        norm_eps: without its key.
        tied: without tie_word_embeddings.
        rope: the rotary keys, if they are not LLaMA's.
        norm: the kind of norms, on which the name of the epsilon depends.
        **fixed: fields that the family has, or has otherwise than LLaMA.
    """
    fields = {"positions": "rope", "norm": norm, "mlp": "swiglu", "biases": False} | fixed
    own = {name for entry in entries for name in entry.allowed(GPTConfig())}
    return (
        Fixed(**{name: value for name, value in fields.items() if name not in own}),
        Key("vocab_size", "vocab_size"),
        Key("num_hidden_layers", "layers"),
        Key("hidden_size", "d_model"),
        Key("num_attention_heads", "heads"),
        HeadDim(head_dim),
        Key("num_key_value_heads", "kv_heads", int, kv_heads, null=True, written="key_value_heads"),
        Key("intermediate_size", "ffn", written="ffn_width"),
        Key("tie_word_embeddings", "tied", bool, tied),
        Key("rms_norm_eps" if norm == "rms" else "norm_epsilon", "norm_eps", float, norm_eps),
        Dropouts("attention_dropout"),
        rope or Rope(),
        *entries,
    )


LLAMA = like_llama(
    SILU,
    Biases(),
    Only("pretraining_tp", 1),
    Only("rope_interleaved", False),
    Unused("is_llama_config"),  # SmolLM has these two
    kv_heads=None,
)
MISTRAL = like_llama(SILU, Key("sliding_window", "sliding_window", int, 4096, null=True))
MINISTRAL3 = like_llama(
    SILU,
    Key("sliding_window", "sliding_window", int, None),
    head_dim=128,
    norm_eps=1e-5,
    rope=Rope(kinds=("yarn",), tables="growth"),
)
SMOLLM3 = like_llama(
    SILU,
    Biases(),
    NoRope(),
    Windows(unrotated, None, switch=True),
    Unused("pretraining_tp", "max_window_layers"),
    tied=True,
    rope=Rope(theta=2e6),
)
GRANITE = like_llama(
    SILU,
    Biases(),
    AttentionMultiplier(),
    Key("embedding_multiplier", "embedding_scale", float, 1.0),
    Key("residual_multiplier", "residual_scale", float, 1.0),
    Key("logits_scaling", "logit_divisor", float, 1.0),
    kv_heads=None,
)
STARCODER2 = like_llama(
    Choice(
        "hidden_act",
        "mlp",
        {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_exact", "relu": "relu"},
    ),
    Only("use_bias", True),
    Key("sliding_window", "sliding_window", int, None),
    Dropouts(dropout=("residual_dropout", "embedding_dropout")),
    Unused(*("norm_type", "mlp_type", "activation_function", "layer_norm_epsilon", "scale_attn_weights")),
    Unused(*("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")),  # transformers reads none
    biases=True,
    norm="layer",
    norm_eps=1e-5,
    tied=True,
)
STARCODER2_NAMES = Names(
    {ours: theirs for ours, theirs in LLAMA_BLOCK.items() if not ours.startswith("mlp")}
    | {"mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}
)
