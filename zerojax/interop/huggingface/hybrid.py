"""Families with recurrent layers in place of attention in most layers.

- Qwen3-Next and Qwen3.5: three layers of linear attention (Gated DeltaNet), then one of attention, whose
  output has a gate. Norms multiply by 1 + weight, except for linear attention's norms. In Qwen3-Next the
  projections of linear attention are two tensors, in which the heads of queries and keys follow each other.
- LFM2: short convolutions between two gates, whose projections are one tensor.
"""

from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import Entry, Fields, key, only
from zerojax.interop.huggingface.experts import DENSE_LAYERS, SHARED_MIXTURE, names_of_experts
from zerojax.interop.huggingface.layer_types import FULL
from zerojax.interop.huggingface.llama import LLAMA_BLOCK, NO_BIASES, QK_NORMS, QKV, SILU, like_llama
from zerojax.interop.huggingface.mapping import Bare, Grouped, Module, Names
from zerojax.interop.huggingface.rope_keys import Rope
from zerojax.models import GPTConfig
from zerojax.validation.untrusted import short

_LINEAR, _CONV = "linear_attention", "conv"


def _recurrent(types: list[str], word: str, others: str, layers: int) -> tuple[int, ...]:
    """The layers of a kind."""
    if len(types) != layers or not all(kind in (word, others) for kind in types):
        raise ConfigurationError(
            f"layer_types = {short(types)}: {layers} of {word!r} and {others!r} are supported"
        )
    return tuple(number for number, kind in enumerate(types) if kind == word)


def _layers(word: str, others: str = FULL, interval: str = "full_attention_interval") -> Entry:
    """The recurrent layers: ``layer_types`` with this word, or all but every so many."""

    def read(keys: ConfigKeys, found: Fields) -> Fields:
        every = max(keys.take(interval, int, 4), 1)
        default = [word if (number + 1) % every else others for number in range(found["layers"])]
        types = keys.take("layer_types", list, default)
        return {"recurrent_layers": _recurrent(types, word, others, found["layers"])}

    def write(model: GPTConfig) -> Fields:
        recurrent = set(model.recurrent_layers)
        return {"layer_types": [word if number in recurrent else others for number in range(model.layers)]}

    def allowed(model: GPTConfig) -> Fields:
        return {"recurrent_layers": (model.recurrent_layers,) if model.recurrent_layers else "one or more"}

    return Entry(read, write, allowed)


_GATED_DELTA = (
    _layers(_LINEAR),
    key("linear_conv_kernel_dim", "conv_width", int, 4),
    key("linear_key_head_dim", "recurrent_key_width", int, 128),
    key("linear_value_head_dim", "recurrent_width", int, 128),
    key("linear_num_value_heads", "recurrent_heads", int, 32, written="value_heads"),
    key(
        *("linear_num_key_heads", "recurrent_key_heads", int, 16),
        written=lambda model: model.recurrent_keys // model.recurrent_key_width,
    ),
)
_QWEN: dict[str, Any] = {
    "head_dim": 256,
    "kv_heads": 2,
    "qk_norm": True,
    "norm_offset": 1.0,
    "attention_gate": True,
    "rotary": Rope(fraction=0.25, sections=True),
}
_MIXTURE = (*SHARED_MIXTURE, NO_BIASES, SILU)
QWEN3_NEXT = like_llama(
    DENSE_LAYERS,
    *_MIXTURE,
    key("norm_topk_prob", "router_normalise", bool, True),
    *_GATED_DELTA,
    shared_gate=True,
    **_QWEN,
)
QWEN3_5 = like_llama(SILU, NO_BIASES, *_GATED_DELTA, **{**_QWEN, "kv_heads": 4})
QWEN3_5_MOE = like_llama(*_MIXTURE, *_GATED_DELTA, ffn_width=None, shared_gate=True, **_QWEN)


def _lfm2_layers(keys: ConfigKeys, found: Fields) -> Fields:
    """``layer_types``, or the layers with attention; and the width of the MLP, from which files round."""
    attended = keys.take("full_attn_idxs", list, list(range(found["layers"])))
    default = [FULL if number in attended else _CONV for number in range(found["layers"])]
    width = found["ffn"]
    if keys.take("block_auto_adjust_ff_dim", bool, True):
        multiple = max(keys.take("block_multiple_of", int, 256), 1)
        width = int(keys.take("block_ffn_dim_multiplier", float, 1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    else:
        keys.unused("block_multiple_of", "block_ffn_dim_multiplier")
    types = keys.take("layer_types", list, default)
    return {"ffn": width, "recurrent_layers": _recurrent(types, _CONV, FULL, found["layers"])}


def _write_lfm2_layers(model: GPTConfig) -> Fields:
    recurrent = set(model.recurrent_layers)
    attended = [number for number in range(model.layers) if number not in recurrent]
    plain = {"block_auto_adjust_ff_dim": False, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    return {"full_attn_idxs": attended, **plain, **_layers(_CONV).write(model)}


LFM2 = like_llama(
    Entry(_lfm2_layers, _write_lfm2_layers, _layers(_CONV).allowed),
    key("conv_L_cache", "conv_width", int, 3),
    only("conv_bias", False),
    tied=True,
    norm_key="norm_eps",
    norm_eps=1e-5,
    rotary=Rope(theta=1e6),
    recurrent="short_conv",
    qk_norm=True,
)


def _thirds(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """The gate before the convolution, the gate after it, and its input."""
    return 1, (model.d_model,) * 3


LFM2_NAMES = Names(
    {
        "norm_attention": "operator_norm",
        "attention/qkv": QKV,
        "attention/out": "self_attn.out_proj",
        "attention/query_norm": "self_attn.q_layernorm",
        "attention/key_norm": "self_attn.k_layernorm",
        "recurrent/before": Grouped("conv.in_proj", _thirds, (0,)),
        "recurrent/after": Grouped("conv.in_proj", _thirds, (1,)),
        "recurrent/inputs": Grouped("conv.in_proj", _thirds, (2,)),
        "recurrent/out": "conv.out_proj",
        "norm_mlp": "ffn_norm",
        "mlp/gate": "feed_forward.w1",
        "mlp/up": "feed_forward.w3",
        "mlp/down": "feed_forward.w2",
    },
    {"recurrent/conv": Bare("conv.conv.weight", convolution=True)},
    norm="embedding_norm",
)


def _heads(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """Query and gate of each head."""
    return model.heads, (model.head_dim, model.head_dim)


def _key_heads(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """Query, key, values and their gates of each head of keys."""
    count = model.recurrent_keys // model.recurrent_key_width
    values = model.recurrent_values // count
    return count, (model.recurrent_key_width, model.recurrent_key_width, values, values)


def _value_heads(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """beta and decay of the values of each head of keys."""
    count = model.recurrent_keys // model.recurrent_key_width
    return count, (model.value_heads // count,) * 2


_ATTENTION: dict[str, Module] = QK_NORMS | {
    "attention/qkv": (Grouped("self_attn.q_proj", _heads, (0,)), "self_attn.k_proj", "self_attn.v_proj"),
    "attention/gate": Grouped("self_attn.q_proj", _heads, (1,)),
}
_DELTA: dict[str, Module] = {
    "recurrent/norm": "linear_attn.norm",
    "recurrent/out": "linear_attn.out_proj",
}
_DELTA_NEXT: dict[str, Module] = _DELTA | {
    "recurrent/inputs": Grouped("linear_attn.in_proj_qkvz", _key_heads, (0, 1, 2)),
    "recurrent/gate": Grouped("linear_attn.in_proj_qkvz", _key_heads, (3,)),
    "recurrent/beta": Grouped("linear_attn.in_proj_ba", _value_heads, (0,)),
    "recurrent/decay": Grouped("linear_attn.in_proj_ba", _value_heads, (1,)),
}
_DELTA_3_5: dict[str, Module] = _DELTA | {
    "recurrent/inputs": "linear_attn.in_proj_qkv",
    "recurrent/gate": "linear_attn.in_proj_z",
    "recurrent/beta": "linear_attn.in_proj_b",
    "recurrent/decay": "linear_attn.in_proj_a",
}
_DELTA_BARE = {
    "recurrent/conv": Bare("linear_attn.conv1d.weight", convolution=True),
    "recurrent/log_rate": Bare("linear_attn.A_log", transposed=False),
    "recurrent/step_bias": Bare("linear_attn.dt_bias", transposed=False),
}
QWEN3_NEXT_NAMES = names_of_experts(_ATTENTION | _DELTA_NEXT, _DELTA_BARE)
QWEN3_5_NAMES = Names(LLAMA_BLOCK | _ATTENTION | _DELTA_3_5, _DELTA_BARE)
QWEN3_5_MOE_NAMES = names_of_experts(_ATTENTION | _DELTA_3_5, _DELTA_BARE)
