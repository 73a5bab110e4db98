"""What makes a small ``GPTConfig`` one of other families than GPT-2, without its sizes."""

LLAMA = {"norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": False, "tied": False, "kv_heads": 2}
GEMMA = LLAMA | {
    "mlp": "geglu", "norm_offset": 1.0, "post_norms": True, "qk_norm": True, "embedding_scale": 4.0,
    "sliding_window": 4, "sliding_window_pattern": 2, "rope_local_theta": 20.0, "query_scalar": 3.0,
    "attention_softcap": 2.0, "logit_softcap": 10.0,
}  # fmt: skip
OLMO = LLAMA | {
    "pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_joint": True, "sliding_window": 4,
    "sliding_window_layers": (1,), "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_len": 4,
    "rope_local_theta": 20.0,
}  # fmt: skip
MIXED = LLAMA | {
    "residual_scale": 0.5, "logit_divisor": 2.0, "rope_fraction": 0.5, "rope_interleaved": True,
    "rope_theta": 20.0, "no_rope_layers": (1,), "rope_query_growth": 0.3, "rope_original_len": 5,
}  # fmt: skip
PARALLEL = LLAMA | {
    "norm": "layer", "norm_biases": True, "branches": "parallel_one_norm", "mlp": "relu2", "qkv_biases": True,
    "out_bias": True, "qk_norm": True, "qk_norm_rotated": True, "rope_theta": 20.0, "head_bias": True,
}  # fmt: skip
