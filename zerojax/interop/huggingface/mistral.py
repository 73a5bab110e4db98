"""The Mistral family: LLaMA with a sliding window in every layer."""

from typing import Any

from zerojax.interop.huggingface.config_keys import ANY, ConfigKeys, refuse_others
from zerojax.interop.huggingface.llama import LIKE_LLAMA, read_shape, write_shape
from zerojax.models import GPTConfig


def read(keys: ConfigKeys) -> GPTConfig:
    """See ``Family.read``."""
    keys.only("hidden_act", "silu", "swish")
    return GPTConfig(**read_shape(keys), sliding_window=keys.nullable("sliding_window", int, 4096))


def write(model: GPTConfig) -> dict[str, Any]:
    """See ``Family.write``."""
    refuse_others(model, "Mistral", **LIKE_LLAMA, biases=False, sliding_window=ANY)
    return write_shape(model) | {"hidden_act": "silu", "sliding_window": model.sliding_window}
