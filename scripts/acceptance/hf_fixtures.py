"""Write tests/fixtures/huggingface: tiny models by transformers, adapters by PEFT, tokens, and their logits.

Needs PyTorch, transformers and PEFT, which zerojax does not depend on; any Python that has them works:

    python3.11 -m venv hf && hf/bin/pip install torch transformers safetensors peft
    hf/bin/python scripts/acceptance/hf_fixtures.py tests/fixtures/huggingface
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

VOCABULARY = 80
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = COMMON | {
    "max_position_embeddings": 64,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

# name -> (config, dtype, largest file): every family, and everything that an importer can get wrong.
MODELS: dict[str, tuple[Any, torch.dtype, str]] = {
    "gpt2": (
        transformers.GPT2Config(**COMMON, n_positions=32, n_embd=16, n_layer=2, n_head=2, n_inner=40),
        torch.float32,
        "1GB",
    ),
    "opt": (
        transformers.OPTConfig(
            **COMMON,
            max_position_embeddings=32,
            hidden_size=24,
            word_embed_proj_dim=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=48,
            pad_token_id=1,
        ),
        torch.float16,
        "1GB",
    ),
    "llama2": (
        transformers.LlamaConfig(**LLAMA, rms_norm_eps=1e-6),
        torch.float32,
        "8KB",
    ),
    "llama3": (
        transformers.LlamaConfig(
            **LLAMA,
            head_dim=8,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_theta": 500000.0, **LLAMA3_ROPE},
            tie_word_embeddings=True,
        ),
        torch.bfloat16,
        "1GB",
    ),
}

SEVEN = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
# folder of a model -> settings of an adapter for it: all of PEFT's that zerojax imports.
ADAPTERS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "r": 3,
        "lora_alpha": 5,
        "lora_dropout": 0.1,
        "target_modules": ["c_attn", "mlp.c_proj"],
        "fan_in_fan_out": True,
    },
    "llama2": {
        "r": 2,
        "lora_alpha": 3,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
    },
    "llama3": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": SEVEN,
        "rank_pattern": {"v_proj": 2, r"layers\.1\.mlp\.up_proj": 3},
        "alpha_pattern": {"down_proj": 6, "0.self_attn.k_proj": 5},
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "opt": {"r": 2, "lora_alpha": 3, "target_modules": ["k_proj", "fc1"], "bias": "all"},
    "families/mistral": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["o_proj", "embed_tokens", "lm_head"],
        "modules_to_save": ["model.norm", "1.mlp.gate_proj"],
    },
    "families/qwen3-5": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": [*SEVEN, *(f"in_proj_{name}" for name in ("qkv", "z", "b", "a")), "out_proj"],
    },
    "families/gemma3-images": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": r"model\.language_model\..*\.(q_proj|o_proj|up_proj)",
    },
    "families/kimi-linear": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": [f"{name}_proj" for name in ("q", "o", "b", "f_a", "f_b", "g_a", "g_b", "up")],
    },
    "families/nemotron-3": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": [
            "in_proj",
            "q_proj",
            "o_proj",
            "shared_experts.up_proj",
            "mixer.down_proj",
            "fc1_latent_proj",
        ],
        "target_parameters": ["mixer.experts.up_proj", "mixer.experts.down_proj"],
    },
    "families/gemma4": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
    },
    "families/gemma4-e2b": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": [
            "q_proj",
            "k_proj",
            "v_proj",
            "per_layer_input_gate",
            "per_layer_projection",
            "up_proj",
        ],
    },
    "families/gemma4-moe": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["v_proj", "gate_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
    "families/bamba": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["in_proj", "out_proj", "q_proj", "v_proj", "gate_proj"],
    },
    "families/olmo-hybrid": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_proj"],
    },
    "families/qwen3-next": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["q_proj", "v_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"],
    },
    "families/mixtral": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "families/gpt-oss": {
        "r": 2,
        "lora_alpha": 3,
        "rank_pattern": {"gate_up_proj": 3},
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj"],
    },
    "families/phi3": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    },
    "families/gpt-neox": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["query_key_value", "dense_4h_to_h"],
    },
    "families/granitemoe": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["o_proj"],
        "target_parameters": ["block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"],
    },
    "families/qwen2": {"r": 4, "lora_alpha": 8, "target_modules": SEVEN, "bias": "lora_only"},
}


TINY = LLAMA | {"intermediate_size": 24}
DEEPSEEK = TINY | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "pad_token_id": 0,
}
DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
FALCON = COMMON | {
    "max_position_embeddings": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
}
LINEAR = {
    "head_dim": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rms_norm_eps": 1e-4,  # with less, the norm of small values makes much of their rounding
    "layer_types": ["linear_attention", "full_attention"],
}
SHARED_MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6}
NEMOTRON = {name: value for name, value in TINY.items() if name != "num_hidden_layers"} | {
    **{"head_dim": 8, "pad_token_id": 0, "layer_norm_epsilon": 1e-4, "time_step_min": 0.6},
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "conv_kernel": 3},
}
GRANITE = {
    "attention_multiplier": 0.22,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
}
THREE = TINY | {"num_hidden_layers": 3}
MIDDLE = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
HALF_ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
IMAGES = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 16,
    "num_position_embeddings": 4,
}
SMALL_TOWER = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
GEMMA4 = {
    "head_dim": 4,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 6,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 100.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
SECTIONS = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
# name -> config: one of each family and feature, without a tokenizer, in bfloat16.
FAMILIES: dict[str, Any] = {
    "gemma": transformers.GemmaConfig(**TINY, head_dim=8),
    "gemma2": transformers.Gemma2Config(
        **TINY,
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **TINY | {"num_hidden_layers": 4},
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gemma4": transformers.Gemma4TextConfig(
        **TINY | GEMMA4 | {"num_hidden_layers": 4},
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=5.0,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma4-moe": transformers.Gemma4TextConfig(
        **TINY | GEMMA4,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=12,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma4-e2b": transformers.Gemma4TextConfig(
        **TINY | GEMMA4 | {"num_hidden_layers": 7, "hidden_size_per_layer_input": 4, "rms_norm_eps": 0.1},
        vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        final_logit_softcapping=1.0,
        layer_types=[
            f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", *["sliding"] * 2, "full")
        ],
    ),
    "mistral": transformers.MistralConfig(**TINY, sliding_window=6),
    "qwen2": transformers.Qwen2Config(**TINY, max_window_layers=2, tie_word_embeddings=True),
    "qwen2-window": transformers.Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=6, max_window_layers=0
    ),
    "llama-dynamic": transformers.LlamaConfig(
        **TINY | {"max_position_embeddings": 8},
        head_dim=8,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama-yarn": transformers.LlamaConfig(
        **TINY,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
        },
    ),
    "phi3": transformers.Phi3Config(**TINY, pad_token_id=0, sliding_window=6),
    # 20 tokens are more than the original context, so the long factors are used.
    "phi3-longrope": transformers.Phi3Config(
        **TINY | {"num_attention_heads": 2, "num_key_value_heads": 1},
        pad_token_id=0,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.25, 1.5],
            "long_factor": [1.5, 3.0, 8.0],
        },
    ),
    "phi3-shortrope": transformers.Phi3Config(
        **TINY,
        pad_token_id=0,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0, 1.5],
            "long_factor": [1.5, 8.0],
        },
    ),
    "qwen2-last-window": transformers.Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "smollm3": transformers.SmolLM3Config(
        **TINY | {"num_hidden_layers": 3},
        pad_token_id=0,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=6,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    ),
    "olmo2": transformers.Olmo2Config(**TINY, pad_token_id=0, rms_norm_eps=1e-5),
    "olmo3": transformers.Olmo3Config(
        **TINY,
        pad_token_id=0,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "granite": transformers.GraniteConfig(
        **TINY,
        **GRANITE,
        tie_word_embeddings=True,
    ),
    "starcoder2": transformers.Starcoder2Config(**TINY, sliding_window=6),
    "glm": transformers.GlmConfig(**TINY, head_dim=8, pad_token_id=0),
    "glm4": transformers.Glm4Config(**TINY, head_dim=8, pad_token_id=0, attention_bias=False),
    "ministral3": transformers.Ministral3Config(
        **TINY,
        head_dim=8,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "mixtral": transformers.MixtralConfig(
        **TINY, head_dim=8, num_local_experts=3, num_experts_per_tok=2, sliding_window=6
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **TINY,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    ),
    "qwen3-moe-dense": transformers.Qwen3MoeConfig(
        **TINY | {"num_hidden_layers": 3},
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        mlp_only_layers=[0],
    ),
    "olmoe": transformers.OlmoeConfig(
        **TINY | {"num_key_value_heads": 4}, pad_token_id=0, num_experts=6, num_experts_per_tok=3
    ),
    "glm4-moe": transformers.Glm4MoeConfig(
        **TINY | {"num_hidden_layers": 3},
        head_dim=8,
        pad_token_id=0,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=2,
        moe_intermediate_size=12,
        routed_scaling_factor=1.5,
        attention_bias=True,
        use_qk_norm=True,
    ),
    "glm4-moe-lite": transformers.Glm4MoeLiteConfig(
        **{key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"},
        q_lora_rank=10,
        n_routed_experts=6,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    ),
    "deepseek-v3": transformers.DeepseekV3Config(
        **DEEPSEEK,
        rms_norm_eps=1e-5,
        q_lora_rank=10,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_parameters=DEEPSEEK_ROPE | {"mscale": 0.9, "mscale_all_dim": 0.7},
    ),
    "deepseek-v2": transformers.DeepseekV2Config(
        **DEEPSEEK,
        q_lora_rank=10,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=2.0,
        rope_parameters=DEEPSEEK_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek-v2-lite": transformers.DeepseekV2Config(
        **DEEPSEEK,
        q_lora_rank=None,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    ),
    "gpt-oss": transformers.GptOssConfig(
        **TINY | {"intermediate_size": 16},
        head_dim=16,
        pad_token_id=0,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=6,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "truncate": False,
        },
    ),
    "qwen3": transformers.Qwen3Config(**TINY, max_window_layers=2, head_dim=8, tie_word_embeddings=True),
    "llama-attention-biases": transformers.LlamaConfig(**TINY, attention_bias=True),
    "seed-oss": transformers.SeedOssConfig(
        **TINY, head_dim=8, pad_token_id=0, attention_dropout=0.0, residual_dropout=0.0
    ),
    "cwm": transformers.CwmConfig(
        **TINY | {"num_hidden_layers": 3},
        head_dim=8,
        sliding_window=6,
        rope_parameters={"rope_theta": 100.0, **LLAMA3_ROPE},
    ),
    "arcee": transformers.ArceeConfig(**TINY, attention_bias=True, mlp_bias=True),
    "helium": transformers.HeliumConfig(**TINY, head_dim=4, pad_token_id=0),
    "ernie4-5": transformers.Ernie4_5Config(**TINY, head_dim=8, use_bias=True),
    "hunyuan": transformers.HunYuanDenseV1Config(
        **TINY,
        head_dim=8,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 9.0, "factor": 1.0},
    ),
    "exaone4": transformers.Exaone4Config(
        **TINY | {"num_hidden_layers": 3}, sliding_window=6, sliding_window_pattern=2
    ),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **TINY | {"num_hidden_layers": 3},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        mlp_only_layers=[0],
    ),
    "granitemoe": transformers.GraniteMoeConfig(
        **TINY,
        num_local_experts=3,
        num_experts_per_tok=2,
        attention_bias=True,
        **GRANITE,
    ),
    "gpt-neox": transformers.GPTNeoXConfig(
        **{key: value for key, value in TINY.items() if key != "num_key_value_heads"},
        classifier_dropout=0.0,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    ),
    "falcon": transformers.FalconConfig(**FALCON),
    "falcon-groups": transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-sequential": transformers.FalconConfig(
        **FALCON, multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=False
    ),
    "phi": transformers.PhiConfig(**TINY | {"num_key_value_heads": 4}, rope_parameters=HALF_ROPE),
    "stablelm": transformers.StableLmConfig(**TINY, rope_parameters=HALF_ROPE),
    "stablelm-parallel": transformers.StableLmConfig(
        **TINY, use_parallel_residual=True, use_qkv_bias=True, rope_parameters=HALF_ROPE
    ),
    "cohere": transformers.CohereConfig(**TINY, pad_token_id=0, attention_bias=True),
    "cohere2": transformers.Cohere2Config(
        **TINY | {"num_hidden_layers": 3},
        pad_token_id=0,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        logit_scale=0.3,
    ),
    "qwen3-next": transformers.Qwen3NextConfig(**TINY | LINEAR | SHARED_MIXTURE, mlp_only_layers=[1]),
    "lfm2": transformers.Lfm2Config(
        **TINY | {"num_hidden_layers": 3},
        full_attn_idxs=[1],
        block_auto_adjust_ff_dim=False,
        pad_token_id=None,
    ),
    "minimax-m2": transformers.MiniMaxM2Config(
        **TINY,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=HALF_ROPE,
    ),
    "olmo-hybrid": transformers.OlmoHybridConfig(
        **TINY,
        layer_types=["linear_attention", "full_attention"],
        pad_token_id=0,
        linear_key_head_dim=8,  # transformers splits the convolutions into equal parts
        linear_value_head_dim=8,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    ),
    "lfm2-moe": transformers.Lfm2MoeConfig(
        **THREE,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        moe_intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
    ),
    "kimi-linear": transformers.KimiLinearConfig(
        **{name: value for name, value in DEEPSEEK.items() if name != "first_k_dense_replace"},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_head_dim=8,
        linear_num_heads=3,
        linear_conv_kernel_dim=3,
        routed_scaling_factor=1.0,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "nemotron-h": transformers.NemotronHConfig(
        **NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"]
    ),
    "nemotron-3": transformers.NemotronHConfig(
        **NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe", "mlp"],
        n_routed_experts=4,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=20,
        routed_scaling_factor=1.5,
        moe_latent_size=8,
    ),
    "bamba": transformers.BambaConfig(**TINY, **MAMBA, attn_layer_indices=[1]),
    "granitemoehybrid": transformers.GraniteMoeHybridConfig(
        **THREE, **MAMBA, **GRANITE, **MIDDLE, num_local_experts=3, shared_intermediate_size=20
    ),
    "granitemoehybrid-dense": transformers.GraniteMoeHybridConfig(
        **TINY,
        **MAMBA,
        **GRANITE,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=0,
        position_embedding_type="rope",
    ),
    "qwen3-5": transformers.Qwen3_5TextConfig(**TINY | LINEAR),
    "qwen3-5-images": transformers.Qwen3_5Config(
        text_config=TINY | LINEAR, vision_config=IMAGES, tie_word_embeddings=True
    ),
    "qwen3-vl-images": transformers.Qwen3VLConfig(
        text_config=TINY | {"head_dim": 8, "rope_parameters": SECTIONS},
        vision_config=IMAGES | {"deepstack_visual_indexes": [0]},
    ),
    "gemma3-images": transformers.Gemma3Config(
        text_config=TINY
        | {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=SMALL_TOWER | {"vision_use_head": False},
        mm_tokens_per_image=4,
    ),
    "gemma4-images": transformers.Gemma4Config(
        text_config=TINY | GEMMA4 | {"layer_types": ["sliding_attention", "full_attention"]},
        vision_config={
            **{name: value for name, value in SMALL_TOWER.items() if name != "image_size"},
            **{"num_key_value_heads": 2, "head_dim": 4, "position_embedding_size": 4},
        },
        audio_config=None,
    ),
    "mistral3-images": transformers.Mistral3Config(
        text_config=TINY | {"model_type": "mistral", "head_dim": 8},
        vision_config=SMALL_TOWER | {"model_type": "pixtral", "head_dim": 4},
        tie_word_embeddings=False,
    ),
    "qwen3-5-moe": transformers.Qwen3_5MoeTextConfig(
        **{key: value for key, value in TINY.items() if key != "intermediate_size"} | LINEAR | SHARED_MIXTURE
    ),
}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE over lower-case text, with an end-of-text token."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>", "<pad>"], show_progress=False
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog.\n all work and no play"], trainer
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>", pad_token="<pad>"
    )


def auto_class(config: Any) -> Any:
    """The class of a language model, or of a model with images."""
    images = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM


def make_model(config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """A model whose weights are all random, including biases and norms."""
    torch.manual_seed(0)
    model = auto_class(config).from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Short convolutions as well: small queries and keys would lose digits when they are normed.
            is_norm = "norm" in name.lower() or ".ln_" in name or "conv" in name
            # Gemma's norms multiply by 1 + weight, and so do Qwen3.5's but those of linear attention.
            kind = config.model_type
            centred = kind.startswith(("gemma", "qwen3_next", "qwen3_5")) and not kind.startswith("gemma4")
            around = float(is_norm and not (centred and "linear_attn" not in name))
            parameter.copy_(around * name.endswith("weight") + 0.2 * torch.randn_like(parameter))
    model = model.to(dtype).eval()
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):  # which files have in fp32
            buffer.data = 0.2 * torch.randn(buffer.shape)
        if name.endswith("layer_scalar"):
            buffer.data = (1 + 0.2 * torch.randn(buffer.shape)).to(dtype)
    return model


@torch.no_grad()
def logits_of(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """The logits of a saved model in fp32, with attention as its code spells it out."""
    # Read again: a model cast back to fp32 would keep its rotary frequencies rounded.
    config = transformers.AutoConfig.from_pretrained(folder)
    model = auto_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model(torch.from_numpy(tokens).long()).logits.numpy()


def write_families(folder: Path, names: list[str]) -> None:
    """Write the models of FAMILIES; expected.npz has tokens and their logits."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 20), dtype=np.int32)
    for name in names:
        config = FAMILIES[name]
        shutil.rmtree(folder / name, ignore_errors=True)
        make_model(config, torch.bfloat16).save_pretrained(folder / name)
        (folder / name / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(
            folder / name / "expected.npz", tokens=tokens, logits=logits_of(folder / name, tokens)
        )


def write(folder: Path, models: dict[str, tuple[Any, torch.dtype, str]]) -> None:
    """Write models; beside the files of each, expected.npz has tokens and their logits."""
    tokenizer = make_tokenizer()
    assert len(tokenizer) <= VOCABULARY
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (1, 20), dtype=np.int32)
    for name, (config, dtype, largest) in models.items():
        shutil.rmtree(folder / name, ignore_errors=True)
        make_model(config, dtype).save_pretrained(folder / name, max_shard_size=largest)
        tokenizer.save_pretrained(folder / name)
        np.savez_compressed(
            folder / name / "expected.npz", tokens=tokens, logits=logits_of(folder / name, tokens)
        )


def write_adapters(folder: Path, models: Path, names: list[str] | None) -> None:
    """Write adapters of random A and B; beside the files of each, expected.npz has the logits with it."""
    import peft  # needed here alone

    for name, settings in ADAPTERS.items():
        if names and Path(name).name not in names:
            continue
        out = folder / Path(name).name
        shutil.rmtree(out, ignore_errors=True)
        config = transformers.AutoConfig.from_pretrained(models / name)
        base = auto_class(config).from_pretrained(models / name, dtype=torch.float32)
        base.name_or_path = name  # not a path of this machine
        torch.manual_seed(1)
        model = peft.get_peft_model(base, peft.LoraConfig(**settings, task_type="CAUSAL_LM")).eval()
        tokens = np.load(models / name / "expected.npz")["tokens"]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.3 * torch.randn_like(parameter))
            logits = model(torch.from_numpy(tokens).long()).logits.numpy()
        model.save_pretrained(out)
        (out / "README.md").unlink()
        np.savez_compressed(out / "expected.npz", logits=logits)


def main() -> None:
    """Write every model and adapter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, help="write these and their adapters alone"
    )
    options = parser.parse_args()
    folder = options.folder
    write_families(folder / "families", options.families or list(FAMILIES))
    if options.families is None:
        write(folder, MODELS)
    write_adapters(folder / "adapters", folder, options.families)


if __name__ == "__main__":
    main()
