"""Families with Mamba-2 in most layers: Bamba, and Granite 4's hybrids with or without experts."""

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import Entry, Fields, key, only, unused
from zerojax.interop.huggingface.experts import GRANITE_MOE_NAMES
from zerojax.interop.huggingface.hybrid import key_heads, recurrent_layers
from zerojax.interop.huggingface.llama import GRANITE_FACTORS, LLAMA_BLOCK, NO_BIASES, SILU, like_llama
from zerojax.interop.huggingface.mapping import CONVOLUTION, Module, Names, Source, Tensors
from zerojax.interop.huggingface.rope_keys import Rope
from zerojax.models.config import GPTConfig
from zerojax.validation.untrusted import short

_NO_LIMIT = (0.0, float("inf")), [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]


def _head(keys: ConfigKeys, found: Fields) -> Fields:
    """The width of a head; "auto" divides the inner width, ``mamba_expand`` times d_model."""
    inner = keys.take("mamba_expand", int, 2) * found["d_model"]
    heads = found["recurrent_heads"] or found["heads"]
    width = inner // max(heads, 1)
    keys.only("mamba_d_head", "auto", width)
    if width * heads != inner:
        raise ConfigurationError(
            f"mamba_n_heads = {heads} does not divide {inner}, mamba_expand x hidden_size"
        )
    return {"recurrent_width": width}


def _write_head(model: GPTConfig) -> Fields:
    factor, rest = divmod(model.recurrent_values, model.d_model)
    if rest:
        raise ConfigurationError(
            f"model.recurrent_width = {model.recurrent_width}, but in this family all heads together are a "
            "multiple of d_model wide"
        )
    return {"mamba_expand": factor, "mamba_d_head": model.recurrent_width}


_MAMBA = (
    key("mamba_n_heads", "recurrent_heads", int, 128, written="value_heads"),
    key("mamba_n_groups", "recurrent_key_heads", int, 1, written=key_heads),
    key("mamba_d_state", "recurrent_key_width", int, 256),
    key("mamba_d_conv", "conv_width", int, 4),
    Entry(_head, _write_head, lambda model: {"recurrent_width": model.recurrent_width}),
    Entry(lambda keys, _: keys.only("time_step_limit", *_NO_LIMIT)),
    only("mamba_conv_bias", True),
    only("mamba_proj_bias", False),
    unused("mamba_chunk_size"),
)


def _attended(keys: ConfigKeys, found: Fields) -> Fields:
    attended = keys.take("attn_layer_indices", list, [])
    if not {*attended} <= {*range(found["layers"])}:
        raise ConfigurationError(
            f"attn_layer_indices = {short(attended)} names other layers than the {found['layers']}"
        )
    return {"recurrent_layers": tuple(x for x in range(found["layers"]) if x not in attended)}


BAMBA = like_llama(
    SILU,
    NO_BIASES,
    only("mlp_bias", False),
    Entry(
        _attended,
        lambda model: {"attn_layer_indices": [*model.attention_layers]},
        recurrent_layers("").allowed,
    ),
    *_MAMBA,
    unused("num_logits_to_keep", "z_loss_coefficient"),
    kv_heads=8,
    norm_eps=1e-5,
    rotary=Rope(fraction=0.5),
    recurrent="mamba2",
)


def _unrotated(keys: ConfigKeys, found: Fields) -> Fields:
    keys.only("position_embedding_type", "nope", "rope")
    rotated = keys.take("position_embedding_type", str, "nope") == "rope"
    return {"no_rope_layers": () if rotated else tuple(range(found["layers"]))}


def _write_unrotated(model: GPTConfig) -> Fields:
    return {"position_embedding_type": None if model.no_rope_layers else "rope"}


def _widths(keys: ConfigKeys, _: Fields) -> Fields:
    """The MLP that all tokens go to is beside the experts, or alone if there are none."""
    width = keys.take("shared_intermediate_size", int, 1024)
    if experts := keys.take("num_local_experts", int, 8):
        return {"experts": experts, "shared_ffn": width}
    return {"experts": 0, "ffn": width}


def _write_widths(model: GPTConfig) -> Fields:
    shared = model.shared_ffn if model.experts else model.ffn_width
    return {
        "num_local_experts": model.experts,
        "shared_intermediate_size": shared,
        "router_aux_loss_coef": model.balance_loss,
    }


GRANITE_HYBRID = like_llama(
    SILU,
    NO_BIASES,
    only("normalization_function", "rmsnorm", written=False),
    *GRANITE_FACTORS,
    key("num_experts_per_tok", "experts_per_token", int, 2),
    Entry(_widths, _write_widths, lambda model: {"experts": model.experts, "shared_ffn": model.shared_ffn}),
    recurrent_layers("linear_attention", interval=None),
    *_MAMBA,
    Entry(
        _unrotated,
        _write_unrotated,
        lambda model: {"no_rope_layers": ((), tuple(range(model.layers)))},
    ),
    kv_heads=None,
    recurrent="mamba2",
)


def _inner(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """One group of outputs: the gate, the convolution's input, and the step sizes."""
    return 1, (model.recurrent_values, model.conv_channels, model.value_heads)


def _halves(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """One group of outputs: gate and up of the MLP that all tokens go to."""
    return 1, (model.shared_ffn if model.experts else model.ffn_width,) * 2


def mamba_modules(mixer: str) -> dict[str, Module]:
    """The modules of Mamba-2 in the module ``mixer``."""
    return {
        "recurrent/gate": Source(f"{mixer}.in_proj", _inner, (0,)),
        "recurrent/inputs": Source(f"{mixer}.in_proj", _inner, (1,)),
        "recurrent/decay": Source(f"{mixer}.in_proj", _inner, (2,)),
        "recurrent/norm": f"{mixer}.norm",
        "recurrent/out": f"{mixer}.out_proj",
    }


def mamba_tensors(mixer: str) -> Tensors:
    """The parameters of Mamba-2 in the module ``mixer`` that belong to no module."""
    return {
        "recurrent/conv": Source(f"{mixer}.conv1d.weight", ones=CONVOLUTION),
        "recurrent/conv_bias": Source(f"{mixer}.conv1d.bias", transposed=False),
        "recurrent/log_rate": Source(f"{mixer}.A_log", transposed=False),
        "recurrent/step_bias": Source(f"{mixer}.dt_bias", transposed=False),
        "recurrent/skip": Source(f"{mixer}.D", transposed=False),
    }


BAMBA_NAMES = Names(
    LLAMA_BLOCK
    | mamba_modules("mamba")
    | {"norm_mlp": "pre_ff_layernorm"}
    | {f"mlp/{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    mamba_tensors("mamba"),
    norm="final_layernorm",
)
_SHARED: dict[str, Module] = {
    "gate": Source("shared_mlp.input_linear", _halves, (0,)),
    "up": Source("shared_mlp.input_linear", _halves, (1,)),
    "down": "shared_mlp.output_linear",
}
GRANITE_HYBRID_NAMES = Names(
    LLAMA_BLOCK
    | mamba_modules("mamba")
    | {f"{mlp}/{name}": module for mlp in ("mlp", "mlp/shared") for name, module in _SHARED.items()},
    GRANITE_MOE_NAMES.bare | mamba_tensors("mamba"),
    experts="block_sparse_moe.experts",
)
