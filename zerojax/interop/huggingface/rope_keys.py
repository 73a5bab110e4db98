"""Rotary positions in config.json: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` alone.

The latter is transformers 5's; zerojax reads both and writes the former, which version 5 reads as well.
"""

from typing import Any

from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.models import GPTConfig

_LLAMA3 = {  # their name -> ours
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_len",
}


def read_rope(keys: ConfigKeys) -> dict[str, Any]:
    """The rotary fields of a model.

    Raises:
        ConfigurationError: a value is not supported.
    """
    theta = keys.take("rope_theta", float, 10000.0)
    tables = [keys.take(name, dict, {}) for name in ("rope_scaling", "rope_parameters")]
    rope = ConfigKeys(tables[0] | tables[1], "rope_parameters")
    theta = rope.take("rope_theta", float, theta)
    rope.only("partial_rotary_factor", 1, 1.0)
    old = rope.take("type", str, "default")  # the name of rope_type before transformers 4.43
    kind = rope.take("rope_type", str, old)
    rope.only("type", kind)
    rope.only("rope_type", "default", "linear", "llama3")
    fields: dict[str, Any] = {"rope_theta": theta}
    if kind == "linear":
        fields |= {"rope_scaling": "linear", "rope_factor": rope.take("factor", float)}
    if kind == "llama3":
        length = {"rope_original_len": rope.take("original_max_position_embeddings", int)}
        factors = {ours: rope.take(name, float) for name, ours in _LLAMA3.items() if ours not in length}
        fields |= {"rope_scaling": "llama3", **factors, **length}
    rope.finish()
    return fields


def write_rope(model: GPTConfig) -> dict[str, Any]:
    """The keys of a model's rotary fields, as transformers 4 and 5 both read them."""
    scaling: dict[str, Any] | None = None
    if model.rope_scaling == "linear":
        scaling = {"rope_type": "linear", "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        scaling = {"rope_type": "llama3"} | {name: getattr(model, ours) for name, ours in _LLAMA3.items()}
    return {"rope_scaling": scaling, "rope_theta": model.rope_theta}
