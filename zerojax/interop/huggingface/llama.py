"""LLaMA 1 to 3, and families that differ from it in a few keys.

LLaMA has rotary positions, RMS norms, SwiGLU, and grouped keys and values. Other modules build on
``like_llama`` and ``LLAMA_NAMES``. The differences:

- Qwen 2 and 2.5: biases on query, key and value. Qwen 3: norms of queries and keys.
- Phi-3: query, key and value in one tensor, gate and up in another; longrope. A model that was not imported,
  without longrope and with whole heads rotated, is exported as LLaMA or Mistral, which compute the same.
- GLM 4: half of each head rotated, neighbours as pairs, and gate and up in one tensor. The 0414 models
  (``glm4``) also have norms after the branches; the earlier ones (``glm``) do not.
- Helium and ERNIE 4.5: whole heads rotated, neighbours as pairs. Seed-OSS: biases as in Qwen 2. Arcee: no
  gate, squared ReLU.
- HunYuan: norms of queries and keys after their rotation. EXAONE 4: OLMo's norms after the branches, and
  norms of queries and keys. If some of its layers have a window, the others are not rotated.
- OLMo 2 and 3: norms only after the branches, and norms of all queries and keys together. In OLMo 3 three of
  four layers have a window, and their rotary positions are never scaled.
"""

from typing import Any, Literal

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import REQUIRED, ConfigKeys
from zerojax.interop.huggingface.config_table import (
    ANY,
    Entry,
    Fields,
    choice,
    dropouts,
    fixed,
    key,
    only,
    unused,
)
from zerojax.interop.huggingface.layer_types import (
    FULL,
    LAST_WINDOWS,
    NO_ROPE,
    SLIDING,
    full_unrotated,
    patterned,
    periodic,
    unrotated,
    windows,
)
from zerojax.interop.huggingface.mapping import Joined, Module, Names, Source, gate_and_up, qkv_widths
from zerojax.interop.huggingface.rope_keys import Rope
from zerojax.models.config import GPTConfig

_GELUS = {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_exact", "relu": "relu"}
SILU = only("hidden_act", "silu", "swish")
QKV = Joined(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), qkv_widths)
LLAMA_BLOCK: dict[str, Module] = {
    "norm_attention": "input_layernorm",
    "attention/qkv": QKV,
    "attention/out": "self_attn.o_proj",
    "norm_mlp": "post_attention_layernorm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
QK_NORMS: dict[str, Module] = {
    "attention/query_norm": "self_attn.q_norm",
    "attention/key_norm": "self_attn.k_norm",
}
LLAMA_NAMES = Names(LLAMA_BLOCK)


def _biases(keys: ConfigKeys, _: Fields) -> Fields:
    attention, mlp = (keys.take(name, bool, False) for name in ("attention_bias", "mlp_bias"))
    if mlp and not attention:
        raise ConfigurationError("mlp_bias = true is not supported without attention_bias = true")
    of_attention = attention and not mlp
    return {"biases": mlp, "qkv_biases": of_attention, "out_bias": of_attention}


BIASES = Entry(
    _biases,
    lambda model: {"attention_bias": model.biases or model.out_bias, "mlp_bias": model.biases},
    lambda model: {"biases": ANY, "qkv_biases": ANY, "out_bias": model.qkv_biases},
)
ATTENTION_BIASES = Entry(
    lambda keys, _: dict.fromkeys(("qkv_biases", "out_bias"), keys.take("attention_bias", bool, False)),
    lambda model: {"attention_bias": model.out_bias},
    lambda model: {"qkv_biases": ANY, "out_bias": model.qkv_biases},
)
NO_BIASES = only("attention_bias", False)


def linear_biases(name: str, *, default: bool) -> Entry:
    """A key for the biases of linear layers, in a family whose layer norms always have biases."""

    def read(keys: ConfigKeys, _: Fields) -> Fields:
        biases = keys.take(name, bool, default)
        return {"biases": biases, "norm_biases": not biases}

    return Entry(
        read,
        lambda model: {name: model.biases},
        lambda model: {"biases": ANY, "norm_biases": not model.biases},
    )


def _head_dim(default: int | None) -> Entry:
    """``head_dim``. Without the key it is ``default``, or d_model / heads for None."""

    def unless_plain(width: int | None, found: Fields) -> int | None:
        return None if width is None or width * found["heads"] == found["d_model"] else width

    return key("head_dim", "head_width", int, default, decode=unless_plain, written="head_dim")


def _query_scalar(factor: float, _: Fields) -> float:
    """``query_scalar`` from Granite's factor of the attention scores, its inverse square root."""
    if not 1e-9 < factor < 1e9:
        raise ConfigurationError(f"attention_multiplier = {factor} is not supported, only from 1e-9 to 1e9")
    return factor**-2


def _attention_multiplier(model: GPTConfig) -> float:
    scale = model.head_dim**-0.5 if model.attention_scale is None else model.attention_scale
    return float(f"{scale:.15g}")  # without the rounding of two powers


def unrotated_layers(length: str = "max_position_embeddings") -> Entry:
    """No layer is rotated; ``length`` is the key of the longest sequence."""

    def read(keys: ConfigKeys, found: Fields) -> Fields:
        keys.unused("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
        return {"max_seq_len": keys.take(length, int), "no_rope_layers": tuple(range(found["layers"]))}

    return Entry(
        read,
        lambda model: {length: model.max_seq_len},
        lambda model: {"max_seq_len": ANY, "no_rope_layers": (tuple(range(model.layers)),)},
    )


_LAYERS = key("num_hidden_layers", "layers")


def like_llama(
    *entries: Entry,
    kv_heads: Any = REQUIRED,
    head_dim: int | Entry | None = None,
    layers: Entry = _LAYERS,
    ffn_width: Any = REQUIRED,
    norm_eps: float = 1e-6,
    tied: bool = False,
    rotary: Rope | Entry = Rope(),
    norm: Literal["rms", "layer"] = "rms",
    norm_key: str = "rms_norm_eps",
    **values: Any,
) -> tuple[Entry, ...]:
    """A table of the keys that these families share, with further entries.

    Args:
        *entries: further keys.
        kv_heads: default of num_key_value_heads; null means as many as heads.
        head_dim: default of head_dim; None is hidden_size / num_attention_heads. Or an entry for the heads.
        layers: the entry for the number of layers.
        ffn_width: default of intermediate_size.
        norm_eps: default of the epsilon.
        tied: default of tie_word_embeddings.
        rotary: the keys of rotary positions, or ``unrotated_layers()``.
        norm: the kind of norms.
        norm_key: the key of the norms' epsilon.
        **values: fields with a fixed value in the family.
    """
    fields = {"positions": "rope", "norm": norm, "mlp": "swiglu", "biases": False} | values
    own = {name for entry in entries for name in entry.allowed(GPTConfig())}
    return (
        fixed(**{name: value for name, value in fields.items() if name not in own}),
        key("vocab_size", "vocab_size"),
        layers,
        key("hidden_size", "d_model"),
        key("num_attention_heads", "heads"),
        head_dim if isinstance(head_dim, Entry) else _head_dim(head_dim),
        key("num_key_value_heads", "kv_heads", int, kv_heads, null=True, written="key_value_heads"),
        key("intermediate_size", "ffn", int, ffn_width, written="ffn_width"),
        key("tie_word_embeddings", "tied", bool, tied),
        key(norm_key, "norm_eps", float, norm_eps),
        dropouts("attention_dropout"),
        Entry(rotary.read, rotary.write, rotary.allowed),
        *entries,
    )


LLAMA = like_llama(
    SILU,
    BIASES,
    only("pretraining_tp", 1),
    only("rope_interleaved", False),
    unused("is_llama_config"),  # SmolLM has this key and the one before
    unused("max_sequence_length"),  # of Vicuna, not read by transformers
    kv_heads=None,
)
MISTRAL = like_llama(SILU, key("sliding_window", "sliding_window", int, 4096, null=True))
MINISTRAL3 = like_llama(
    SILU,
    key("sliding_window", "sliding_window", int, None),
    head_dim=128,
    norm_eps=1e-5,
    rotary=Rope(kinds=("yarn",), tables="growth"),
)
SMOLLM3 = like_llama(
    SILU,
    BIASES,
    NO_ROPE,
    windows(unrotated, None, switch=True),
    unused("pretraining_tp", "max_window_layers"),
    tied=True,
    rotary=Rope(theta=2e6),
)
GRANITE_FACTORS = (
    key(
        "attention_multiplier",
        "query_scalar",
        float,
        1.0,
        decode=_query_scalar,
        written=_attention_multiplier,
    ),
    key("embedding_multiplier", "embedding_scale", float, 1.0),
    key("residual_multiplier", "residual_scale", float, 1.0),
    key("logits_scaling", "logit_divisor", float, 1.0),
)
GRANITE = like_llama(SILU, BIASES, *GRANITE_FACTORS, kv_heads=None)
STARCODER2 = like_llama(
    choice("hidden_act", "mlp", _GELUS),
    linear_biases("use_bias", default=True),
    key("sliding_window", "sliding_window", int, None),
    dropouts(dropout=("residual_dropout", "embedding_dropout")),
    unused(*("norm_type", "mlp_type", "activation_function", "layer_norm_epsilon", "scale_attn_weights")),
    unused(*("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")),  # not read by transformers
    norm="layer",
    norm_key="norm_epsilon",
    norm_eps=1e-5,
    tied=True,
)
STARCODER2_NAMES = Names(
    {ours: theirs for ours, theirs in LLAMA_BLOCK.items() if not ours.startswith("mlp")}
    | {"mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}
)

QWEN2 = like_llama(SILU, *LAST_WINDOWS, only("use_mrope", False), qkv_biases=True)
QWEN3 = like_llama(SILU, *LAST_WINDOWS, ATTENTION_BIASES, head_dim=128, qk_norm=True)
QWEN3_VL = like_llama(
    SILU, ATTENTION_BIASES, head_dim=128, qk_norm=True, rotary=Rope(theta=5e5, sections=True)
)
QWEN3_NAMES = Names(LLAMA_BLOCK | QK_NORMS)

PHI3 = like_llama(
    SILU,
    *(only(name, False) for name in ("attention_bias", "mlp_bias", "lm_head_bias")),
    key("sliding_window", "sliding_window", int, None),
    dropouts(dropout=("resid_pdrop", "embd_pdrop")),
    unused("full_attn_mod", "interpolate_factor"),  # not read by transformers
    kv_heads=None,
    norm_eps=1e-5,
    rotary=Rope(kinds=("longrope",), fraction=1.0),
)
_FUSED_MLP: dict[str, Module] = {
    "mlp/gate": Source("mlp.gate_up_proj", gate_and_up, (0,)),
    "mlp/up": Source("mlp.gate_up_proj", gate_and_up, (1,)),
}
PHI3_NAMES = Names(LLAMA_BLOCK | _FUSED_MLP | {"attention/qkv": "self_attn.qkv_proj"})

GLM, GLM4 = (
    like_llama(
        SILU,
        key("attention_bias", "qkv_biases", bool, True),
        head_dim=128,
        norm_eps=1.5625e-7,
        rotary=Rope(fraction=0.5),
        rope_interleaved=True,
        post_norms=post_norms,
    )
    for post_norms in (False, True)
)
GLM_NAMES = Names(LLAMA_BLOCK | _FUSED_MLP)
GLM4_NAMES = Names(
    GLM_NAMES.block
    | {"post_norm_attention": "post_self_attn_layernorm", "post_norm_mlp": "post_mlp_layernorm"}
)

_OLMO: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_joint": True}
OLMO2 = like_llama(SILU, NO_BIASES, kv_heads=None, norm_eps=1e-5, **_OLMO)
OLMO3 = like_llama(
    SILU,
    NO_BIASES,
    windows(lambda _, found: periodic(found["layers"], 4)),
    kv_heads=None,
    norm_eps=1e-5,
    rotary=Rope(theta=500000.0, tables="two"),
    **_OLMO,
)
OLMO_NAMES = Names(
    {ours: theirs for ours, theirs in LLAMA_BLOCK.items() if not ours.startswith("norm")}
    | QK_NORMS
    | {"post_norm_attention": "post_attention_layernorm", "post_norm_mlp": "post_feedforward_layernorm"}
)

SEED_OSS = like_llama(
    SILU,
    key("attention_bias", "qkv_biases", bool, True),
    key("attention_out_bias", "out_bias", bool, False),
    only("mlp_bias", False),
    only("pretraining_tp", 1),
    dropouts(dropout=("residual_dropout",)),
    kv_heads=8,
    head_dim=128,
)
CWM = like_llama(
    SILU,
    only("mlp_bias", False),
    only("pretraining_tp", 1),
    windows(lambda _, found: [SLIDING if number % 4 else FULL for number in range(found["layers"])], 8192),
    kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rotary=Rope(theta=1e6, tables="explicit"),
)
ARCEE = like_llama(only("hidden_act", "relu2"), BIASES, kv_heads=None, norm_eps=1e-5, mlp="relu2")
HELIUM = like_llama(
    SILU,
    key("attention_bias", "qkv_biases", bool, False),
    only("mlp_bias", False),
    unused("pretraining_tp"),
    kv_heads=20,
    head_dim=128,
    norm_eps=1e-8,
    rotary=Rope(theta=100000.0),
    rope_interleaved=True,
)
ERNIE = like_llama(
    SILU,
    key("use_bias", "biases", bool, False),
    kv_heads=2,
    head_dim=128,
    norm_eps=1e-5,
    tied=True,
    rotary=Rope(theta=500000.0),
    rope_interleaved=True,
)
HUNYUAN = like_llama(
    SILU,
    ATTENTION_BIASES,
    only("pretraining_tp", 1),
    *(only(name, value, written=False) for name, value in (("use_qk_norm", True), ("use_cla", False))),
    *(only(name, value, written=False) for name, value in (("mlp_bias", False), ("norm_type", "rms"))),
    unused("eod_token_id", "attention_head_dim", "cla_share_factor", "org_vocab_size", "pad_id"),
    kv_heads=None,
    norm_eps=1e-5,
    rotary=Rope(alpha=True),
    qk_norm=True,
    qk_norm_rotated=True,
)
HUNYUAN_NAMES = Names(
    LLAMA_BLOCK
    | {"attention/query_norm": "self_attn.query_layernorm", "attention/key_norm": "self_attn.key_layernorm"}
)
EXAONE4 = like_llama(
    SILU,
    windows(patterned),
    full_unrotated(always=False),
    kv_heads=32,
    norm_eps=1e-5,
    pre_norms=False,
    post_norms=True,
    qk_norm=True,
)
