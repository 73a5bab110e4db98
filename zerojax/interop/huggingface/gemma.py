"""The Gemma families: LLaMA with scaled embeddings, norms around 1 and GEGLU.

Gemma 2 adds norms after each branch, soft caps and a window in every other layer; Gemma 3 norms of queries
and keys, and rotary wavelengths of their own for the layers with the window.
"""

from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ANY, ConfigKeys, refuse_others
from zerojax.interop.huggingface.layer_types import FULL, SLIDING, periodic, read_window, write_types
from zerojax.interop.huggingface.llama import read_shape, write_shape
from zerojax.interop.huggingface.rope_keys import read_rope, read_table
from zerojax.models import GPTConfig

_ACTIVATION = "gelu_pytorch_tanh"
_CAPS = {"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logit_softcap"}


def read_gemma(keys: ConfigKeys) -> GPTConfig:
    """See ``Family.read``."""
    keys.only("hidden_act", _ACTIVATION, "gelu")  # the first releases say "gelu", but mean the other
    return GPTConfig(**_read(keys, read_rope))


def read_gemma2(keys: ConfigKeys) -> GPTConfig:
    """See ``Family.read``."""
    keys.unused("sliding_window_size")
    shape = _read(keys, read_rope) | _read_scores(keys, attention=50.0, logits=30.0)
    types = periodic(shape["layers"], 2)
    return GPTConfig(**shape, **read_window(keys, keys.nullable("sliding_window", int, 4096), types))


def read_gemma3(keys: ConfigKeys) -> GPTConfig:
    """See ``Family.read``."""
    keys.unused("_sliding_window_pattern")  # transformers writes but does not read it
    shape = _read(keys, _read_ropes) | _read_scores(keys, attention=None, logits=None) | {"qk_norm": True}
    types = periodic(shape["layers"], keys.take("sliding_window_pattern", int, 6))
    window = read_window(keys, keys.nullable("sliding_window", int, 4096), types)
    if not window:
        shape["rope_local_theta"] = None
    return GPTConfig(**shape, **window)


def _read(keys: ConfigKeys, rope: Any) -> dict[str, Any]:
    keys.only("hidden_activation", _ACTIVATION)
    for name in ("attention_bias", "use_bidirectional_attention"):
        keys.only(name, False)
    shape = read_shape(keys, head_dim=256, tied=True, rope=rope)
    return shape | {"mlp": "geglu", "norm_offset": 1.0, "embedding_scale": shape["d_model"] ** 0.5}


def _read_scores(keys: ConfigKeys, attention: float | None, logits: float | None) -> dict[str, Any]:
    """What Gemma 2 and 3 have; the arguments are the caps of files without these keys."""
    keys.only("hidden_act", _ACTIVATION)
    keys.unused("cache_implementation")
    return {
        "post_norms": True,
        "query_scalar": keys.take("query_pre_attn_scalar", float, 256.0),
        "attention_softcap": keys.nullable("attn_logit_softcapping", float, attention),
        "logit_softcap": keys.nullable("final_logit_softcapping", float, logits),
    }


def _read_ropes(keys: ConfigKeys) -> dict[str, Any]:
    """Gemma 3 has two tables in transformers 5; in 4, keys of the full layers and one of the others."""
    nested = keys.take("rope_parameters", dict, {})
    if unknown := sorted(nested.keys() - {FULL, SLIDING}):
        raise ConfigurationError(f"rope_parameters of {', '.join(unknown)} are not supported")
    scaling, length = keys.take("rope_scaling", dict, {}), keys.take("max_position_embeddings", int)
    theta, local = keys.take("rope_theta", float, 1e6), keys.take("rope_local_base_freq", float, 10000.0)
    windowed = read_table(nested.get(SLIDING) or {}, local, length)
    if "rope_scaling" in windowed:
        raise ConfigurationError(f"rope_type = {windowed['rope_scaling']!r} of {SLIDING} is not supported")
    full = read_table((nested.get(FULL) or {}) | scaling, theta, length)
    return full | {"rope_local_theta": windowed["rope_theta"]}


def write_gemma(model: GPTConfig) -> dict[str, Any]:
    """See ``Family.write``."""
    _refuse(model, "Gemma")
    return _write(model) | {"hidden_act": _ACTIVATION}


def write_gemma2(model: GPTConfig) -> dict[str, Any]:
    """See ``Family.write``."""
    _refuse(model, "Gemma 2", **_SINCE_GEMMA2)
    return _write(model) | _write_scores(model)


def write_gemma3(model: GPTConfig) -> dict[str, Any]:
    """See ``Family.write``."""
    _refuse(model, "Gemma 3", **_SINCE_GEMMA2, qk_norm=True, rope_local_theta=ANY)
    if model.sliding_window is not None and model.rope_local_theta is None:
        raise ConfigurationError("model.rope_local_theta = None, but Gemma 3 has it in layers with a window")
    return (
        _write(model)
        | _write_scores(model)
        | {
            "rope_local_base_freq": model.rope_local_theta or 10000.0,
            "use_bidirectional_attention": False,
        }
    )


_SINCE_GEMMA2 = dict.fromkeys(
    ("query_scalar", "attention_softcap", "logit_softcap", "sliding_window", "sliding_window_pattern"), ANY
) | {"post_norms": True}


def _refuse(model: GPTConfig, family: str, **wanted: object) -> None:
    own = {"positions": "rope", "norm": "rms", "mlp": "geglu", "biases": False, "norm_offset": 1.0}
    refuse_others(model, family, **own, embedding_scale=model.d_model**0.5, **wanted)


def _write(model: GPTConfig) -> dict[str, Any]:
    return write_shape(model) | {"attention_bias": False, "hidden_activation": _ACTIVATION}


def _write_scores(model: GPTConfig) -> dict[str, Any]:
    scalar = model.head_dim if model.query_scalar is None else model.query_scalar
    if scalar != int(scalar):
        raise ConfigurationError(f"model.query_scalar = {scalar}, but Gemma has whole numbers")
    return {
        "layer_types": write_types(model),
        "query_pre_attn_scalar": int(scalar),
        "sliding_window": model.sliding_window,
        **{theirs: getattr(model, ours) for theirs, ours in _CAPS.items()},
    }
