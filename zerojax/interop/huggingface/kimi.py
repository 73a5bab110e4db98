"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the others."""

from dataclasses import replace

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import ANY, Entry, Fields, key, only, unused
from zerojax.interop.huggingface.experts import (
    CHOICE_BIASES,
    DEEPSEEK_NAMES,
    KIMI_LATENTS,
    LISTED_DENSE,
    mixture,
    shared_experts,
)
from zerojax.interop.huggingface.hybrid import convolved, recurrent_layers
from zerojax.interop.huggingface.layer_types import FULL, LINEAR
from zerojax.interop.huggingface.llama import NO_BIASES, SILU, like_llama, unrotated_layers
from zerojax.interop.huggingface.mapping import CONVOLUTION, Joined, Source
from zerojax.models.config import GPTConfig
from zerojax.validation.untrusted import short

_TYPES = recurrent_layers(LINEAR, interval=None)


def _numbered(table: ConfigKeys, layers: int) -> list[str]:
    """The kind of each layer in the first files, which count layers from 1."""
    full, linear = (table.take(name, list, []) for name in ("full_attn_layers", "kda_layers"))
    if not full and not linear:
        return [FULL if number and number % 4 == 0 else LINEAR for number in range(layers)]
    if sorted([*full, *linear]) != list(range(1, layers + 1)):
        raise ConfigurationError(
            f"full_attn_layers = {short(full)} and kda_layers = {short(linear)} must list each layer from 1 "
            f"to {layers} once"
        )
    return [FULL if number in full else LINEAR for number in range(1, layers + 1)]


def _linear(keys: ConfigKeys, found: Fields) -> Fields:
    table = ConfigKeys(keys.take("linear_attn_config", dict, {}), "linear_attn_config")

    def width(name: str, first: str, default: int) -> int:
        return table.take(first, int, keys.take(name, int, default))

    dim = width("linear_head_dim", "head_dim", 128)
    types = keys.take("layer_types", list, _numbered(table, found["layers"]))
    fields = {
        "recurrent_heads": width("linear_num_heads", "num_heads", 32),
        "recurrent_key_width": dim,
        "recurrent_width": dim,
        "conv_width": width("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
    }
    table.finish()
    return fields | dict(_TYPES.read(ConfigKeys({"layer_types": types}, ""), found) or {})


def _write_linear(model: GPTConfig) -> Fields:
    return {
        "linear_num_heads": model.value_heads,
        "linear_head_dim": model.recurrent_width,
        "linear_conv_kernel_dim": model.conv_width,
        **_TYPES.write(model),
    }


def _allowed_linear(model: GPTConfig) -> Fields:
    return {
        "recurrent_heads": ANY,
        "recurrent_key_heads": (None, model.value_heads),
        "recurrent_width": model.recurrent_key_width,
        "recurrent_key_width": ANY,
        "conv_width": ANY,
        **_TYPES.allowed(model),
    }


KIMI_LINEAR = like_llama(
    SILU,
    NO_BIASES,
    LISTED_DENSE,
    key("moe_intermediate_size", "ffn", int, 1024, written="ffn_width"),
    mixture("num_experts")[0],
    key("num_experts_per_token", "experts_per_token"),
    shared_experts("num_shared_experts", 1),
    key("routed_scaling_factor", "router_scale", float, 2.446),
    key("moe_renormalize", "router_normalise", bool, True),
    key("num_expert_group", "router_groups", int, 1),
    key("topk_group", "router_groups_per_token", int, 1),
    CHOICE_BIASES,
    Entry(_linear, _write_linear, _allowed_linear),
    only("pretraining_tp", 1),
    only("tie_word_embeddings", False),
    only("moe_layer_freq", 1, written=False),  # Moonshot's own code reads this key and the next
    only("moe_router_activation_func", "sigmoid", written=False),
    only("mla_use_nope", True, written=False),
    only("num_nextn_predict_layers", 0, written=False),
    unused("use_grouped_topk"),
    kv_heads=None,
    head_dim=KIMI_LATENTS,
    rotary=unrotated_layers("model_max_length"),
    norm_eps=1e-5,
    router="sigmoid",
    recurrent="kimi_delta",
)


_MOE, _GATE = "block_sparse_moe", "self_attn.forget_gate"
_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
KIMI_LINEAR_NAMES = replace(
    DEEPSEEK_NAMES,
    block=DEEPSEEK_NAMES.block
    | {
        "recurrent/inputs": Joined(tuple(f"self_attn.{name}_proj" for name in "qkv"), convolved),
        "recurrent/beta": "self_attn.b_proj",
        "recurrent/decay_down": f"{_GATE}.f_a_proj",
        "recurrent/decay": f"{_GATE}.f_b_proj",
        "recurrent/gate_down": "self_attn.g_a_proj",
        "recurrent/gate": "self_attn.g_b_proj",
        "recurrent/norm": "self_attn.o_norm",
        "recurrent/out": "self_attn.o_proj",
    },
    bare={
        "recurrent/conv": Joined(
            tuple(f"self_attn.{name}_conv1d.weight" for name in "qkv"), convolved, CONVOLUTION
        ),
        "recurrent/log_rate": Source("self_attn.A_log", transposed=False, ones=(0, 1, 3)),
        "recurrent/step_bias": Source("self_attn.dt_bias", transposed=False),
        "mlp/router": Source(f"{_MOE}.gate.weight"),
        "mlp/choice_bias": Source(f"{_MOE}.gate.e_score_correction_bias", transposed=False),
        **{
            f"mlp/{ours}": Source(f"{_MOE}.experts.{{expert}}.{theirs}.weight")
            for ours, theirs in _EXPERT.items()
        },
    },
    other_names=(
        *((f"{_GATE}.{name}_proj", f"self_attn.{name}_proj") for name in ("f_a", "f_b")),
        *(
            (f"mlp.{middle}{name}_proj", f"{_MOE}.{middle}{name}_proj")
            for middle in ("", "shared_experts.")
            for name in ("gate", "up", "down")
        ),
    ),
)
"""Modules as in memory, under which PEFT names their adapters; other tensors as in files."""
