"""The Qwen families: LLaMA with biases on query, key and value (2, 2.5), or norms of queries and keys (3)."""

from typing import Any

from zerojax.interop.huggingface.config_keys import ANY, ConfigKeys, refuse_others
from zerojax.interop.huggingface.layer_types import FULL, SLIDING, read_window, write_types
from zerojax.interop.huggingface.llama import LIKE_LLAMA, read_shape, write_shape
from zerojax.models import GPTConfig

_WINDOWS = {"sliding_window": ANY, "sliding_window_pattern": ANY}


def read_qwen2(keys: ConfigKeys) -> GPTConfig:
    """See ``Family.read``."""
    keys.only("use_mrope", False)
    return GPTConfig(**_read(keys), qkv_biases=True)


def read_qwen3(keys: ConfigKeys) -> GPTConfig:
    """See ``Family.read``."""
    keys.only("attention_bias", False)
    return GPTConfig(**_read(keys, head_dim=128), qk_norm=True)


def _read(keys: ConfigKeys, head_dim: int | None = None) -> dict[str, Any]:
    keys.only("hidden_act", "silu", "swish")
    shape = read_shape(keys, head_dim=head_dim)
    window, first = keys.nullable("sliding_window", int, 4096), keys.take("max_window_layers", int, 28)
    if not keys.take("use_sliding_window", bool, False):
        window = None
    types = [FULL if window is None or i < first else SLIDING for i in range(shape["layers"])]
    return shape | read_window(keys, window, types)


def write_qwen2(model: GPTConfig) -> dict[str, Any]:
    """See ``Family.write``."""
    refuse_others(model, "Qwen2", **LIKE_LLAMA, biases=False, qkv_biases=True, **_WINDOWS)
    return _write(model)


def write_qwen3(model: GPTConfig) -> dict[str, Any]:
    """See ``Family.write``."""
    refuse_others(model, "Qwen3", **LIKE_LLAMA, biases=False, qk_norm=True, **_WINDOWS)
    return _write(model) | {"attention_bias": False}


def _write(model: GPTConfig) -> dict[str, Any]:
    window = model.sliding_window
    return write_shape(model) | {
        "hidden_act": "silu",
        "layer_types": write_types(model),
        "max_window_layers": 0 if window else model.layers,
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }
