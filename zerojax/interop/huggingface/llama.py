"""The LLaMA family, 1 to 3: rotary positions, RMS norms, SwiGLU, grouped keys and values.

Other families have the same keys and tensors, and a few more: they begin with ``read_shape``, ``write_shape``
and ``parts``.
"""

from collections.abc import Callable
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import REQUIRED, ConfigKeys, refuse_others
from zerojax.interop.huggingface.mapping import TensorParts, embeddings, matrix, side_by_side, whole
from zerojax.interop.huggingface.rope_keys import read_rope, write_rope
from zerojax.models import GPTConfig

LIKE_LLAMA = {"positions": "rope", "norm": "rms", "mlp": "swiglu"}
"""What ``refuse_others`` wants of a model of this family."""


def read(keys: ConfigKeys) -> GPTConfig:
    """See ``Family.read``."""
    keys.only("hidden_act", "silu", "swish")
    keys.only("pretraining_tp", 1)
    keys.only("rope_interleaved", False)
    keys.unused("is_llama_config")  # SmolLM has these two
    biases = keys.take("attention_bias", bool, False)
    if biases != keys.take("mlp_bias", bool, False):
        raise ConfigurationError("attention_bias and mlp_bias are supported together or not at all")
    return GPTConfig(**read_shape(keys, kv_heads=None) | {"biases": biases})


def read_shape(
    keys: ConfigKeys,
    *,
    kv_heads: Any = REQUIRED,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    tied: bool = False,
    rope: Callable[[ConfigKeys], dict[str, Any]] = read_rope,
) -> dict[str, Any]:
    """The fields of a model, from the keys that these families share.

    Args:
        keys: of a config.json.
        kv_heads: without num_key_value_heads; null is as many as heads.
        head_dim: without the key; None is hidden_size / num_attention_heads.
        norm_eps: without rms_norm_eps.
        tied: without tie_word_embeddings.
        rope: reads the rotary fields and max_seq_len.

    Raises:
        ConfigurationError: a value is not supported.
    """
    keys.only_training("attention_dropout")
    width, heads = keys.take("hidden_size", int), keys.take("num_attention_heads", int)
    head_width = keys.take("head_dim", int, head_dim)
    return {
        "vocab_size": keys.take("vocab_size", int),
        "layers": keys.take("num_hidden_layers", int),
        "d_model": width,
        "heads": heads,
        "head_width": None if head_width is None or head_width * heads == width else head_width,
        "kv_heads": keys.nullable("num_key_value_heads", int, kv_heads),
        "ffn": keys.take("intermediate_size", int),
        "norm": "rms",
        "positions": "rope",
        "mlp": "swiglu",
        "tied": keys.take("tie_word_embeddings", bool, tied),
        "biases": False,
        "norm_eps": keys.take("rms_norm_eps", float, norm_eps),
        **rope(keys),
    }


def write(model: GPTConfig) -> dict[str, Any]:
    """See ``Family.write``."""
    refuse_others(model, "LLaMA", **LIKE_LLAMA)
    return write_shape(model) | {
        "attention_bias": model.biases,
        "hidden_act": "silu",
        "mlp_bias": model.biases,
        "pretraining_tp": 1,
    }


def write_shape(model: GPTConfig) -> dict[str, Any]:
    """The keys that these families share."""
    return {
        "attention_dropout": 0.0,
        "head_dim": model.head_dim,
        "hidden_size": model.d_model,
        "intermediate_size": model.ffn_width,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.key_value_heads,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "vocab_size": model.vocab_size,
        **write_rope(model),
    }


def parts(model: GPTConfig, prefix: str) -> TensorParts:
    """The tensors of each leaf; all names except the output projection's begin with ``prefix``."""
    block = prefix + "layers.{layer}."
    found = embeddings(prefix + "embed_tokens.weight", tied=model.tied) | {
        "norm/scale": whole(prefix + "norm.weight"),
        "block/norm_attention/scale": whole(block + "input_layernorm.weight"),
        "block/norm_mlp/scale": whole(block + "post_attention_layernorm.weight"),
        "block/attention/qkv/kernel": _projections(model, block, "weight"),
    }
    if model.biases or model.qkv_biases:
        found["block/attention/qkv/bias"] = _projections(model, block, "bias")
    if model.post_norms:  # then the second norm has another name
        found |= {
            "block/post_norm_attention/scale": whole(block + "post_attention_layernorm.weight"),
            "block/norm_mlp/scale": whole(block + "pre_feedforward_layernorm.weight"),
            "block/post_norm_mlp/scale": whole(block + "post_feedforward_layernorm.weight"),
        }
    if model.qk_norm:
        for ours, theirs in (("query", "q"), ("key", "k")):
            found[f"block/attention/{ours}_norm/scale"] = whole(f"{block}self_attn.{theirs}_norm.weight")
    linear = {"attention/out": "self_attn.o_proj"} | {
        f"mlp/{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")
    }
    for ours, theirs in linear.items():
        found[f"block/{ours}/kernel"] = matrix(f"{block}{theirs}.weight")
        if model.biases:
            found[f"block/{ours}/bias"] = whole(f"{block}{theirs}.bias")
    return found


def _projections(model: GPTConfig, block: str, kind: str) -> tuple[Any, ...]:
    """Weights or biases of query, key and value, side by side in one leaf."""
    widths = (model.attention_width, *(model.key_value_heads * model.head_dim,) * 2)
    names = tuple(f"{block}self_attn.{which}_proj.{kind}" for which in "qkv")
    return side_by_side(names, widths, transposed=kind == "weight")
