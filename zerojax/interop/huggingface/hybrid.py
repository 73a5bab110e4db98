"""Families with recurrent layers in place of attention in most layers.

- Qwen3-Next and Qwen3.5: three layers of linear attention (Gated DeltaNet), then one of attention, whose
  output has a gate. Norms multiply by 1 + weight, except for linear attention's norms. In Qwen3-Next the
  projections of linear attention are two tensors, in which the heads of queries and keys follow each other.
- LFM2: short convolutions between two gates, whose projections are one tensor.
"""

from dataclasses import replace
from typing import Any

from zerojax.interop.huggingface.config_keys import REQUIRED, ConfigKeys
from zerojax.interop.huggingface.config_table import Entry, Fields, key, only, unused
from zerojax.interop.huggingface.experts import (
    CHOICE_RATE,
    DENSE_LAYERS,
    SHARED_MIXTURE,
    first_dense,
    mixture,
    names_of_experts,
)
from zerojax.interop.huggingface.layer_types import FULL, LINEAR, checked_types, renamed
from zerojax.interop.huggingface.llama import LLAMA_BLOCK, NO_BIASES, QK_NORMS, QKV, SILU, like_llama
from zerojax.interop.huggingface.mapping import CONVOLUTION, Joined, Module, Names, Source, Tensors
from zerojax.interop.huggingface.rope_keys import Rope
from zerojax.models.config import GPTConfig

_CONV = "conv"


def _recurrent(types: list[Any], word: str, layers: int) -> tuple[int, ...]:
    """The indices of the layers that are ``word`` in ``types``."""
    kinds = checked_types(renamed(types), layers, word, FULL)
    return tuple(number for number, kind in enumerate(kinds) if kind == word)


def recurrent_layers(word: str, interval: str | None = "full_attention_interval") -> Entry:
    """The recurrent layers, which are ``word`` in ``layer_types``.

    Without that key they are all but every ``interval``-th layer, or all if ``interval`` is None.
    """

    def read(keys: ConfigKeys, found: Fields) -> Fields:
        every = found["layers"] + 1 if interval is None else max(keys.take(interval, int, 4), 1)
        default = [word if (number + 1) % every else FULL for number in range(found["layers"])]
        types = keys.take("layer_types", list, default)
        return {"recurrent_layers": _recurrent(types, word, found["layers"])}

    def write(model: GPTConfig) -> Fields:
        recurrent = set(model.recurrent_layers)
        return {"layer_types": [word if number in recurrent else FULL for number in range(model.layers)]}

    def allowed(model: GPTConfig) -> Fields:
        return {"recurrent_layers": (model.recurrent_layers,) if model.recurrent_layers else "one or more"}

    return Entry(read, write, allowed)


def key_heads(model: GPTConfig) -> int:
    """The number of a recurrent layer's heads of keys."""
    return model.recurrent_keys // model.recurrent_key_width


_GATED_DELTA = (
    recurrent_layers(LINEAR),
    key("linear_conv_kernel_dim", "conv_width", int, 4),
    key("linear_key_head_dim", "recurrent_key_width", int, 128),
    key("linear_value_head_dim", "recurrent_width", int, 128),
    key("linear_num_value_heads", "recurrent_heads", int, 32, written="value_heads"),
    key("linear_num_key_heads", "recurrent_key_heads", int, 16, written=key_heads),
)
_QWEN: dict[str, Any] = {
    "head_dim": 256,
    "kv_heads": 2,
    "qk_norm": True,
    "norm_offset": 1.0,
    "attention_gate": True,
    "rotary": Rope(fraction=0.25, sections=True),
}
QWEN3_NEXT = like_llama(
    DENSE_LAYERS,
    *SHARED_MIXTURE,
    NO_BIASES,
    SILU,
    key("norm_topk_prob", "router_normalise", bool, True),
    *_GATED_DELTA,
    shared_gate=True,
    **_QWEN,
)
_QWEN3_5 = (
    NO_BIASES,
    SILU,
    *_GATED_DELTA,
    only("attn_output_gate", True, written=False),
    unused("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    unused("output_gate_type", "mamba_ssm_dtype"),  # not read by transformers
)
_QWEN3_5_DENSE: dict[str, Any] = _QWEN | {"kv_heads": 4}
QWEN3_5 = like_llama(*_QWEN3_5, **_QWEN3_5_DENSE)
QWEN3_5_MOE = like_llama(
    *SHARED_MIXTURE,
    *_QWEN3_5,
    only("mlp_only_layers", [], written=False),
    ffn_width=None,
    shared_gate=True,
    **_QWEN,
)


def _lfm2_layers(keys: ConfigKeys, found: Fields) -> Fields:
    """``layer_types``, or the layers with attention; and the width of the MLP, from which files round."""
    attended = keys.take("full_attn_idxs", list, list(range(found["layers"])))
    default = [FULL if number in attended else _CONV for number in range(found["layers"])]
    # The name in the first files. It is read first, as in transformers.
    width = keys.take("block_ff_dim", int, REQUIRED if found["ffn"] is None else found["ffn"])
    if keys.take("block_auto_adjust_ff_dim", bool, True):
        multiple = max(keys.take("block_multiple_of", int, 256), 1)
        width = int(keys.take("block_ffn_dim_multiplier", float, 1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    else:
        keys.unused("block_multiple_of", "block_ffn_dim_multiplier")
    types = keys.take("layer_types", list, default)
    return {"ffn": width, "recurrent_layers": _recurrent(types, _CONV, found["layers"])}


def _write_lfm2_layers(model: GPTConfig) -> Fields:
    recurrent = set(model.recurrent_layers)
    attended = [number for number in range(model.layers) if number not in recurrent]
    plain = {"block_auto_adjust_ff_dim": False, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    return {"full_attn_idxs": attended, **plain, **recurrent_layers(_CONV).write(model)}


_LFM2_ENTRIES = (
    key("conv_L_cache", "conv_width", int, 3),
    only("conv_bias", False),
    Entry(lambda keys, found: {"tied": keys.take("tie_embedding", bool, found["tied"])}),
    # Of the first files, not read by transformers:
    unused(*(f"block_{name}" for name in ("dim", "norm_eps", "mlp_init_scale", "out_init_scale"))),
    unused("block_use_swiglu", "block_use_xavier_init", "conv_use_xavier_init", "use_pos_enc"),
    unused("conv_dim", "conv_dim_out", "num_heads"),
)
_LFM2: dict[str, Any] = {
    **{"tied": True, "norm_key": "norm_eps", "norm_eps": 1e-5, "rotary": Rope(theta=1e6)},
    **{"recurrent": "short_conv", "qk_norm": True},
}
LFM2 = like_llama(
    Entry(_lfm2_layers, _write_lfm2_layers, recurrent_layers(_CONV).allowed),
    *_LFM2_ENTRIES,
    ffn_width=None,
    **_LFM2,
)


def _thirds(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """One group of outputs: the gates before and after the convolution, and the convolution's input."""
    return 1, (model.d_model,) * 3


_LFM2_BLOCK: dict[str, Module] = {
    "norm_attention": "operator_norm",
    "attention/qkv": QKV,
    "attention/out": "self_attn.out_proj",
    "attention/query_norm": "self_attn.q_layernorm",
    "attention/key_norm": "self_attn.k_layernorm",
    "recurrent/before": Source("conv.in_proj", _thirds, (0,)),
    "recurrent/after": Source("conv.in_proj", _thirds, (1,)),
    "recurrent/inputs": Source("conv.in_proj", _thirds, (2,)),
    "recurrent/out": "conv.out_proj",
    "norm_mlp": "ffn_norm",
    "mlp/gate": "feed_forward.w1",
    "mlp/up": "feed_forward.w3",
    "mlp/down": "feed_forward.w2",
}
_LFM2_CONV: Tensors = {"recurrent/conv": Source("conv.conv.weight", ones=CONVOLUTION)}
LFM2_NAMES = Names(_LFM2_BLOCK, _LFM2_CONV, norm="embedding_norm")


LFM2_MOE = like_llama(
    first_dense(2, "num_dense_layers"),
    key("moe_intermediate_size", "ffn", int, 1792, written="ffn_width"),
    *mixture("num_experts"),
    key("norm_topk_prob", "router_normalise", bool, True),
    key("routed_scaling_factor", "router_scale", float, 1.0),
    key(
        *("use_expert_bias", "router_balance_rate", bool, True),
        decode=lambda used, _: CHOICE_RATE if used else 0.0,
        written=lambda model: model.router_balance_rate > 0,
    ),
    recurrent_layers(_CONV, interval=None),
    *_LFM2_ENTRIES,
    router="sigmoid",
    **_LFM2,
)
LFM2_MOE_NAMES = Names(
    _LFM2_BLOCK,
    _LFM2_CONV
    | {
        "mlp/router": Source("feed_forward.gate.weight"),
        "mlp/choice_bias": Source("feed_forward.expert_bias", transposed=False),
        "mlp/gate": Source("feed_forward.experts.{expert}.w1.weight"),
        "mlp/up": Source("feed_forward.experts.{expert}.w3.weight"),
        "mlp/down": Source("feed_forward.experts.{expert}.w2.weight"),
    },
    norm="embedding_norm",
    experts="feed_forward.experts",
)


def _heads(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """A group of outputs for each head: its query and its gate."""
    return model.heads, (model.head_dim, model.head_dim)


def _key_heads(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """A group of outputs for each head of keys: its query, its key, its values and their gates."""
    count = key_heads(model)
    values = model.recurrent_values // count
    return count, (model.recurrent_key_width, model.recurrent_key_width, values, values)


def _value_heads(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """A group of outputs for each head of keys: beta and decay of its values."""
    count = key_heads(model)
    return count, (model.value_heads // count,) * 2


_ATTENTION: dict[str, Module] = QK_NORMS | {
    "attention/qkv": replace(QKV, names=(Source("self_attn.q_proj", _heads, (0,)), *QKV.names[1:])),
    "attention/gate": Source("self_attn.q_proj", _heads, (1,)),
}
_DELTA: dict[str, Module] = {
    "recurrent/norm": "linear_attn.norm",
    "recurrent/out": "linear_attn.out_proj",
}
_DELTA_NEXT: dict[str, Module] = _DELTA | {
    "recurrent/inputs": Source("linear_attn.in_proj_qkvz", _key_heads, (0, 1, 2)),
    "recurrent/gate": Source("linear_attn.in_proj_qkvz", _key_heads, (3,)),
    "recurrent/beta": Source("linear_attn.in_proj_ba", _value_heads, (0,)),
    "recurrent/decay": Source("linear_attn.in_proj_ba", _value_heads, (1,)),
}
_DELTA_3_5: dict[str, Module] = _DELTA | {
    "recurrent/inputs": "linear_attn.in_proj_qkv",
    "recurrent/gate": "linear_attn.in_proj_z",
    "recurrent/beta": "linear_attn.in_proj_b",
    "recurrent/decay": "linear_attn.in_proj_a",
}
_DELTA_BARE: Tensors = {
    "recurrent/conv": Source("linear_attn.conv1d.weight", ones=CONVOLUTION),
    "recurrent/log_rate": Source("linear_attn.A_log", transposed=False),
    "recurrent/step_bias": Source("linear_attn.dt_bias", transposed=False),
}
QWEN3_NEXT_NAMES = names_of_experts(_ATTENTION | _DELTA_NEXT, _DELTA_BARE)
QWEN3_5_NAMES = Names(LLAMA_BLOCK | _ATTENTION | _DELTA_3_5, _DELTA_BARE)
QWEN3_5_MOE_NAMES = names_of_experts(_ATTENTION | _DELTA_3_5, _DELTA_BARE)


def _unrotated(keys: ConfigKeys, found: Fields) -> Fields:
    """OLMo Hybrid's layers are rotated unless rope_theta is null."""
    table = keys.take("rope_parameters", dict, {})
    none = "rope_theta" in table and table["rope_theta"] is None
    return {"no_rope_layers": tuple(range(found["layers"])) if none else ()}


def _write_unrotated(model: GPTConfig) -> Fields:
    table = {"rope_type": "default", "rope_theta": None}
    return {"rope_theta": None, "rope_parameters": table} if model.no_rope_layers else {}


def _plain_heads(_: ConfigKeys, found: Fields) -> int:
    return found["heads"]


_OF_INITIAL_VALUES = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max")
OLMO_HYBRID = like_llama(
    SILU,
    NO_BIASES,
    recurrent_layers(LINEAR, interval=None),
    key("linear_conv_kernel_dim", "conv_width", int, 4),
    key("linear_key_head_dim", "recurrent_key_width"),
    key("linear_value_head_dim", "recurrent_width"),
    key("linear_num_value_heads", "recurrent_heads", int, _plain_heads, written="value_heads"),
    key("linear_num_key_heads", "recurrent_key_heads", int, _plain_heads, written=key_heads),
    key("linear_allow_neg_eigval", "recurrent_negative", bool, True),
    unused(*_OF_INITIAL_VALUES, "linear_dt_init_floor"),
    Entry(_unrotated, _write_unrotated, lambda model: {"no_rope_layers": ((), tuple(range(model.layers)))}),
    kv_heads=None,
    pre_norms=False,
    post_norms=True,
    qk_norm=True,
    qk_norm_joint=True,
    recurrent_pre_norms=True,
    recurrent_norm_eps=1e-5,
)


def convolved(model: GPTConfig) -> tuple[int, ...]:
    """The widths of the queries, keys and values of all heads."""
    return model.recurrent_keys, model.recurrent_keys, model.recurrent_values


_QKV_CONVOLUTIONS = tuple(f"linear_attn.{name}_conv1d.weight" for name in "qkv")
OLMO_HYBRID_NAMES = Names(
    LLAMA_BLOCK
    | QK_NORMS
    | {
        "norm_attention": "attention_layer_norm",
        "norm_mlp": "feedforward_layer_norm",
        "post_norm_attention": "post_attention_layernorm",
        "post_norm_mlp": "post_feedforward_layernorm",
        "recurrent/inputs": Joined(tuple(f"linear_attn.{name}_proj" for name in "qkv"), convolved),
        "recurrent/gate": "linear_attn.g_proj",
        "recurrent/beta": "linear_attn.b_proj",
        "recurrent/decay": "linear_attn.a_proj",
        "recurrent/norm": "linear_attn.o_norm",
        "recurrent/out": "linear_attn.o_proj",
    },
    _DELTA_BARE | {"recurrent/conv": Joined(_QKV_CONVOLUTIONS, convolved, ones=CONVOLUTION)},
    other_names=(("post_attention_layernorm", "feedforward_layer_norm"),),
)
