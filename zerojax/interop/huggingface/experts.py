"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, Granite's, OLMoE, GLM-4.5, DeepSeek, and gpt-oss.

Most files have three matrices for each expert. transformers 5 holds a layer's experts in two tensors, but
reads and writes the same files. Granite's and gpt-oss' files have these two tensors. In gpt-oss the outputs
of gate and up alternate.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import ANY, Entry, Fields, dropouts, key, only, unused
from zerojax.interop.huggingface.layer_types import FULL, periodic, windows
from zerojax.interop.huggingface.llama import (
    ATTENTION_BIASES,
    GRANITE_FACTORS,
    LLAMA_BLOCK,
    NO_BIASES,
    QK_NORMS,
    SILU,
    like_llama,
)
from zerojax.interop.huggingface.mapping import Module, Names, Source, Tensors, alternating, gate_and_up
from zerojax.interop.huggingface.rope_keys import Rope
from zerojax.models.config import GPTConfig


def mixture(*counts: str) -> tuple[Entry, ...]:
    """The keys that all mixtures share. The balance loss is a setting of training: written, but not read.

    ``counts`` are names of the key with the number of experts; a file has one or all of them.
    """

    def read(keys: ConfigKeys, _: Fields) -> Fields:
        given = {name: count for name in counts if (count := keys.take(name, int, 0))}
        if len(set(given.values())) > 1:
            raise ConfigurationError(f"{given} are supported only if they are equal")
        return {"experts": next(iter(given.values()), 0) or keys.take(counts[0], int)}

    def write(model: GPTConfig) -> Fields:
        return dict.fromkeys(counts, model.experts) | {"router_aux_loss_coef": model.balance_loss}

    return (
        Entry(read, write, lambda model: {"experts": model.experts or "1 or more"}),
        key("num_experts_per_tok", "experts_per_token"),
    )


def _window(keys: ConfigKeys, _: Fields) -> Fields:
    """Qwen's window, which all layers of a mixture have."""
    window = keys.nullable("sliding_window", int, 4096)
    return {"sliding_window": window if keys.take("use_sliding_window", bool, False) else None}


def _dense(read: Callable[[ConfigKeys, int], Iterable[int]], write: Callable[[GPTConfig], Fields]) -> Entry:
    """Layers without experts; intermediate_size is their width.

    ``read`` gets the number of all layers, and returns the numbers of these. ``write`` writes their keys.
    """

    def fields(keys: ConfigKeys, found: Fields) -> Fields:
        dense = tuple(read(keys, found["layers"]))
        return {"dense_layers": dense, "dense_ffn": found["ffn"] if dense else None}

    def written(model: GPTConfig) -> Fields:
        dense = model.dense_layers
        width = {"intermediate_size": model.of_layer(dense[0]).ffn_width} if dense else {}
        return {**write(model), **width}

    return Entry(fields, written, lambda _: dict.fromkeys(("dense_layers", "dense_ffn"), ANY))


def _numbered(keys: ConfigKeys, layers: int) -> list[int]:
    """Qwen's layers without experts."""
    step, numbers = keys.take("decoder_sparse_step", int, 1), keys.take("mlp_only_layers", list, [])
    return [i for i in range(layers) if i in numbers or (i + 1) % max(step, 1)]


def first_dense(default: int, name: str = "first_k_dense_replace") -> Entry:
    """The first layers have no experts; ``default`` counts these layers."""

    def write(model: GPTConfig) -> Fields:
        dense = model.dense_layers
        if dense != tuple(range(len(dense))):
            raise ConfigurationError(f"model.dense_layers = {dense}, but in this family they come first")
        return {name: len(dense)}

    return _dense(lambda keys, layers: range(min(keys.take(name, int, default), layers)), write)


def _listed(keys: ConfigKeys, layers: int, first: int = 1) -> list[int]:
    """Layers without experts by a word for each layer, by default the ``first`` ones."""
    words = ["dense" if number < first else "sparse" for number in range(layers)]
    kinds = keys.take("mlp_layer_types", list, words)
    if len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
        raise ConfigurationError(f"mlp_layer_types = {kinds!r} must be {layers} of 'dense' and 'sparse'")
    return [number for number, kind in enumerate(kinds) if kind == "dense"]


def _write_list(model: GPTConfig) -> Fields:
    dense = model.dense_layers
    return {"mlp_layer_types": ["dense" if i in dense else "sparse" for i in range(model.layers)]}


LISTED_DENSE = _dense(
    lambda keys, layers: _listed(keys, layers, keys.take("first_k_dense_replace", int, 1)), _write_list
)
"""The layers without experts by words, or in Kimi Linear's first files by their number."""


def _shared_experts(model: GPTConfig) -> int:
    count, rest = divmod(model.shared_ffn, model.ffn_width)
    if rest or not count:
        raise ConfigurationError(
            f"model.shared_ffn = {model.shared_ffn}, but this family has a multiple of ffn, {model.ffn_width}"
        )
    return count


def shared_experts(name: str, default: int) -> Entry:
    """A key that counts the experts that all tokens go to, each as wide as the others."""
    return key(
        *(name, "shared_ffn", int, default),
        decode=lambda count, found: count * found["ffn"],
        written=_shared_experts,
    )


def _with_shared(*, dense: int | Entry, shared: int, scale: float) -> tuple[Entry, ...]:
    """Keys of mixtures with leading dense layers and a shared expert; the arguments are their defaults.

    ``dense`` may be an entry for the dense layers.
    """
    return (
        dense if isinstance(dense, Entry) else first_dense(dense),
        key("moe_intermediate_size", "ffn", written="ffn_width"),
        *mixture("n_routed_experts"),
        shared_experts("n_shared_experts", shared),
        key("routed_scaling_factor", "router_scale", float, scale),
    )


def groups_of_experts(groups: int, per_token: int) -> tuple[Entry, ...]:
    """The keys of groups of experts; the arguments are the keys' defaults."""
    return (
        key("n_group", "router_groups", int, groups),
        key("topk_group", "router_groups_per_token", int, per_token),
    )


PREDICTING = "num_nextn_predict_layers"
"""The number of layers that predict further tokens, which are not read."""
NOT_PREDICTING = Entry(lambda keys, _: keys.unused(PREDICTING, "num_mtp_layers"), lambda _: {PREDICTING: 0})
CHOICE_RATE = 0.001
"""``router_balance_rate`` of imported models: files have the selection biases, but not their rate."""
CHOICE_BIASES = Entry(
    lambda *_: {"router_balance_rate": CHOICE_RATE},
    allowed=lambda model: {"router_balance_rate": model.router_balance_rate or "above 0"},
)
_NORMALISE = key("norm_topk_prob", "router_normalise", bool, False)

MIXTRAL = like_llama(
    SILU,
    *mixture("num_local_experts"),
    dropouts("router_jitter_noise"),
    key("sliding_window", "sliding_window", int, None),
    norm_eps=1e-5,
    rotary=Rope(theta=1e6),
)


def _rotary_dim(keys: ConfigKeys, found: Fields) -> Fields:
    """The rotated part of a head, in MiniMax's own files as a width."""
    width = found["head_width"] or found["d_model"] // max(found["heads"], 1)
    rotated = keys.take("rotary_dim", int, 0)
    return {"rope_fraction": rotated / width} if rotated else {}


MINIMAX_M2 = like_llama(
    SILU,
    *mixture("num_local_experts"),
    dropouts("router_jitter_noise"),
    CHOICE_BIASES,
    *(
        only(name, value, written=False)
        for name, value in (("scoring_func", "sigmoid"), ("use_qk_norm", True))
    ),
    *(
        only(name, value, written=False)
        for name, value in (("use_routing_bias", True), ("shared_intermediate_size", 0))
    ),
    only("qk_norm_type", "per_layer", written=False),
    unused("attn_type_list", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    Entry(_rotary_dim),
    kv_heads=8,
    head_dim=128,
    rotary=Rope(theta=5e6, fraction=1.0),
    qk_norm=True,
    qk_norm_joint=True,
    router="sigmoid",
)
GRANITE_MOE = like_llama(
    SILU, ATTENTION_BIASES, *GRANITE_FACTORS, *mixture("num_local_experts"), kv_heads=None
)
DENSE_LAYERS = _dense(
    _numbered, lambda model: {"decoder_sparse_step": 1, "mlp_only_layers": list(model.dense_layers)}
)


def _no_windows(keys: ConfigKeys, found: Fields) -> None:
    """Refuse Qwen2-MoE's windows: versions of transformers disagree on the layers that have one."""
    keys.only("use_sliding_window", False)
    keys.only("layer_types", [FULL] * found["layers"])
    keys.unused("sliding_window", "max_window_layers")


SHARED_MIXTURE = (
    key("moe_intermediate_size", "ffn", written="ffn_width"),
    *mixture("num_experts"),
    key("shared_expert_intermediate_size", "shared_ffn", int, 5632),
)
"""The keys of Qwen's mixtures with an expert that all tokens go to."""
QWEN2_MOE = like_llama(
    SILU,
    DENSE_LAYERS,
    *SHARED_MIXTURE,
    _NORMALISE,
    key("qkv_bias", "qkv_biases", bool, True),
    Entry(_no_windows, lambda model: {"use_sliding_window": False, "layer_types": [FULL] * model.layers}),
    shared_gate=True,
)
QWEN3_MOE = like_llama(
    SILU,
    NO_BIASES,
    DENSE_LAYERS,
    key("moe_intermediate_size", "ffn", written="ffn_width"),
    *mixture("num_experts", "num_local_experts"),
    _NORMALISE,
    unused("max_window_layers"),
    Entry(
        _window,
        lambda model: {
            "sliding_window": model.sliding_window,
            "use_sliding_window": model.sliding_window is not None,
        },
        lambda _: {"sliding_window": ANY},
    ),
    qk_norm=True,
)
OLMOE = like_llama(
    SILU,
    NO_BIASES,
    *mixture("num_experts"),
    _NORMALISE,
    only("clip_qkv", None),
    kv_heads=None,
    norm_eps=1e-5,
    qk_norm=True,
    qk_norm_joint=True,
)


def _names(module: str, gate: str, up: str, down: str, **block: Module) -> Names:
    own: Tensors = {
        "mlp/router": Source(f"{module}.gate.weight"),
        "mlp/gate": Source(f"{module}.experts.{{expert}}.{gate}.weight"),
        "mlp/up": Source(f"{module}.experts.{{expert}}.{up}.weight"),
        "mlp/down": Source(f"{module}.experts.{{expert}}.{down}.weight"),
    }
    return Names(LLAMA_BLOCK | block, own)


MIXTRAL_NAMES = _names("block_sparse_moe", "w1", "w3", "w2")
MINIMAX_M2_NAMES = replace(
    _names("block_sparse_moe", "w1", "w3", "w2", **QK_NORMS),
    bare=MIXTRAL_NAMES.bare
    | {"mlp/choice_bias": Source("block_sparse_moe.e_score_correction_bias", transposed=False)},
)
GRANITE_MOE_NAMES = Names(
    LLAMA_BLOCK,
    {
        "mlp/router": Source("block_sparse_moe.router.layer.weight"),
        "mlp/gate": Source("block_sparse_moe.input_linear.weight", gate_and_up, (0,), stacked=True),
        "mlp/up": Source("block_sparse_moe.input_linear.weight", gate_and_up, (1,), stacked=True),
        "mlp/down": Source("block_sparse_moe.output_linear.weight", stacked=True),
    },
    experts="block_sparse_moe.experts",
)
_SHARED_EXPERT = {
    f"mlp/shared/{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")
} | {"mlp/shared/output_gate": "mlp.shared_expert_gate"}
FUSED = "mlp.experts.gate_up_proj"
"""The tensor of gate and up in files that hold all experts of a layer together."""


def joined(names: Names, *, together: bool) -> Names:
    """The names in files that hold all experts of a layer ``together``, as Qwen3.5's do, or one by one."""
    gate = names.bare.get("mlp/gate")
    if not together or not isinstance(gate, Source) or "{expert}" not in gate.name:
        return names
    gate = Source(FUSED, gate_and_up, (0,), stacked=True)
    down = Source("mlp.experts.down_proj", stacked=True)
    own: Tensors = {"mlp/gate": gate, "mlp/up": replace(gate, pieces=(1,)), "mlp/down": down}
    return replace(names, bare=names.bare | own)


QWEN2_MOE_NAMES = _names("mlp", "gate_proj", "up_proj", "down_proj", **_SHARED_EXPERT)
QWEN3_MOE_NAMES = _names("mlp", "gate_proj", "up_proj", "down_proj", **QK_NORMS)


def names_of_experts(block: dict[str, Module], bare: Tensors) -> Names:
    """Qwen2-MoE's names, with further or other names of modules (``block``) and of parameters (``bare``)."""
    return Names(QWEN2_MOE_NAMES.block | block, QWEN2_MOE_NAMES.bare | bare)


GPT_OSS = like_llama(
    SILU,
    only("attention_bias", True),
    *mixture("num_local_experts"),
    only("swiglu_alpha", 1.702),
    only("swiglu_limit", 7.0),
    windows(lambda _, found: periodic(found["layers"], 2), window=128),
    unused("experts_per_token", "initial_context_length"),  # in its first files
    head_dim=64,
    norm_eps=1e-5,
    rotary=Rope(theta=150000.0, tables="explicit"),
    mlp="swiglu_clamped",
    biases=True,
    attention_sinks=True,
)
GLM4_MOE = like_llama(
    SILU,
    key("attention_bias", "qkv_biases", bool, False),
    key("use_qk_norm", "qk_norm", bool, False),
    *_with_shared(dense=1, shared=1, scale=1.0),
    key("norm_topk_prob", "router_normalise", bool, True),
    CHOICE_BIASES,
    *groups_of_experts(1, 1),
    NOT_PREDICTING,
    norm_eps=1e-5,
    rotary=Rope(fraction=0.5),
    router="sigmoid",
)


def _latents(
    keys: ConfigKeys,
    found: Fields,
    widths: tuple[int, int, int | None] = (128, 128, 1536),
    *,
    head_dim: bool = True,
) -> Fields:
    """DeepSeek's heads. transformers also writes keys that follow from these, which must fit.

    ``widths`` are the defaults of keys without their rotary part, of values and of latent queries. Without
    ``head_dim`` that key is ignored.
    """
    keys.only("num_key_value_heads", found["heads"])
    plain, rotary = keys.take("qk_nope_head_dim", int, widths[0]), keys.take("qk_rope_head_dim", int, 64)
    if head_dim:
        keys.only("head_dim", rotary)
    else:
        keys.unused("head_dim")
    keys.only("qk_head_dim", plain + rotary)
    return {
        "latent_rank": keys.take("kv_lora_rank", int, 512),
        "latent_query_rank": keys.nullable("q_lora_rank", int, widths[2]),
        "latent_rope_width": rotary,
        "latent_value_width": keys.take("v_head_dim", int, widths[1]),
        "head_width": plain + rotary,
    }


def _write_latents(model: GPTConfig) -> Fields:
    if model.latent_rank is None:
        raise ConfigurationError("model.latent_rank = None, but this family has latents")
    return {
        "kv_lora_rank": model.latent_rank,
        "q_lora_rank": model.latent_query_rank,
        "qk_nope_head_dim": model.head_dim - model.rope_width,
        "qk_rope_head_dim": model.rope_width,
        "qk_head_dim": model.head_dim,
        "head_dim": model.rope_width,
        "v_head_dim": model.value_dim,
    }


def _entry_of_latents(read: Callable[[ConfigKeys, Fields], Fields]) -> Entry:
    fields = ("rank", "query_rank", "rope_width", "value_width")
    allowed = dict.fromkeys(("head_width", *(f"latent_{name}" for name in fields)), ANY)
    return Entry(read, _write_latents, lambda _: allowed)


KIMI_LATENTS = _entry_of_latents(partial(_latents, widths=(128, 128, None), head_dim=False))


def _deepseek(
    *entries: Entry,
    dense: int | Entry,
    shared: int,
    scale: float,
    score: str,
    latents: Callable[[ConfigKeys, Fields], Fields] = _latents,
    **values: Any,
) -> tuple[Entry, ...]:
    """The keys that both versions of DeepSeek and GLM-4.7-Flash share, and ``entries``."""
    return like_llama(
        SILU,
        NO_BIASES,
        only("pretraining_tp", 1),
        *_with_shared(dense=dense, shared=shared, scale=scale),
        only("moe_layer_freq", 1),  # DeepSeek's own code and vLLM read this key and the next
        only("scoring_func", score),
        unused("ep_size", "aux_loss_alpha", "seq_aux"),
        *entries,
        kv_heads=None,
        head_dim=_entry_of_latents(latents),
        rotary=Rope(scores=True),
        router=score,
        **values,
    )


def _method(keys: ConfigKeys, _: Fields) -> Fields:
    """DeepSeek-V2's selection, which reads the keys of groups only if it has groups."""
    keys.only("topk_method", "greedy", "group_limited_greedy")
    keys.unused("n_group", "topk_group")
    if keys.take("topk_method", str, "greedy") == "greedy":
        return {}
    return {
        "router_groups": keys.take("n_group", int),
        "router_groups_per_token": keys.take("topk_group", int),
        "router_group_best": 1,
    }


def _write_method(model: GPTConfig) -> Fields:
    return {
        "topk_method": "group_limited_greedy" if model.router_groups > 1 else "greedy",
        "n_group": model.router_groups,
        "topk_group": model.router_groups_per_token,
    }


DEEPSEEK_V2 = _deepseek(
    only("mlp_bias", False),
    only("norm_topk_prob", False),
    Entry(
        _method,
        _write_method,
        lambda model: (
            dict.fromkeys(("router_groups", "router_groups_per_token"), ANY)
            | {"router_group_best": 1 if model.router_groups > 1 else ANY}
        ),
    ),
    dense=0,
    shared=2,
    scale=1.0,
    score="softmax",
    router_normalise=False,
    rope_interleaved=True,
)
DEEPSEEK_V3 = _deepseek(
    *groups_of_experts(8, 4),
    only("topk_method", "noaux_tc"),
    key("norm_topk_prob", "router_normalise", bool, True),
    CHOICE_BIASES,
    NOT_PREDICTING,
    key("rope_interleave", "rope_interleaved", bool, True),
    dense=3,
    shared=1,
    scale=2.5,
    score="sigmoid",
)
GLM4_MOE_LITE = _deepseek(
    *groups_of_experts(1, 1),
    only("topk_method", "noaux_tc", written=False),
    only("first_k_dense_replace", 1, written=False),  # not read by transformers
    key("norm_topk_prob", "router_normalise", bool, True),
    CHOICE_BIASES,
    NOT_PREDICTING,
    key("rope_interleave", "rope_interleaved", bool, True),
    dense=_dense(_listed, _write_list),
    shared=1,
    scale=1.8,
    score="sigmoid",
    latents=partial(_latents, widths=(192, 256, 768)),
    norm_eps=1e-5,
)
GPT_OSS_NAMES = Names(
    LLAMA_BLOCK,
    {
        "attention/sinks": Source("self_attn.sinks", transposed=False),
        "mlp/router": Source("mlp.router.weight"),
        "mlp/router_bias": Source("mlp.router.bias", transposed=False),
        "mlp/gate": Source(FUSED, alternating, (0,), transposed=False, stacked=True),
        "mlp/up": Source(FUSED, alternating, (1,), transposed=False, stacked=True),
        "mlp/down": Source("mlp.experts.down_proj", transposed=False, stacked=True),
        "mlp/gate_bias": Source(f"{FUSED}_bias", alternating, (0,), transposed=False),
        "mlp/up_bias": Source(f"{FUSED}_bias", alternating, (1,), transposed=False),
        "mlp/down_bias": Source("mlp.experts.down_proj_bias", transposed=False),
    },
)
_SHARED = {f"mlp/shared/{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
GLM4_MOE_NAMES = replace(
    _names("mlp", "gate_proj", "up_proj", "down_proj", **QK_NORMS, **_SHARED),
    bare=QWEN3_MOE_NAMES.bare
    | {"mlp/choice_bias": Source("mlp.gate.e_score_correction_bias", transposed=False)},
)
_LATENTS: dict[str, Module] = {
    "attention/query": "self_attn.q_proj",
    "attention/query_down": "self_attn.q_a_proj",
    "attention/query_norm": "self_attn.q_a_layernorm",
    "attention/query_up": "self_attn.q_b_proj",
    "attention/latent_down": "self_attn.kv_a_proj_with_mqa",
    "attention/latent_norm": "self_attn.kv_a_layernorm",
    "attention/latent_up": "self_attn.kv_b_proj",
}
DEEPSEEK_NAMES = replace(
    GLM4_MOE_NAMES,
    block={ours: theirs for ours, theirs in LLAMA_BLOCK.items() if ours != "attention/qkv"}
    | _LATENTS
    | _SHARED,
)
