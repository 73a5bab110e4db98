"""Mixtures of experts: Mixtral, Qwen3-MoE, OLMoE, GLM-4.5 and gpt-oss.

The files of all but the last have three matrices for each expert. transformers 5 holds the experts of a layer
in two tensors, but reads and writes the same files. gpt-oss' files have these two tensors, in which the
outputs of gate and up take turns.
"""

from dataclasses import replace

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import ANY, Entry, Fields, dropouts, key, only, unused
from zerojax.interop.huggingface.layer_types import periodic, windows
from zerojax.interop.huggingface.llama import LLAMA_BLOCK, NO_BIASES, QK_NORMS, SILU, like_llama
from zerojax.interop.huggingface.mapping import Bare, Module, Names
from zerojax.interop.huggingface.mxfp4 import QUANTIZATION
from zerojax.interop.huggingface.rope_keys import Rope
from zerojax.models import GPTConfig


def _mixture(*counts: str) -> tuple[Entry, ...]:
    """The keys of all mixtures.

    The coefficient of the balance loss is a setting of training, so it is written and not read.

    Args:
        *counts: the names of the number of experts, of which a file may have one or all.
    """

    def read(keys: ConfigKeys, found: Fields) -> Fields:
        del found
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


def _window(keys: ConfigKeys, found: Fields) -> Fields:
    """Qwen's, which all layers of a mixture have."""
    del found
    window = keys.nullable("sliding_window", int, 4096)
    return {"sliding_window": window if keys.take("use_sliding_window", bool, False) else None}


def _dense_layers(keys: ConfigKeys, found: Fields) -> Fields:
    """Qwen's layers without experts, of which intermediate_size is."""
    step = keys.take("decoder_sparse_step", int, 1)
    numbers = keys.take("mlp_only_layers", list, [])
    dense = tuple(i for i in range(found["layers"]) if i in numbers or (i + 1) % max(step, 1))
    return {"dense_layers": dense, "dense_ffn": found["ffn"] if dense else None}


def _write_dense_layers(model: GPTConfig) -> Fields:
    dense = model.dense_layers
    widths = {"intermediate_size": model.of_layer(dense[0]).ffn_width} if dense else {}
    return {"decoder_sparse_step": 1, "mlp_only_layers": list(dense)} | widths


def _first_dense(keys: ConfigKeys, found: Fields) -> Fields:
    """The first layers have no experts, and intermediate_size is theirs."""
    dense = tuple(range(min(keys.take("first_k_dense_replace", int, 1), found["layers"])))
    return {"dense_layers": dense, "dense_ffn": found["ffn"] if dense else None}


def _write_first_dense(model: GPTConfig) -> Fields:
    dense = model.dense_layers
    if dense != tuple(range(len(dense))):
        raise ConfigurationError(f"model.dense_layers = {dense}, but this family has the first layers")
    widths = {"intermediate_size": model.of_layer(0).ffn_width} if dense else {}
    return {"first_k_dense_replace": len(dense)} | widths


def _shared_experts(model: GPTConfig) -> int:
    count, rest = divmod(model.shared_ffn, model.ffn_width)
    if rest or not count:
        raise ConfigurationError(
            f"model.shared_ffn = {model.shared_ffn}, but this family has a multiple of ffn, {model.ffn_width}"
        )
    return count


_NORMALISE = key("norm_topk_prob", "router_normalise", bool, False)

MIXTRAL = like_llama(
    SILU,
    *_mixture("num_local_experts"),
    dropouts("router_jitter_noise"),
    key("sliding_window", "sliding_window", int, None),
    norm_eps=1e-5,
    rotary=Rope(theta=1e6),
)
QWEN3_MOE = like_llama(
    SILU,
    NO_BIASES,
    Entry(_dense_layers, _write_dense_layers, lambda _: dict.fromkeys(("dense_layers", "dense_ffn"), ANY)),
    key("moe_intermediate_size", "ffn", written="ffn_width"),
    *_mixture("num_experts", "num_local_experts"),
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
    *_mixture("num_experts"),
    _NORMALISE,
    only("clip_qkv", None),
    kv_heads=None,
    norm_eps=1e-5,
    qk_norm=True,
    qk_norm_joint=True,
)


def _names(module: str, gate: str, up: str, down: str, **block: Module) -> Names:
    own = {
        "mlp/router": Bare(f"{module}.gate.weight"),
        "mlp/gate": Bare(f"{module}.experts.{{expert}}.{gate}.weight"),
        "mlp/up": Bare(f"{module}.experts.{{expert}}.{up}.weight"),
        "mlp/down": Bare(f"{module}.experts.{{expert}}.{down}.weight"),
    }
    return Names(LLAMA_BLOCK | block, own)


MIXTRAL_NAMES = _names("block_sparse_moe", "w1", "w3", "w2")
QWEN3_MOE_NAMES = _names("mlp", "gate_proj", "up_proj", "down_proj", **QK_NORMS)

GPT_OSS = like_llama(
    SILU,
    only("attention_bias", True),
    *_mixture("num_local_experts"),
    only("swiglu_alpha", 1.702),
    only("swiglu_limit", 7.0),
    windows(lambda _, found: periodic(found["layers"], 2), window=128),
    unused("experts_per_token", "initial_context_length"),  # of its first files
    QUANTIZATION,
    head_dim=64,
    norm_eps=1e-5,
    rotary=Rope(theta=150000.0, tables="explicit"),
    mlp="swiglu_clamped",
    biases=True,
    attention_sinks=True,
)
PREDICTING = "num_nextn_predict_layers"
"""The key of layers that predict further tokens, which are not read."""
GLM4_MOE = like_llama(
    SILU,
    key("attention_bias", "qkv_biases", bool, False),
    key("use_qk_norm", "qk_norm", bool, False),
    Entry(_first_dense, _write_first_dense, lambda _: dict.fromkeys(("dense_layers", "dense_ffn"), ANY)),
    key("moe_intermediate_size", "ffn", written="ffn_width"),
    *_mixture("n_routed_experts"),
    key(
        *("n_shared_experts", "shared_ffn", int, 1),
        decode=lambda count, found: count * found["ffn"],
        written=_shared_experts,
    ),
    key("norm_topk_prob", "router_normalise", bool, True),
    key("routed_scaling_factor", "router_scale", float, 1.0),
    Entry(  # files have the biases of the choice, and not how they move
        lambda *_: {"router_balance_rate": 0.001},
        allowed=lambda model: {"router_balance_rate": model.router_balance_rate or "above 0"},
    ),
    only("n_group", 1),
    only("topk_group", 1),
    Entry(lambda keys, _: keys.unused(PREDICTING, "num_mtp_layers"), lambda _: {PREDICTING: 0}),
    norm_eps=1e-5,
    rotary=Rope(fraction=0.5),
    router="sigmoid",
)
_FUSED = "mlp.experts.gate_up_proj"
GPT_OSS_NAMES = Names(
    LLAMA_BLOCK,
    {
        "attention/sinks": Bare("self_attn.sinks", transposed=False),
        "mlp/router": Bare("mlp.router.weight"),
        "mlp/router_bias": Bare("mlp.router.bias", transposed=False),
        "mlp/gate": Bare(_FUSED, transposed=False, stacked=True, turn=0),
        "mlp/up": Bare(_FUSED, transposed=False, stacked=True, turn=1),
        "mlp/down": Bare("mlp.experts.down_proj", transposed=False, stacked=True),
        "mlp/gate_bias": Bare(f"{_FUSED}_bias", transposed=False, turn=0),
        "mlp/up_bias": Bare(f"{_FUSED}_bias", transposed=False, turn=1),
        "mlp/down_bias": Bare("mlp.experts.down_proj_bias", transposed=False),
    },
)
_SHARED = {f"mlp/shared/{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
GLM4_MOE_NAMES = replace(
    _names("mlp", "gate_proj", "up_proj", "down_proj", **QK_NORMS, **_SHARED),
    bare=QWEN3_MOE_NAMES.bare
    | {"mlp/choice_bias": Bare("mlp.gate.e_score_correction_bias", transposed=False)},
)
