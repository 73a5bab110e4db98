"""Keys missing from a config.json have the defaults that transformers documents.

The values are those of the families' configs and of their base class, in transformers 4 and 5 alike; the
epsilon of OPT's norms, which has no key, is that of `torch.nn.LayerNorm`.
"""

from typing import Any

import numpy as np
import pytest

from zerojax.errors import ZeroError
from zerojax.interop.huggingface.config_keys import HARMLESS, ConfigKeys
from zerojax.interop.huggingface.families import FAMILIES, read_model
from zerojax.models import GPTConfig, parameter_count

_LLAMA_SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
MINISTRAL_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
SHAPE: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 100, "n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 32},
    "opt": {
        "vocab_size": 100,
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "ffn_dim": 24,
        "max_position_embeddings": 32,
    },
    "llama": _LLAMA_SHAPE,
    "mistral": _LLAMA_SHAPE | {"num_key_value_heads": 2},
    "qwen2": _LLAMA_SHAPE | {"num_key_value_heads": 2},
    "qwen3": _LLAMA_SHAPE | {"num_key_value_heads": 2},
    "phi3": _LLAMA_SHAPE,
    "olmo2": _LLAMA_SHAPE,
    "olmo3": _LLAMA_SHAPE,
    "granite": _LLAMA_SHAPE,
    **{
        family: _LLAMA_SHAPE | {"num_key_value_heads": 2}
        for family in ("smollm3", "starcoder2", "glm", "glm4")
    },
    "ministral3": _LLAMA_SHAPE | {"num_key_value_heads": 2, "rope_parameters": MINISTRAL_ROPE},
    **{family: _LLAMA_SHAPE | {"num_key_value_heads": 2} for family in ("gemma", "gemma2", "gemma3_text")},
    "mixtral": _LLAMA_SHAPE | {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 3},
    "qwen3_moe": _LLAMA_SHAPE
    | {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
    "olmoe": _LLAMA_SHAPE | {"num_experts": 6, "num_experts_per_tok": 3},
    "glm4_moe": _LLAMA_SHAPE
    | {"num_key_value_heads": 2, "n_routed_experts": 6, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 12},
    "deepseek_v2": _LLAMA_SHAPE
    | {"n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
    "deepseek_v3": _LLAMA_SHAPE
    | {"n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
    | {"num_hidden_layers": 4},
    **dict.fromkeys(("arcee", "ernie4_5", "hunyuan_v1_dense", "cohere", "cohere2", "phi"), _LLAMA_SHAPE),
    # As many heads as the keys and values that a file may leave out.
    "seed_oss": _LLAMA_SHAPE | {"num_attention_heads": 8},
    "cwm": _LLAMA_SHAPE
    | {"num_attention_heads": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "helium": _LLAMA_SHAPE | {"num_attention_heads": 20},
    "exaone4": _LLAMA_SHAPE | {"num_attention_heads": 32, "hidden_size": 64},
    "stablelm": _LLAMA_SHAPE | {"num_attention_heads": 32, "hidden_size": 256},
    "gpt_neox": _LLAMA_SHAPE | {"num_attention_heads": 2},
    "falcon": {
        key: value
        for key, value in _LLAMA_SHAPE.items()
        if key not in ("intermediate_size", "max_position_embeddings")
    },
    "granitemoe": _LLAMA_SHAPE | {"num_local_experts": 6, "num_experts_per_tok": 3},
    "qwen2_moe": _LLAMA_SHAPE
    | {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
    "gpt_oss": _LLAMA_SHAPE
    | {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 3}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}
"""Keys that transformers always writes, and without which nothing is imported."""
NULLABLE = {
    *("num_key_value_heads", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    "q_lora_rank",
}
"""Keys whose null is not their default: as many as heads, no window, no cap, no rank."""

SAME: dict[str, Any] = {"vocab_size": 100, "layers": 2, "d_model": 16, "heads": 4, "max_seq_len": 32}
_LLAMA: dict[str, Any] = {
    **SAME, "ffn": 24, "norm": "rms", "positions": "rope", "position_offset": 0, "mlp": "swiglu",
    "tied": False, "biases": False, "kv_heads": 2, "head_width": None, "norm_eps": 1e-6,
    "rope_theta": 10000.0, "rope_scaling": "none",
}  # fmt: skip


def like_llama(**fields: Any) -> GPTConfig:
    return GPTConfig(**(_LLAMA | fields))


_GEMMA: dict[str, Any] = {
    "head_width": 256, "tied": True, "mlp": "geglu", "norm_offset": 1.0, "embedding_scale": 4.0,
}  # fmt: skip
MODELS = {
    "gpt2": GPTConfig(
        **SAME, ffn=None, norm="layer", positions="learned", position_offset=0, mlp="gelu", tied=True,
        biases=True, kv_heads=None, head_width=None, norm_eps=1e-5,
    ),
    "opt": GPTConfig(
        **SAME, ffn=24, norm="layer", positions="learned", position_offset=2, mlp="relu", tied=True,
        biases=True, kv_heads=None, head_width=None, norm_eps=1e-5,
    ),
    "llama": like_llama(kv_heads=None),
    "mistral": like_llama(sliding_window=4096),
    "qwen2": like_llama(qkv_biases=True),
    "qwen3": like_llama(head_width=128, qk_norm=True),
    "phi3": like_llama(kv_heads=None, norm_eps=1e-5),
    "gemma": like_llama(**_GEMMA),
    "gemma2": like_llama(
        **_GEMMA, post_norms=True, query_scalar=256.0, attention_softcap=50.0, logit_softcap=30.0,
        sliding_window=4096, sliding_window_pattern=2,
    ),
    "gemma3_text": like_llama(
        **_GEMMA, post_norms=True, query_scalar=256.0, qk_norm=True, sliding_window=4096,
        rope_theta=1e6, rope_local_theta=10000.0,
    ),
}  # fmt: skip

_OLMO2: dict[str, Any] = {
    "kv_heads": None, "norm_eps": 1e-5, "pre_norms": False, "post_norms": True, "qk_norm": True,
    "qk_norm_joint": True,
}  # fmt: skip
_GLM: dict[str, Any] = {
    "head_width": 128, "qkv_biases": True, "norm_eps": 1.5625e-7, "rope_fraction": 0.5,
    "rope_interleaved": True,
}  # fmt: skip
MODELS |= {
    "smollm3": like_llama(tied=True, rope_theta=2e6),  # of every fourth layer, and there are two
    "olmo2": like_llama(**_OLMO2),
    "olmo3": like_llama(**_OLMO2, sliding_window=4096, rope_theta=5e5),
    "granite": like_llama(kv_heads=None, query_scalar=1.0),
    "starcoder2": like_llama(norm="layer", norm_eps=1e-5, mlp="gelu", biases=True, tied=True),
    "glm": like_llama(**_GLM),
    "glm4": like_llama(**_GLM, post_norms=True),
    "ministral3": like_llama(
        head_width=128, norm_eps=1e-5, rope_theta=1e6, rope_scaling="yarn", rope_factor=16.0,
        rope_original_len=8, rope_attention_factor=1.0, rope_query_growth=0.1,
    ),
}  # fmt: skip

_EXPERTS: dict[str, Any] = {"experts": 6, "experts_per_token": 3}
MODELS |= {
    "mixtral": like_llama(**_EXPERTS, norm_eps=1e-5, rope_theta=1e6),
    "qwen3_moe": like_llama(**_EXPERTS, ffn=12, qk_norm=True, router_normalise=False),
    "olmoe": like_llama(
        **_EXPERTS, kv_heads=None, norm_eps=1e-5, qk_norm=True, qk_norm_joint=True, router_normalise=False
    ),
    "glm4_moe": like_llama(
        **_EXPERTS, ffn=12, dense_layers=(0,), dense_ffn=24, shared_ffn=12, router="sigmoid",
        router_balance_rate=0.001, norm_eps=1e-5, rope_fraction=0.5,
    ),
    "gpt_oss": like_llama(
        **_EXPERTS, head_width=64, norm_eps=1e-5, mlp="swiglu_clamped", biases=True, attention_sinks=True,
        sliding_window=128, sliding_window_pattern=2,
    ),
}  # fmt: skip

_DEEPSEEK: dict[str, Any] = {
    "experts": 16, "experts_per_token": 3, "ffn": 12, "kv_heads": None, "head_width": 192,
    "latent_rank": 512, "latent_query_rank": 1536, "latent_rope_width": 64, "latent_value_width": 128,
    "rope_interleaved": True,
}  # fmt: skip
MODELS |= {
    "deepseek_v2": like_llama(**_DEEPSEEK, shared_ffn=24, router_normalise=False),
    "deepseek_v3": like_llama(
        **_DEEPSEEK, layers=4, shared_ffn=12, dense_layers=(0, 1, 2), dense_ffn=24, router="sigmoid",
        router_scale=2.5, router_balance_rate=0.001, router_groups=8, router_groups_per_token=4,
    ),
}  # fmt: skip

_PLAIN: dict[str, Any] = {"kv_heads": None, "norm_eps": 1e-5}
_NORMS: dict[str, Any] = {"norm": "layer", **_PLAIN}
_ATTENTION: dict[str, Any] = {"qkv_biases": True, "out_bias": True}
_NO_KV: Any = {"num_key_value_heads": (None, 2)}
_COHERE: dict[str, Any] = _NORMS | {
    "tied": True, "branches": "parallel_one_norm", "rope_interleaved": True, "logit_divisor": 16.0,
}  # fmt: skip
MODELS |= {
    "seed_oss": like_llama(kv_heads=8, heads=8, head_width=128, qkv_biases=True),
    "cwm": like_llama(
        kv_heads=8, heads=8, head_width=128, norm_eps=1e-5, sliding_window=8192, sliding_window_layers=(1,)
    ),
    "arcee": like_llama(**_PLAIN, mlp="relu2"),
    "helium": like_llama(
        heads=20, kv_heads=20, head_width=128, norm_eps=1e-8, rope_theta=1e5, rope_interleaved=True
    ),
    "ernie4_5": like_llama(head_width=128, norm_eps=1e-5, tied=True, rope_theta=5e5, rope_interleaved=True),
    "hunyuan_v1_dense": like_llama(**_PLAIN, qk_norm=True, qk_norm_rotated=True),
    "exaone4": like_llama(
        **_OLMO2 | {"qk_norm_joint": False, "kv_heads": 32}, heads=32, d_model=64, sliding_window=4096
    ),
    "granitemoe": like_llama(**_EXPERTS, kv_heads=None, query_scalar=1.0),
    "qwen2_moe": like_llama(
        **_EXPERTS, ffn=12, shared_ffn=5632, shared_gate=True, qkv_biases=True, router_normalise=False
    ),
    "gpt_neox": like_llama(
        **_NORMS, heads=2, mlp="gelu_exact", biases=True, branches="parallel", rope_fraction=0.25
    ),
    "falcon": like_llama(
        **_NORMS | {"kv_heads": 1}, ffn=None, mlp="gelu_exact", norm_biases=True, tied=True,
        max_seq_len=2048, branches="parallel_one_norm",
    ),
    "stablelm": like_llama(
        **_NORMS | {"kv_heads": 32}, heads=32, d_model=256, norm_biases=True, rope_fraction=0.25
    ),
    "phi": like_llama(
        **_NORMS, mlp="gelu", biases=True, head_bias=True, branches="parallel_one_norm", rope_fraction=0.5
    ),
    "cohere": like_llama(**_COHERE, rope_theta=5e5),
    "cohere2": like_llama(**_COHERE, sliding_window=4096, no_rope_layers=()),
}  # fmt: skip

_ROPE: dict[str, tuple[Any, Any]] = {
    "rope_parameters": ({"rope_type": "default", "rope_theta": 10000.0}, {"rope_theta": 5e5}),
    "rope_scaling": ({"type": "default", "partial_rotary_factor": 1.0}, {"type": "linear", "factor": 2.0}),
    "rope_theta": (10000.0, 5e5),
}
_LIKE_LLAMA: dict[str, tuple[Any, Any]] = {
    "hidden_act": ("silu", "gelu"),
    "head_dim": (4, 8),
    "rms_norm_eps": (1e-6, 1e-5),
    "tie_word_embeddings": (False, True),
    **_ROPE,
}
_QWEN: dict[str, tuple[Any, Any]] = _LIKE_LLAMA | {
    "layer_types": (["full_attention"] * 2, ["chunked_attention"] * 2),
    "max_window_layers": (28, 28),
    "sliding_window": (4096, 4096),
    "use_sliding_window": (False, False),
}
"""Windows depend on several keys: see below."""
_LIKE_GEMMA: dict[str, tuple[Any, Any]] = _LIKE_LLAMA | {
    "attention_bias": (False, True),
    "head_dim": (256, 8),
    "hidden_act": ("gelu_pytorch_tanh", "silu"),
    "hidden_activation": ("gelu_pytorch_tanh", "silu"),
    "tie_word_embeddings": (True, False),
    "use_bidirectional_attention": (False, True),
}
_GEMMA2: dict[str, tuple[Any, Any]] = _LIKE_GEMMA | {
    "attn_logit_softcapping": (50.0, None),
    "final_logit_softcapping": (30.0, 20.0),
    "layer_types": (["sliding_attention", "full_attention"], ["sliding_attention"] * 2),
    "query_pre_attn_scalar": (256, 8),
    "sliding_window": (4096, 16),
}

_OLMO: dict[str, tuple[Any, Any]] = _LIKE_LLAMA | {
    "attention_bias": (False, True),
    "num_key_value_heads": (None, 2),
    "rms_norm_eps": (1e-5, 1e-6),
}
_LIKE_COHERE: dict[str, tuple[Any, Any]] = {
    **{key: values for key, values in _LIKE_LLAMA.items() if key != "rms_norm_eps"},
    **_NO_KV,
    "attention_bias": (False, True),
    "layer_norm_eps": (1e-5, 1e-6),
    "logit_scale": (0.0625, 0.5),
    "tie_word_embeddings": (True, False),
}
_LIKE_DEEPSEEK: dict[str, tuple[Any, Any]] = _LIKE_LLAMA | {
    "attention_bias": (False, True),
    "first_k_dense_replace": (0, 1),
    "head_dim": (64, 8),
    "kv_lora_rank": (512, 8),
    "moe_layer_freq": (1, 2),
    "n_shared_experts": (2, 1),
    "num_key_value_heads": (None, 2),
    "pretraining_tp": (1, 2),
    "q_lora_rank": (1536, None),
    "qk_head_dim": (192, 8),
    "qk_nope_head_dim": (128, 192),
    "qk_rope_head_dim": (64, 8),
    "routed_scaling_factor": (1.0, 2.5),
    "v_head_dim": (128, 8),
}
LONGROPE = {"type": "longrope", "short_factor": [1, 2.0], "long_factor": [2.0, 4.0]}

KEYS: dict[str, dict[str, tuple[Any, Any]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu"),
        "layer_norm_epsilon": (1e-5, 1e-6),
        "n_inner": (None, 24),
        "tie_word_embeddings": (True, False),
        "scale_attn_weights": (True, False),
        "scale_attn_by_inverse_layer_idx": (False, True),
        "reorder_and_upcast_attn": (False, True),
        "add_cross_attention": (False, True),
    },
    "opt": {
        "activation_function": ("relu", "gelu"),
        "do_layer_norm_before": (True, False),
        "_remove_final_layer_norm": (False, True),
        "enable_bias": (True, False),
        "layer_norm_elementwise_affine": (True, False),
        "tie_word_embeddings": (True, False),
        "word_embed_proj_dim": (16, 8),
    },
    "llama": {
        **_LIKE_LLAMA,
        "attention_bias": (False, True),
        "mlp_bias": (False, True),
        "num_key_value_heads": (None, 2),
        "pretraining_tp": (1, 2),
        "rope_interleaved": (False, True),
    },
    "mistral": _LIKE_LLAMA | {"sliding_window": (4096, 16)},
    "qwen2": _QWEN | {"use_mrope": (False, True)},
    "qwen3": _QWEN | {"attention_bias": (False, True), "head_dim": (128, 8)},
    "phi3": {
        **_LIKE_LLAMA,
        "attention_bias": (False, True),
        "mlp_bias": (False, True),
        "lm_head_bias": (False, True),
        "num_key_value_heads": (None, 2),
        "original_max_position_embeddings": (4096, 4096),
        "partial_rotary_factor": (1.0, 0.5),
        "rms_norm_eps": (1e-5, 1e-6),
        "rope_scaling": ({"type": "default"}, LONGROPE),
        "sliding_window": (None, 8),
    },
    "smollm3": {
        **_LIKE_LLAMA,
        "attention_bias": (False, True),
        "mlp_bias": (False, True),
        "no_rope_layers": ([1, 1, 0], [1, 0]),
        "no_rope_layer_interval": (4, 2),
        "rope_theta": (2e6, 1e4),
        "rope_parameters": ({"rope_type": "default"}, {"rope_theta": 1e4}),
        "sliding_window": (None, None),
        "use_sliding_window": (False, False),
        "layer_types": (["full_attention"] * 2, ["chunked_attention"] * 2),
        "tie_word_embeddings": (True, False),
    },
    "olmo2": _OLMO,
    "olmo3": _OLMO
    | {
        "layer_types": (["sliding_attention"] * 2, ["sliding_attention", "full_attention"]),
        "sliding_window": (4096, 16),
        "rope_theta": (5e5, 1e4),
        "rope_parameters": (
            {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_theta": 5e5}},
            {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
        ),
    },
    "granite": {
        **_LIKE_LLAMA,
        "attention_bias": (False, True),
        "mlp_bias": (False, True),
        "num_key_value_heads": (None, 2),
        "attention_multiplier": (1.0, 0.5),
        "embedding_multiplier": (1.0, 3.0),
        "residual_multiplier": (1.0, 0.5),
        "logits_scaling": (1.0, 4.0),
    },
    "starcoder2": {
        **{key: values for key, values in _LIKE_LLAMA.items() if key != "rms_norm_eps"},
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "norm_epsilon": (1e-5, 1e-6),
        "sliding_window": (None, 8),
        "tie_word_embeddings": (True, False),
        "use_bias": (True, False),
    },
    **dict.fromkeys(
        ("glm", "glm4"),
        _LIKE_LLAMA
        | {
            "attention_bias": (True, False),
            "head_dim": (128, 8),
            "partial_rotary_factor": (0.5, 1.0),
            "rms_norm_eps": (1.5625e-7, 1e-5),
            "rope_scaling": (
                {"type": "default", "partial_rotary_factor": 0.5},
                {"type": "linear", "factor": 2.0},
            ),
        },
    ),
    "ministral3": {
        "head_dim": (128, 8),
        "hidden_act": ("silu", "gelu"),
        "rms_norm_eps": (1e-5, 1e-6),
        "rope_scaling": ({}, {}),  # rope_parameters is there
        "rope_theta": (1e4, 1e4),
        "sliding_window": (None, 8),
        "tie_word_embeddings": (False, True),
    },
    "mixtral": _LIKE_LLAMA
    | {
        "rms_norm_eps": (1e-5, 1e-6),
        "rope_parameters": ({"rope_type": "default", "rope_theta": 1e6}, {"rope_theta": 1e4}),
        "rope_theta": (1e6, 1e4),
        "sliding_window": (None, 8),
    },
    "qwen3_moe": _LIKE_LLAMA
    | {
        "attention_bias": (False, True),
        "decoder_sparse_step": (1, 2),
        "mlp_only_layers": ([], [0]),
        "norm_topk_prob": (False, True),
        "num_local_experts": (6, 8),
        "sliding_window": (4096, 4096),
        "use_sliding_window": (False, True),
    },
    "olmoe": _OLMO | {"clip_qkv": (None, 8.0), "norm_topk_prob": (False, True)},
    "glm4_moe": _LIKE_LLAMA
    | {
        "attention_bias": (False, True),
        "first_k_dense_replace": (1, 0),
        "n_group": (1, 2),
        "n_shared_experts": (1, 2),
        "norm_topk_prob": (True, False),
        "partial_rotary_factor": (0.5, 1.0),
        "rms_norm_eps": (1e-5, 1e-6),
        "rope_scaling": (
            {"type": "default", "partial_rotary_factor": 0.5},
            {"type": "linear", "factor": 2.0},
        ),
        "routed_scaling_factor": (1.0, 2.5),
        "topk_group": (1, 1),  # as many as there are groups
        "use_qk_norm": (False, True),
    },
    "deepseek_v2": _LIKE_DEEPSEEK
    | {
        "mlp_bias": (False, True),
        "norm_topk_prob": (False, True),
        "scoring_func": ("softmax", "sigmoid"),
        "topk_method": ("greedy", "noaux_tc"),
    },
    "deepseek_v3": _LIKE_DEEPSEEK
    | {
        "first_k_dense_replace": (3, 1),
        "n_group": (8, 4),
        "n_shared_experts": (1, 2),
        "norm_topk_prob": (True, False),
        "rope_interleave": (True, False),
        "routed_scaling_factor": (2.5, 1.0),
        "scoring_func": ("sigmoid", "softmax"),
        "topk_group": (4, 2),
        "topk_method": ("noaux_tc", "greedy"),
    },
    "gpt_oss": {
        "attention_bias": (True, False),
        "head_dim": (64, 8),
        "hidden_act": ("silu", "gelu"),
        "layer_types": (["sliding_attention", "full_attention"], ["sliding_attention"] * 2),
        "rms_norm_eps": (1e-5, 1e-6),
        "rope_scaling": ({}, {}),  # rope_parameters is there
        "rope_theta": (150000.0, 150000.0),
        "sliding_window": (128, 8),
        "swiglu_alpha": (1.702, 1.0),
        "swiglu_limit": (7.0, 5.0),
        "tie_word_embeddings": (False, True),
    },
    "seed_oss": _LIKE_LLAMA
    | {
        "attention_bias": (True, False),
        "attention_out_bias": (False, True),
        "head_dim": (128, 8),
        "mlp_bias": (False, True),
        "num_key_value_heads": (8, 2),
        "pretraining_tp": (1, 2),
    },
    "cwm": {key: values for key, values in _LIKE_LLAMA.items() if key != "rope_parameters"}
    | {
        "head_dim": (128, 8),
        "layer_types": (["full_attention", "sliding_attention"], ["sliding_attention"] * 2),
        "mlp_bias": (False, True),
        "num_key_value_heads": (8, 2),
        "pretraining_tp": (1, 2),
        "rms_norm_eps": (1e-5, 1e-6),
        "rope_scaling": ({}, {}),  # rope_parameters is there
        "rope_theta": (1e6, 1e6),
        "sliding_window": (8192, 8),
    },
    "arcee": _LIKE_LLAMA
    | _NO_KV
    | {
        "attention_bias": (False, True),
        "hidden_act": ("relu2", "silu"),
        "mlp_bias": (False, True),
        "rms_norm_eps": (1e-5, 1e-6),
    },
    "helium": _LIKE_LLAMA
    | {
        "attention_bias": (False, True),
        "head_dim": (128, 8),
        "mlp_bias": (False, True),
        "num_key_value_heads": (20, 2),
        "rms_norm_eps": (1e-8, 1e-6),
        "rope_parameters": ({"rope_type": "default", "rope_theta": 1e5}, {"rope_theta": 5e5}),
        "rope_theta": (1e5, 5e5),
    },
    "ernie4_5": _LIKE_LLAMA
    | {
        "head_dim": (128, 8),
        "num_key_value_heads": (2, 4),
        "rms_norm_eps": (1e-5, 1e-6),
        "rope_parameters": ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 1e4}),
        "rope_theta": (5e5, 1e4),
        "tie_word_embeddings": (True, False),
        "use_bias": (False, True),
    },
    "hunyuan_v1_dense": _LIKE_LLAMA
    | _NO_KV
    | {
        "attention_bias": (False, True),
        "mlp_bias": (False, True),
        "norm_type": ("rms", "layer"),
        "pretraining_tp": (1, 2),
        "rms_norm_eps": (1e-5, 1e-6),
        "rope_scaling": ({"type": "default"}, {"type": "dynamic", "alpha": 2.0}),
        "use_cla": (False, True),
        "use_qk_norm": (True, False),
    },
    "exaone4": _LIKE_LLAMA
    | {
        "head_dim": (2, 8),
        "layer_types": (["sliding_attention"] * 2, ["sliding_attention", "full_attention"]),
        "num_key_value_heads": (32, 2),
        "rms_norm_eps": (1e-5, 1e-6),
        "sliding_window": (4096, 8),
        "sliding_window_pattern": (4, 2),
    },
    "granitemoe": {
        **_LIKE_LLAMA,
        **_NO_KV,
        "attention_bias": (False, True),
        "attention_multiplier": (1.0, 0.5),
        "embedding_multiplier": (1.0, 3.0),
        "residual_multiplier": (1.0, 0.5),
        "logits_scaling": (1.0, 4.0),
    },
    "qwen2_moe": _LIKE_LLAMA
    | {
        "decoder_sparse_step": (1, 2),
        "layer_types": (["full_attention"] * 2, ["sliding_attention"] * 2),
        "mlp_only_layers": ([], [0]),
        "norm_topk_prob": (False, True),
        "qkv_bias": (True, False),
        "shared_expert_intermediate_size": (5632, 8),
        "use_sliding_window": (False, True),
    },
    "gpt_neox": {
        "attention_bias": (True, False),
        "hidden_act": ("gelu", "relu"),
        "layer_norm_eps": (1e-5, 1e-6),
        "rope_parameters": ({"rope_type": "default"}, {"rope_theta": 5e5}),
        "rope_scaling": ({"type": "default"}, {"type": "linear", "factor": 2.0}),
        "rotary_emb_base": (10000.0, 5e5),
        "rotary_pct": (0.25, 0.5),
        "tie_word_embeddings": (False, True),
        "use_parallel_residual": (True, False),
    },
    "falcon": _ROPE
    | {
        "activation": ("gelu", "relu"),
        "alibi": (False, True),
        "apply_residual_connection_post_layernorm": (False, True),
        "bias": (False, True),
        "ffn_hidden_size": (None, 24),
        "layer_norm_epsilon": (1e-5, 1e-6),
        "max_position_embeddings": (2048, 32),
        "multi_query": (True, False),
        "new_decoder_architecture": (False, True),
        "num_kv_heads": (4, 4),
        "num_ln_in_parallel_attn": (1, 2),
        "parallel_attn": (True, False),
        "tie_word_embeddings": (True, False),
    },
    "stablelm": {key: values for key, values in _LIKE_LLAMA.items() if key != "rms_norm_eps"}
    | {
        "head_dim": (8, 16),
        "layer_norm_eps": (1e-5, 1e-6),
        "num_key_value_heads": (32, 2),
        "partial_rotary_factor": (0.25, 0.5),
        "qk_layernorm": (False, True),
        "rope_scaling": ({"type": "default"}, {"type": "linear", "factor": 2.0}),
        "use_parallel_residual": (False, True),
        "use_qkv_bias": (False, True),
    },
    "phi": {key: values for key, values in _LIKE_LLAMA.items() if key != "rms_norm_eps"}
    | _NO_KV
    | {
        "hidden_act": ("gelu_new", "relu"),
        "layer_norm_eps": (1e-5, 1e-6),
        "partial_rotary_factor": (0.5, 1.0),
        "qk_layernorm": (False, True),
        "rope_scaling": ({"type": "default"}, {"type": "linear", "factor": 2.0}),
        "tie_word_embeddings": (False, False),
    },
    "cohere": _LIKE_COHERE
    | {
        "rope_parameters": ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 1e4}),
        "rope_theta": (5e5, 1e4),
        "pretraining_tp": (1, 2),
        "use_qk_norm": (False, True),
    },
    "cohere2": _LIKE_COHERE
    | {
        "layer_types": (["sliding_attention"] * 2, ["sliding_attention", "full_attention"]),
        "order_of_interleaved_layers": ("local_attn_first", "global_attn_first"),
        "position_embedding_type": ("rope_gptj", "alibi"),
        "rotary_pct": (1.0, 0.5),
        "sliding_window": (4096, 8),
        "sliding_window_pattern": (4, 2),
        "use_gated_activation": (True, False),
        "use_parallel_block": (True, False),
    },
    "gemma": _LIKE_GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": {key: values for key, values in _GEMMA2.items() if key != "attn_logit_softcapping"}
    | {
        "final_logit_softcapping": (None, 20.0),
        "layer_types": (["sliding_attention"] * 2, ["sliding_attention", "full_attention"]),
        "rope_local_base_freq": (10000.0, 1e6),
        "rope_parameters": (
            {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_theta": 1e6}},
            {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
        ),
        "rope_theta": (1e6, 1e4),
        "sliding_window_pattern": (6, 2),
    },
}
"""Every other key that the logits depend on: its documented default, and another value."""
TRAINING = {
    "gpt2": {"resid_pdrop", "embd_pdrop", "attn_pdrop"},
    "opt": {"dropout", "attention_dropout", "activation_dropout", "layerdrop"},
    **{family: {"attention_dropout"} for family in FAMILIES if family not in ("gpt2", "opt", "phi3")},
    "starcoder2": {"attention_dropout", "residual_dropout", "embedding_dropout"},
    "phi3": {"attention_dropout", "resid_pdrop", "embd_pdrop"},
    "mixtral": {"attention_dropout", "router_jitter_noise"},
    "seed_oss": {"attention_dropout", "residual_dropout"},
    "gpt_neox": {"attention_dropout", "classifier_dropout", "hidden_dropout"},
    "falcon": {"attention_dropout", "hidden_dropout"},
    "phi": {"attention_dropout", "resid_pdrop", "embd_pdrop"},
    "stablelm": {"attention_dropout", "hidden_dropout"},
}
UNUSED = {
    "gpt2": {
        *("n_ctx", "summary_type", "summary_use_proj", "summary_activation"),
        *("summary_proj_to_labels", "summary_first_dropout", "n_special", "predict_special_tokens"),
    },
    "opt": {"init_std"},
    "llama": {"is_llama_config", "max_sequence_length"},
    "phi3": {"full_attn_mod", "interpolate_factor"},
    "smollm3": {"pretraining_tp", "max_window_layers"},
    "starcoder2": {
        *("norm_type", "mlp_type", "activation_function", "layer_norm_epsilon", "scale_attn_weights"),
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
    },
    "qwen3_moe": {"max_window_layers"},
    "qwen2_moe": {"sliding_window", "max_window_layers"},
    "hunyuan_v1_dense": {
        *("eod_token_id", "attention_head_dim", "cla_share_factor", "org_vocab_size", "pad_id"),
    },
    "helium": {"pretraining_tp"},
    "gpt_neox": {"is_decoder", "attention_probs_dropout_prob", "hidden_dropout_prob"},
    "cohere": {"model_max_length"},
    "cohere2": {"layer_switch", "use_embedding_sharing", "use_parallel_embedding", "cache_implementation"},
    "glm4_moe": {"num_nextn_predict_layers", "num_mtp_layers"},
    "deepseek_v2": {"ep_size", "aux_loss_alpha", "seq_aux", "n_group", "topk_group"},
    "deepseek_v3": {"ep_size", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers", "num_mtp_layers"},
    "gpt_oss": {"experts_per_token", "initial_context_length"},
    "gemma2": {"cache_implementation", "sliding_window_size"},
    "gemma3_text": {"cache_implementation", "_sliding_window_pattern", "attn_logit_softcapping"},
}
PAIRS = [(family, key) for family, keys in KEYS.items() for key in keys]


def read(family: str, **more: Any) -> GPTConfig:
    keys = ConfigKeys(SHAPE[family] | more, "config.json")
    model = FAMILIES[family].read(keys)
    keys.finish()
    return model


@pytest.mark.parametrize("family", KEYS)
def test_a_config_without_optional_keys_is_read(family: str):
    assert read(family) == MODELS[family]


@pytest.mark.parametrize(("family", "key"), PAIRS)
def test_leaving_a_key_out_is_writing_its_default(family: str, key: str):
    default, _ = KEYS[family][key]
    assert read(family, **{key: default}) == MODELS[family]
    if key not in NULLABLE:
        assert read(family, **{key: None}) == MODELS[family]


@pytest.mark.parametrize(("family", "key"), PAIRS)
def test_another_value_is_another_model_or_is_refused(family: str, key: str):
    default, other = KEYS[family][key]
    if default == other:
        return
    try:
        model = read(family, **{key: other})
    except ZeroError as error:
        refusal = str(error)
    else:
        assert model != MODELS[family]
        return
    assert key in refusal or "rope_type" in refusal


@pytest.mark.parametrize(("family", "key"), [(family, key) for family, keys in SHAPE.items() for key in keys])
def test_a_shape_is_never_guessed(family: str, key: str):
    values = {name: value for name, value in SHAPE[family].items() if name != key}
    for given in ({}, {} if key in NULLABLE else {key: None}):
        keys = ConfigKeys(values | given, "config.json")
        with pytest.raises(ZeroError, match=f"{key} is missing"):
            FAMILIES[family].read(keys)


def test_null_key_value_heads_are_as_many_as_heads():
    for family in ("llama", "mistral", "qwen2", "qwen3", "phi3"):
        assert read(family, num_key_value_heads=None).key_value_heads == 4


def test_a_cap_that_gemma_3_does_not_read():
    given = SHAPE["gemma3_text"] | {"model_type": "gemma3_text"}
    for cap, notes in (
        (None, []),
        (2.0, ["attn_logit_softcapping = 2.0 is not imported: transformers ignores it as well"]),
    ):
        found = read_model(given | {"attn_logit_softcapping": cap}, "config.json")
        assert found[1:] == (MODELS["gemma3_text"], notes)


def test_windows_of_layers_are_read_and_written():
    assert read("mistral", sliding_window=None).sliding_window is None
    on = {"use_sliding_window": True, "sliding_window": 8}
    for family in ("qwen2", "qwen3"):
        assert read(family, **on).sliding_window is None  # max_window_layers is 28
        assert read(family, **on, max_window_layers=0).sliding_window == 8
        assert read(family, **on, layer_types=["sliding_attention"] * 2).sliding_window == 8
        assert (
            read(family, use_sliding_window=True, sliding_window=None, max_window_layers=0) == MODELS[family]
        )
        last = read(family, **on, max_window_layers=1)
        assert (last.sliding_window, last.sliding_window_layers) == (8, (1,))
        for wrong in (["full_attention"], []):
            with pytest.raises(ZeroError, match="layer_types"):
                read(family, layer_types=wrong)
    for family in ("qwen2", "smollm3"):
        # transformers' eager attention of SmolLM3 would have the window, and FlashAttention not.
        with pytest.raises(ZeroError, match="use_sliding_window = false contradicts layer_types"):
            read(family, sliding_window=8, layer_types=["sliding_attention"] * 2)
        assert read(family, layer_types=["sliding_attention"] * 2, sliding_window=None) == MODELS[family]


def test_a_pattern_of_windows_is_read():
    layers = {"num_hidden_layers": 12, "sliding_window": 8}
    gemma3 = read("gemma3_text", **layers)
    assert (gemma3.sliding_window, gemma3.sliding_window_pattern) == (8, 6)
    assert gemma3.windowed == ((True,) * 5 + (False,)) * 2
    assert read("gemma2", **layers).windowed == (True, False) * 6
    no_window = read("gemma3_text", **layers, layer_types=["full_attention"] * 12)
    assert (no_window.sliding_window, no_window.rope_local_theta) == (None, None)
    assert read("gemma2", sliding_window=None).sliding_window is None
    for windowed in ((False,) + (True,) * 11, (True,) * 3 + (False,) * 9):
        types = ["sliding_attention" if one else "full_attention" for one in windowed]
        found = read("gemma2", **layers, layer_types=types)
        assert (found.sliding_window, found.windowed) == (8, windowed)


def test_layers_without_rotary_positions_are_read_and_written():
    flags = [1, 0, 1, 1, 0, 1]
    layers = {"num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 8}
    given = read("smollm3", **layers, no_rope_layers=flags)
    assert [kind != "none" for kind in given.rotations] == [bool(flag) for flag in flags]
    assert given.windowed == tuple(not flag for flag in flags)
    assert read("smollm3", **layers).no_rope_layers == (3,)
    for wrong in ([1, 0], [1, 2, 1, 1, 1, 1]):
        with pytest.raises(ZeroError, match="no_rope_layers"):
            read("smollm3", **layers, no_rope_layers=wrong)


def test_layers_without_a_window_are_not_rotated():
    layers = {"num_hidden_layers": 4, "sliding_window": 8}
    types = ["sliding_attention"] * 3 + ["full_attention"]
    for family in ("exaone4", "cohere2"):
        assert read(family, **layers).no_rope_layers == (3,)
        assert read(family, **layers, layer_types=types[::-1]).no_rope_layers == (0,)
        with pytest.raises(ZeroError, match="layer_types is supported only with a sliding window"):
            read(family, **layers, layer_types=types[-1:] * 4)
    # A pattern in letters stands beside layer_types, which say the same.
    assert read("exaone4", **layers, sliding_window_pattern="LLLG", layer_types=types).no_rope_layers == (3,)
    assert read("exaone4", sliding_window=None).no_rope_layers == ()
    with pytest.raises(ZeroError, match="layer_types is supported only with a sliding window"):
        read("cohere2", sliding_window=None)


def test_hunyuans_alpha_stretches_theta():
    published = {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic",
    }  # fmt: skip
    model = read("hunyuan_v1_dense", rope_scaling=published, head_dim=128, rope_theta=10000.0)
    assert (model.rope_scaling, model.max_seq_len) == ("none", 32)
    assert model.rope_theta == pytest.approx(10000 * 1000 ** (128 / 126))
    for wrong, message in (
        ({"alpha": -1.0}, "alpha = -1.0"),
        ({"type": "yarn"}, "'yarn'"),
        ({"a": 1}, "a = 1"),
    ):
        with pytest.raises(ZeroError, match=message):
            read("hunyuan_v1_dense", rope_scaling=published | wrong)


def test_both_falcon_architectures_are_read():
    published = {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}
    found = read("falcon", **published)
    assert (found.key_value_heads, found.branches) == (2, "parallel")
    assert read("falcon", **published, num_ln_in_parallel_attn=1).branches == "parallel_one_norm"
    found = read("falcon", multi_query=False, parallel_attn=False, num_kv_heads=2)  # which is not read
    assert (found.key_value_heads, found.branches) == (4, "sequential")
    with pytest.raises(ZeroError, match="parallel_attn = False is not supported"):
        read("falcon", **published, parallel_attn=False)


def test_longrope_reads_the_original_length_beside_its_table():
    model = read("phi3", rope_scaling=LONGROPE | {"type": "su"}, original_max_position_embeddings=8)
    assert (model.rope_scaling, model.rope_original_len, model.rope_factor) == ("longrope", 8, 4.0)
    assert (model.rope_short_factors, model.rope_long_factors) == ((1.0, 2.0), (2.0, 4.0))
    table = LONGROPE | {"original_max_position_embeddings": 16}
    with pytest.raises(ZeroError, match="original_max_position_embeddings = 16 is not supported, only 8"):
        read("phi3", rope_scaling=table, original_max_position_embeddings=8)
    with pytest.raises(ZeroError, match=r"long_factor = .* should be numbers"):
        read("phi3", rope_scaling=LONGROPE | {"long_factor": ["2", 3]})


def test_dynamic_scaling_extends_the_context():
    model = read("llama", rope_scaling={"type": "dynamic", "factor": 2.5})
    assert (model.rope_scaling, model.rope_factor) == ("dynamic", 2.5)
    assert (model.rope_original_len, model.max_seq_len) == (32, 80)


def test_yarn_takes_the_defaults_of_transformers():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert read("llama", rope_scaling=yarn) == like_llama(
        kv_heads=None, rope_scaling="yarn", rope_factor=4.0, rope_original_len=32
    )
    given = {"original_max_position_embeddings": 8, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5}
    assert read("llama", rope_scaling=yarn | given) == like_llama(
        kv_heads=None, rope_scaling="yarn", rope_factor=4.0, rope_original_len=8, rope_beta_fast=16.0,
        rope_beta_slow=2.0, rope_attention_factor=1.5,
    )  # fmt: skip
    both = read("llama", rope_scaling=yarn | {"mscale": 0.5, "mscale_all_dim": 2.0})
    # transformers' get_mscale(4, 0.5) / get_mscale(4, 2)
    assert both.rope_attention_factor == pytest.approx((0.05 * np.log(4) + 1) / (0.2 * np.log(4) + 1))
    assert read("llama", rope_scaling=yarn | {"mscale": 0.5}).rope_attention_factor is None
    assert not read("llama", rope_scaling=yarn | {"truncate": False}).rope_truncate


def test_a_llama_with_the_keys_of_smollm():
    # config.json of HuggingFaceTB/SmolLM2-135M, in transformers 4.40, shrunk.
    values = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 18,
        "initializer_range": 0.041666666666666664, "intermediate_size": 48, "is_llama_config": True,
        "max_position_embeddings": 64, "model_type": "llama", "num_attention_heads": 9,
        "num_hidden_layers": 2, "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers.js_config": {}, "transformers_version": "4.40.1",
        "use_cache": True, "vocab_size": 100,
    }  # fmt: skip
    family, model, notes = read_model(values, "config.json")
    assert (family.model_type, notes) == ("llama", [])
    assert model == like_llama(
        d_model=18, heads=9, kv_heads=3, ffn=48, max_seq_len=64, tied=True, norm_eps=1e-5, rope_theta=1e5
    )


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2-medium": (354_823_168, {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1024, "n_head": 16,
        "n_layer": 24, "n_positions": 1024, "n_special": 0, "output_past": True,
        "predict_special_tokens": True, "resid_pdrop": 0.1, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "vocab_size": 50257, "_num_labels": 1,
    }),
    "lfm2-1.2b": (1_170_340_608, {
        "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
        "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0,
        "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False,
        "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
        "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32, "num_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0, "tie_embedding": True,
        "use_pos_enc": True, "vocab_size": 65536,
    }),
    "pythia-70m": (70_426_624, {
        "architectures": ["GPTNeoXForCausalLM"], "classifier_dropout": 0.1, "hidden_act": "gelu",
        "hidden_size": 512, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8,
        "num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "use_parallel_residual": True, "vocab_size": 50304,
    }),
    "falcon-40b": (41_303_293_952, {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
        "bias": False, "hidden_dropout": 0.0, "hidden_size": 8192, "layer_norm_epsilon": 1e-05,
        "model_type": "falcon", "multi_query": True, "new_decoder_architecture": True,
        "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": True,
        "vocab_size": 65024,
    }),
    "phi-2": (2_779_683_840, {
        "embd_pdrop": 0.0, "hidden_act": "gelu_new", "hidden_size": 2560, "intermediate_size": 10240,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "phi",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 51200,
    }),
    "command-r7b": (8_028_033_024, {
        "attention_bias": False, "cache_implementation": "hybrid", "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "layer_norm_eps": 1e-05, "layer_switch": 4,
        "logit_scale": 0.25, "max_position_embeddings": 8192, "model_type": "cohere2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
        "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
        "use_parallel_block": True, "use_parallel_embedding": True, "vocab_size": 256000,
    }),
    "qwen1.5-moe-a2.7b": (14_315_784_192, {
        "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
        "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
        "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1e6,
        "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_as_many_parameters_as_their_files(name: str):
    count, values = PUBLISHED[name]
    assert parameter_count(read_model(values, "config.json").model) == count


def test_names_of_architectures_in_the_first_files_are_read():
    for name in ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", "Ernie4_5Model"):
        given = SHAPE["ernie4_5"] | {"model_type": "ernie4_5", "architectures": [name]}
        assert read_model(given, "config.json").model == MODELS["ernie4_5"]
    with pytest.raises(ZeroError, match="architectures = 'Ernie4_5ForTokens' is not supported"):
        read_model(given | {"architectures": ["Ernie4_5ForTokens"]}, "config.json")


def test_deepseeks_own_keys_are_read():
    # config.json of DeepSeek-V3, and what differs in V2 and in Kimi K2.
    scaling = {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    }  # fmt: skip
    fp8 = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    }  # fmt: skip
    values = {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0,
        "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": fp8,
        "rms_norm_eps": 1e-6, "rope_scaling": scaling, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128,
        "vocab_size": 129280,
    }  # fmt: skip
    model = read_model(values, "config.json").model
    assert parameter_count(model) == 671_026_404_352
    assert model.attention_scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert (model.rope_attention_factor, model.rope_width, model.max_seq_len) == (1.0, 64, 163840)
    k2 = {
        "model_type": "kimi_k2",
        "rope_scaling": scaling | {"beta_fast": 1.0},
        "n_group": 1,
        "topk_group": 1,
    }
    assert read_model(values | k2, "config.json").model.router_groups == 1
    v2 = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "norm_topk_prob": False,
        "scoring_func": "softmax", "topk_method": "group_limited_greedy", "topk_group": 3,
    }  # fmt: skip
    values |= v2
    del values["num_nextn_predict_layers"]
    model = read_model(values, "config.json").model
    assert (model.router_groups, model.router_groups_per_token, model.router_group_best) == (8, 3, 1)
    with pytest.raises(ZeroError, match="quant_method = 'gptq' is not supported, only 'fp8' and 'mxfp4'"):
        read_model(values | {"quantization_config": {"quant_method": "gptq"}}, "config.json")


@pytest.mark.parametrize("family", KEYS)
def test_these_are_all_the_keys_that_are_read(family: str):
    keys = ConfigKeys(SHAPE[family], "config.json")
    FAMILIES[family].read(keys)
    known = {*SHAPE[family], *KEYS[family], *TRAINING[family], *UNUSED.get(family, ())}
    assert keys._seen - HARMLESS == known
    for name in TRAINING[family]:
        keys = ConfigKeys(SHAPE[family] | {name: 0.3}, "config.json")
        assert FAMILIES[family].read(keys) == MODELS[family]
        assert keys.notes == [f"{name} = 0.3 is not imported (see model.dropout)"]
