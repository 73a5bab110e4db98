"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, an MLP or a mixture of experts.

The MLPs and experts have a squared ReLU and no gate. Attention has no rotary positions.
"""

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import (
    ANY,
    Entry,
    Fields,
    Table,
    fixed,
    key,
    only,
    read_fields,
    unused,
    write_keys,
)
from zerojax.interop.huggingface.experts import CHOICE_BIASES, NOT_PREDICTING, groups_of_experts, mixture
from zerojax.interop.huggingface.hybrid import key_heads
from zerojax.interop.huggingface.layer_types import FULL, LINEAR, renamed
from zerojax.interop.huggingface.llama import NO_BIASES, like_llama, unrotated_layers
from zerojax.interop.huggingface.mamba import mamba_modules, mamba_tensors
from zerojax.interop.huggingface.mapping import Joined, Names, Source, qkv_widths
from zerojax.models.config import GPTConfig
from zerojax.validation.untrusted import short

_MLP, _EXPERTS = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _EXPERTS}
"""The letters of older files' patterns -> the words of transformers 5."""


def _kinds(keys: ConfigKeys) -> list[str]:
    """The kind of each layer, from a list of words or a text with a letter for each layer."""
    pattern = keys.take("hybrid_override_pattern", str, "")
    by_letters = {"default": [_LETTERS.get(letter, letter) for letter in pattern]} if pattern else {}
    kinds = renamed(keys.take("layers_block_type", list, **by_letters))
    if not all(kind in _LETTERS.values() for kind in kinds):
        words = ", ".join(map(repr, _LETTERS.values()))
        raise ConfigurationError(f"layers_block_type = {short(kinds)} must be words, each one of {words}")
    return kinds


def _layers(keys: ConfigKeys, _: Fields) -> Fields:
    kinds = _kinds(keys)

    def of(*some: str) -> tuple[int, ...]:
        return tuple(number for number, kind in enumerate(kinds) if kind in some)

    return {
        "layers": len(kinds),
        "recurrent_layers": of(LINEAR),
        "mlp_layers": of(_MLP, _EXPERTS),
        "dense_layers": of(_MLP),
    }


def _write_layers(model: GPTConfig) -> Fields:
    words = dict.fromkeys(range(model.layers), FULL) | dict.fromkeys(model.recurrent_layers, LINEAR)
    words |= dict.fromkeys(model.mlp_layers or (), _MLP) | dict.fromkeys(model.expert_layers, _EXPERTS)
    letters = {word: letter for letter, word in _LETTERS.items()}
    pattern = "".join(letters[word] for word in words.values())
    return {"layers_block_type": list(words.values()), "hybrid_override_pattern": pattern}


_ONE_BRANCH = Entry(
    _layers,
    _write_layers,
    lambda model: {
        **dict.fromkeys(("layers", "recurrent_layers", "dense_layers", "dense_ffn"), ANY),
        "mlp_layers": "a list" if model.mlp_layers is None else ANY,
    },
)


_LATENT = Entry(
    lambda keys, _: {"expert_latent": keys.take("moe_latent_size", int, None) or 0},
    lambda model: {"moe_latent_size": model.expert_latent or None},
    lambda model: {"expert_latent": ANY},
)
"""The width of the experts' input: a number in Nemotron 3 Super, null if experts read the token."""

_MIXTURE: Table = (
    *mixture("n_routed_experts"),
    key("moe_intermediate_size", "ffn", int, 7688, written="ffn_width"),
    key("moe_shared_expert_intermediate_size", "shared_ffn", int, 7688),
    key("routed_scaling_factor", "router_scale", float, 1.0),
    key("norm_topk_prob", "router_normalise", bool, True),
    *groups_of_experts(1, 1),
    CHOICE_BIASES,
    fixed(router="sigmoid"),
    _LATENT,
)
"""Keys that count if some layers have experts. intermediate_size is then the width of the other MLPs."""


def _read_mixture(keys: ConfigKeys, found: Fields) -> Fields:
    dense = found["dense_layers"]
    if len(dense) == len(found["mlp_layers"] or ()):
        keys.unused(*write_keys(_MIXTURE, GPTConfig(experts=2)))
        return {"dense_layers": ()}
    return read_fields(_MIXTURE, keys, {**found, "dense_ffn": found["ffn"] if dense else None})


def _write_mixture(model: GPTConfig) -> Fields:
    if not model.experts:
        return {}
    dense = model.dense_layers
    width = {"intermediate_size": model.of_layer(dense[0]).ffn_width} if dense else {}
    return {**write_keys(_MIXTURE, model), **width}


def _allowed_mixture(model: GPTConfig) -> Fields:
    if not model.experts:
        return {"experts": 0}
    return {name: value for entry in _MIXTURE for name, value in entry.allowed(model).items()}


def _old_head_dim(keys: ConfigKeys, found: Fields) -> None:
    """Refuse the first files' width of heads if it is not the one that transformers reads."""
    keys.only("attention_head_dim", found["head_width"] or found["d_model"] // max(found["heads"], 1))


NEMOTRON_H = like_llama(
    NO_BIASES,
    *(only(name, False) for name in ("use_bias", "mlp_bias")),
    only("mlp_hidden_act", "relu2"),
    only("mamba_hidden_act", "silu"),
    only("use_conv_bias", True),
    only("sliding_window", None),
    only("tie_word_embeddings", False),
    key("mamba_num_heads", "recurrent_heads", int, 128, written="value_heads"),
    key("n_groups", "recurrent_key_heads", int, 8, written=key_heads),
    key("ssm_state_size", "recurrent_key_width", int, 128),
    key("mamba_head_dim", "recurrent_width", int, 64),
    key("conv_kernel", "conv_width", int, 4),
    key("time_step_min", "recurrent_step_min", float, 0.001),
    Entry(_old_head_dim),
    Entry(_read_mixture, _write_mixture, _allowed_mixture),
    NOT_PREDICTING,
    unused("num_hidden_layers"),  # transformers counts the words of layers_block_type
    unused("mtp_layers_block_type", "mtp_hybrid_override_pattern", "n_shared_experts"),
    unused("expand", "chunk_size", "time_step_max", "time_step_limit", "time_step_floor", "rms_norm_eps"),
    unused("mamba_proj_bias", "mamba_ssm_cache_dtype", "use_mamba_kernels", "moe_shared_expert_overlap"),
    unused("hidden_dropout", "num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32"),
    layers=_ONE_BRANCH,
    rotary=unrotated_layers(),
    kv_heads=8,
    head_dim=128,
    ffn_width=21504,
    norm_key="layer_norm_epsilon",
    norm_eps=1e-5,
    recurrent="mamba2",
    mlp="relu2",
)

_QKV = Joined(tuple(f"mixer.{name}_proj" for name in "qkv"), qkv_widths)
NEMOTRON_H_NAMES = Names(
    {
        "norm_attention": "norm",
        "norm_mlp": "norm",
        "attention/qkv": _QKV,
        "attention/out": "mixer.o_proj",
        "mlp/up": "mixer.up_proj",
        "mlp/down": "mixer.down_proj",
        "mlp/latent_down": "mixer.fc1_latent_proj",
        "mlp/latent_up": "mixer.fc2_latent_proj",
        "mlp/shared/up": "mixer.shared_experts.up_proj",
        "mlp/shared/down": "mixer.shared_experts.down_proj",
    }
    | mamba_modules("mixer"),
    {
        "mlp/router": Source("mixer.gate.weight"),
        "mlp/choice_bias": Source("mixer.gate.e_score_correction_bias", transposed=False),
        "mlp/up": Source("mixer.experts.{expert}.up_proj.weight"),
        "mlp/down": Source("mixer.experts.{expert}.down_proj.weight"),
    }
    | mamba_tensors("mixer"),
    embed="embeddings",
    norm="norm_f",
    experts="mixer.experts",
)
