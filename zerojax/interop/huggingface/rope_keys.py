"""Rotary positions in config.json: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` alone.

The latter is transformers 5's; zerojax reads both and writes the former, which version 5 reads as well.
"""

from collections.abc import Callable
from typing import Any

from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.models import GPTConfig
from zerojax.models.rope import yarn_amplitude

_LLAMA3 = {  # their name -> ours
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_len",
}
_LENGTH = "original_max_position_embeddings"


def read_rope(keys: ConfigKeys) -> dict[str, Any]:
    """The rotary fields of a model, and its max_seq_len.

    Raises:
        ConfigurationError: a value is not supported.
    """
    theta = keys.take("rope_theta", float, 10000.0)
    tables = [keys.take(name, dict, {}) for name in ("rope_scaling", "rope_parameters")]
    return read_table(tables[0] | tables[1], theta, keys.take("max_position_embeddings", int))


def read_table(values: dict[str, Any], theta: float, length: int) -> dict[str, Any]:
    """The fields that one table of rotary parameters describes.

    Args:
        values: the table.
        theta: where the table has none.
        length: max_position_embeddings.

    Raises:
        ConfigurationError: a value is not supported.
    """
    if values.get("rope_type") is None:  # its name was "type" before transformers 4.43
        values = values | {"rope_type": values.get("type")}
    rope = ConfigKeys(values, "rope_parameters")
    theta = rope.take("rope_theta", float, theta)
    rope.only("partial_rotary_factor", 1, 1.0)
    rope.only("rope_type", "default", *_READERS)
    kind = rope.take("rope_type", str, "default")
    rope.only("type", kind)
    fields: dict[str, Any] = {"rope_theta": theta, "max_seq_len": length}
    if kind in _READERS:
        fields |= {"rope_scaling": kind} | _READERS[kind](rope, length)
    rope.finish()
    return fields


def _read_dynamic(rope: ConfigKeys, length: int) -> dict[str, Any]:
    """Here max_position_embeddings is the context before its extension, which has no end of its own."""
    factor = rope.take("factor", float)
    return {"rope_factor": factor, "rope_original_len": length, "max_seq_len": round(factor * length)}


def _read_yarn(rope: ConfigKeys, length: int) -> dict[str, Any]:
    rope.only("truncate", True)
    factor, original = rope.take("factor", float), rope.take(_LENGTH, int, length)
    scales = [rope.take(name, float, 0.0) for name in ("mscale", "mscale_all_dim")]
    amplitude = rope.take("attention_factor", float, None)
    if amplitude is None and all(scales):
        amplitude = yarn_amplitude(factor, scales[0]) / yarn_amplitude(factor, scales[1])
    return {
        "rope_factor": factor,
        "rope_original_len": original,
        "rope_beta_fast": rope.take("beta_fast", float, 32.0),
        "rope_beta_slow": rope.take("beta_slow", float, 1.0),
        "rope_attention_factor": amplitude,
    }


_READERS: dict[str, Callable[[ConfigKeys, int], dict[str, Any]]] = {
    "linear": lambda rope, _: {"rope_factor": rope.take("factor", float)},
    "llama3": lambda rope, _: {
        ours: rope.take(name, int if name == _LENGTH else float) for name, ours in _LLAMA3.items()
    },
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
}


def write_rope(model: GPTConfig) -> dict[str, Any]:
    """The keys of a model's rotary fields and its length, as transformers 4 and 5 both read them."""
    dynamic = model.rope_scaling == "dynamic"
    return {
        "max_position_embeddings": model.rope_original_len if dynamic else model.max_seq_len,
        "rope_scaling": _write_scaling(model),
        "rope_theta": model.rope_theta,
    }


def _write_scaling(model: GPTConfig) -> dict[str, Any] | None:
    kind, factor = {"rope_type": model.rope_scaling}, {"factor": model.rope_factor}
    if model.rope_scaling == "none":
        return None
    if model.rope_scaling == "llama3":
        return kind | {name: getattr(model, ours) for name, ours in _LLAMA3.items()}
    if model.rope_scaling == "yarn":
        amplitude = model.rope_attention_factor
        given = {} if amplitude is None else {"attention_factor": amplitude}
        betas = {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow}
        return kind | factor | betas | given | {_LENGTH: model.rope_original_len}
    return kind | factor
