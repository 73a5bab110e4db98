"""The Gemma families: LLaMA with scaled embeddings, norms around 1 and GEGLU.

Gemma 2 adds norms after each branch, softcaps, and a window in every other layer. Gemma 3 adds norms of
queries and keys, and other rotary wavelengths in layers with the window. It has no softcap in attention.
Gemma 4 has norms without the 1, and norms of values. Layers without the window have wider heads, and rotate a
part of their pairs. They may take values from keys. A number scales each layer's output. 26B-A4B has experts
beside each MLP. In E2B and E4B each layer has its own input, and later layers read earlier layers' keys.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import ANY, Entry, Fields, follows, ignored, key, only, unused
from zerojax.interop.huggingface.layer_types import FULL, SLIDING, periodic, windows, without_window
from zerojax.interop.huggingface.llama import LLAMA_BLOCK, NO_BIASES, QK_NORMS, like_llama
from zerojax.interop.huggingface.mapping import Module, Names, Source, Tensors, gate_and_up
from zerojax.interop.huggingface.rope_keys import Rope
from zerojax.models.config import GPTConfig
from zerojax.validation.untrusted import short

_ACTIVATION = "gelu_pytorch_tanh"
_ONE_WAY = only("use_bidirectional_attention", False, written=False)


def _query_scalar(model: GPTConfig) -> int:
    scalar = model.head_dim if model.query_scalar is None else model.query_scalar
    if scalar != int(scalar):
        raise ConfigurationError(f"model.query_scalar = {scalar}, but Gemma has whole numbers")
    return int(scalar)


def _gemma(*entries: Entry, **values: Any) -> tuple[Entry, ...]:
    return like_llama(
        follows("embedding_scale", lambda model: model["d_model"] ** 0.5),
        only("hidden_activation", _ACTIVATION),
        NO_BIASES,
        *entries,
        head_dim=256,
        tied=True,
        mlp="geglu",
        norm_offset=1.0,
        **values,
    )


def _since_gemma2(*entries: Entry, logit_cap: float | None, **values: Any) -> tuple[Entry, ...]:
    """Keys of Gemma 2 and 3; ``logit_cap`` is the logits' softcap for files without its key."""
    return _gemma(
        only("hidden_act", _ACTIVATION),
        unused("cache_implementation"),
        key("query_pre_attn_scalar", "query_scalar", float, 256.0, written=_query_scalar),
        key("final_logit_softcapping", "logit_softcap", float, logit_cap, null=True),
        *entries,
        post_norms=True,
        **values,
    )


# The first releases say "gelu", but were trained with the tanh form.
GEMMA = _gemma(only("hidden_act", _ACTIVATION, "gelu"), _ONE_WAY)
GEMMA2 = _since_gemma2(
    _ONE_WAY,
    key("attn_logit_softcapping", "attention_softcap", float, 50.0, null=True),
    unused("sliding_window_size"),
    windows(lambda _, found: periodic(found["layers"], 2)),
    logit_cap=30.0,
)
GEMMA3 = _since_gemma2(
    only("use_bidirectional_attention", False),
    ignored("attn_logit_softcapping"),
    unused("_sliding_window_pattern"),  # transformers writes but does not read it
    windows(lambda keys, found: periodic(found["layers"], keys.take("sliding_window_pattern", int, 6))),
    logit_cap=None,
    rotary=Rope(theta=1e6, tables="local"),
    qk_norm=True,
)
GEMMA2_NAMES = Names(
    LLAMA_BLOCK
    | {
        "post_norm_attention": "post_attention_layernorm",
        "norm_mlp": "pre_feedforward_layernorm",
        "post_norm_mlp": "post_feedforward_layernorm",
    }
)
GEMMA3_NAMES = Names(GEMMA2_NAMES.block | QK_NORMS)


def _full_heads(keys: ConfigKeys, found: Fields) -> Fields:
    """Heads of layers without the window: ``per_layer_config``, or the keys of older files."""
    numbers = without_window(found)
    if found["layers"] - 1 not in numbers:
        raise ConfigurationError(
            f"layer_types is supported only with {SLIDING!r} in some layers, and {FULL!r} in the last"
        )
    shared = keys.take("attention_k_eq_v", bool, False)
    own = {"head_dim": keys.take("global_head_dim", int, 512)}
    if shared and (heads := keys.take("num_global_key_value_heads", int, None)) is not None:
        own["num_key_value_heads"] = heads
    keys.unused("num_global_key_value_heads")
    full = list(map(str, numbers))
    by_layer = keys.take("per_layer_config", dict, dict.fromkeys(full, own))
    by_layer = {number.lstrip("0") or "0": own for number, own in by_layer.items()}
    own = by_layer.get(full[0])
    if not isinstance(own, dict) or own.keys() - _HEADS.keys() or by_layer != dict.fromkeys(full, own):
        raise ConfigurationError(
            f"per_layer_config = {short(by_layer)} is supported only with the same {' and '.join(_HEADS)} in "
            f"all layers without the window, {', '.join(full)}, and in no other layers"
        )
    width = found["head_width"] or found["d_model"] // max(found["heads"], 1)
    plain = {"head_dim": width, "num_key_value_heads": found["kv_heads"]}
    different = {_HEADS[name]: value for name, value in own.items() if value != plain[name]}
    return {"keys_as_values": shared, **different}


_HEADS = {"head_dim": "full_head_width", "num_key_value_heads": "full_kv_heads"}


def _write_full_heads(model: GPTConfig) -> Mapping[str, Any]:
    numbers = without_window(vars(model))
    if model.layers - 1 not in numbers:
        raise ConfigurationError(
            "model.sliding_window: in this family some layers have the window, and the last one has none"
        )
    full = model.of_layer(model.layers - 1)
    own = {"head_dim": full.head_dim}
    if full.key_value_heads != model.key_value_heads:
        own["num_key_value_heads"] = full.key_value_heads
    # Older versions of transformers read the last two keys, newer ones per_layer_config, whose numbers all
    # have as many digits as the last one.
    return {
        "attention_k_eq_v": model.keys_as_values,
        "per_layer_config": {str(number).zfill(len(str(numbers[-1]))): own for number in numbers},
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.key_value_heads,
    }


_ROWS = "vocab_size_per_layer_input"


def _layer_inputs(keys: ConfigKeys, found: Fields) -> Fields:
    """The width of each layer's own input, whose table has a row for each token (E2B and E4B)."""
    width, rows = keys.take("hidden_size_per_layer_input", int, 256), keys.take(_ROWS, int, 262144)
    if width and rows != found["vocab_size"]:
        raise ConfigurationError(f"{_ROWS} = {rows} is not supported, only vocab_size")
    return {"layer_inputs": width}


def _write_layer_inputs(model: GPTConfig) -> Mapping[str, Any]:
    rows = {_ROWS: model.vocab_size} if model.layer_inputs else {}
    return {"hidden_size_per_layer_input": model.layer_inputs, **rows}


def _wide(keys: ConfigKeys, found: Fields) -> Fields:
    """The MLPs of layers with an earlier layer's keys may be twice as wide (E2B)."""
    wide = keys.take("use_double_wide_mlp", bool, False) and found["kv_shared_layers"]
    return {"kv_shared_ffn": 2 * found["ffn"] if wide else None}


_MIXTURE = {
    "num_experts": "experts",
    "top_k_experts": "experts_per_token",
    "moe_intermediate_size": "ffn",
}


def _experts(keys: ConfigKeys, found: Fields) -> Fields:
    """26B-A4B's experts beside the MLP, which intermediate_size describes with or without them."""
    if not keys.take("enable_moe_block", bool, False):
        keys.unused(*_MIXTURE)
        return {}
    mixture = {field: keys.take(name, int) for name, field in _MIXTURE.items()}
    return mixture | {"shared_ffn": found["ffn"], "shared_norms": True}


def _write_experts(model: GPTConfig) -> Mapping[str, Any]:
    if not model.experts:
        return {"enable_moe_block": False}
    mixture = {name: getattr(model, field) for name, field in _MIXTURE.items()}
    own = {"moe_intermediate_size": model.ffn_width, "intermediate_size": model.shared_ffn}
    return {"enable_moe_block": True, **mixture, **own}


def _mixtures(model: GPTConfig) -> Mapping[str, object]:
    experts = {"shared_norms": True, "shared_ffn": ANY, "experts_per_token": ANY} if model.experts else {}
    return {"experts": ANY, **experts}


GEMMA4 = like_llama(
    follows("embedding_scale", lambda model: model["d_model"] ** 0.5),
    only("hidden_activation", _ACTIVATION),
    NO_BIASES,
    Entry(_layer_inputs, _write_layer_inputs, lambda _: {"layer_inputs": ANY}),
    key("num_kv_shared_layers", "kv_shared_layers", int, 0),
    Entry(
        _wide,
        lambda model: {"use_double_wide_mlp": model.kv_shared_ffn is not None},
        lambda model: {"kv_shared_ffn": (None, 2 * model.ffn_width)},
    ),
    only("use_bidirectional_attention", "vision", written=False),  # text is causal
    Entry(_experts, _write_experts, _mixtures),
    key("final_logit_softcapping", "logit_softcap", float, None, null=True),
    windows(lambda _, found: periodic(found["layers"], 6), 512),
    Entry(
        _full_heads,
        _write_full_heads,
        lambda _: dict.fromkeys(("keys_as_values", *_HEADS.values()), ANY),
    ),
    kv_heads=4,
    head_dim=256,
    tied=True,
    rotary=Rope(
        theta=1e6,
        kinds=("proportional",),
        tables="layers",
        default={
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    mlp="geglu",
    post_norms=True,
    qk_norm=True,
    value_norm=True,
    query_scalar=1.0,
    layer_scale=True,
)
_BESIDE = {f"mlp/shared/{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")} | {
    "mlp/norm": "pre_feedforward_layernorm_2",
    "mlp/post_norm": "post_feedforward_layernorm_2",
    "mlp/post_norm_shared": "post_feedforward_layernorm_1",
}
_INPUT: dict[str, Module] = {
    "input/gate": "per_layer_input_gate",
    "input/out": "per_layer_projection",
    "input/norm": "post_per_layer_input_norm",
}
_INPUTS = {
    "layer_inputs/embed/embedding": Source("embed_tokens_per_layer.weight", transposed=False),
    "layer_inputs/projection/kernel": Source("per_layer_model_projection.weight"),
    "layer_inputs/norm/scale": Source("per_layer_projection_norm.weight", transposed=False),
}
_GATE = Source("experts.gate_up_proj", gate_and_up, (0,), stacked=True)
_TENSORS: Tensors = {
    "scale": Source("layer_scalar", transposed=False),
    "mlp/router": Source("router.proj.weight"),
    "mlp/router_scale": Source("router.scale", transposed=False),
    "mlp/factors": Source("router.per_expert_scale", transposed=False),
    "mlp/gate": _GATE,
    "mlp/up": replace(_GATE, pieces=(1,)),
    "mlp/down": Source("experts.down_proj", stacked=True),
}
GEMMA4_NAMES = Names(GEMMA3_NAMES.block | _BESIDE | _INPUT, _TENSORS, _INPUTS)
