from dataclasses import replace
from typing import Any

import jax
import pytest
from flax import nnx
from model_shapes import PARALLEL

from zerojax.errors import ZeroError
from zerojax.models import GPT, GPTConfig, describe_parameters, flops_per_token, parameter_count

SMALL: dict[str, Any] = {"vocab_size": 37, "layers": 3, "d_model": 24, "heads": 4, "max_seq_len": 11}
LLAMA: dict[str, Any] = {"norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": False, "tied": False}

LATENT: dict[str, Any] = LLAMA | {"head_width": 8, "latent_rank": 10, "latent_rope_width": 4}
EXPERTS: dict[str, Any] = LLAMA | {"experts": 5, "experts_per_token": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 5}, "d_model = 24 does not divide into heads = 5"),
        ({"kv_heads": 3}, "heads = 4 is not a multiple of kv_heads = 3"),
        ({"layers": 0}, "layers = 0 must be at least 1"),
        ({"ffn": 0}, "ffn = 0"),
        ({"norm": "batch"}, "norm = 'batch' must be one of layer, rms"),
        ({"mlp": "tanh"}, "one of gelu, gelu_exact, relu, relu2, swiglu, geglu, swiglu_clamped"),
        ({"attention": "flash"}, "one of auto, cudnn, flash_attention_4, xla"),
        ({"dropout": 1.0}, "dropout = 1.0"),
        ({"rope_theta": 0.0}, "rope_theta = 0.0"),
        ({"heads": 8, "positions": "rope"}, "3 wide"),
        ({"head_width": 0}, "head_width = 0"),
        ({"position_offset": 2, "positions": "rope"}, 'position_offset = 2 needs positions = "learned"'),
        ({"rope_scaling": "su"}, "one of none, linear, llama3, dynamic, yarn, longrope"),
        ({"rope_scaling": "longrope"}, "rope_short_factors = .*needs 3 numbers above 0"),
        ({"rope_long_factors": (1.0,)}, 'rope_long_factors = .*"none" needs 0 numbers'),
        ({"rope_fraction": 0.5, "positions": "rope"}, "3 wide"),
        ({"rope_fraction": 1.5}, "rope_fraction = 1.5 must be at most 1"),
        ({"no_rope_layers": (3,), "positions": "rope"}, "no_rope_layers = .* from 0 to layers - 1 = 2"),
        (
            {"no_rope_layers": (1,)},
            'no_rope_layers = .* needs positions = "rope": set that, or leave no_rope',
        ),
        ({"rope_query_growth": -1.0, "positions": "rope"}, "rope_query_growth = -1.0 must be at least 0"),
        ({"sliding_window_layers": (1,)}, "sliding_window_layers = .* needs sliding_window"),
        ({"sliding_window": 4, "sliding_window_layers": (1, 1)}, "different numbers from 0"),
        ({"pre_norms": False}, "pre_norms = false needs post_norms = true"),
        ({"qk_norm_joint": True}, "qk_norm_joint = true needs qk_norm = true"),
        ({"qk_norm_rotated": True}, "qk_norm_rotated = true needs qk_norm = true"),
        (
            {"branches": "beside"},
            "branches = 'beside' must be one of sequential, parallel, parallel_one_norm",
        ),
        (
            {"branches": "parallel_one_norm", "pre_norms": False, "post_norms": True},
            'branches = "parallel_one_norm" has one norm before both branches',
        ),
        ({"head_bias": True}, "head_bias = true needs tied = false"),
        ({"norm_biases": True}, "norm_biases = true needs biases = false"),
        (LLAMA | {"norm_biases": True}, 'norm_biases = true needs norm = "layer"'),
        ({"out_bias": True}, "out_bias = true needs biases = false"),
        (EXPERTS | {"shared_gate": True}, "shared_gate = true needs shared_ffn"),
        (EXPERTS | {"shared_norms": True, "post_norms": True}, "shared_norms = true needs shared_ffn"),
        (EXPERTS | {"shared_norms": True, "shared_ffn": 4}, "shared_norms = true needs post_norms"),
        ({"residual_scale": 0.0}, "residual_scale = 0.0 must be above 0"),
        ({"post_norms": "rms"}, "post_norms = 'rms' must be true or false"),
        ({"rope_beta_slow": 33.0}, "rope_beta_slow = 33.0 must be at most rope_beta_fast = 32.0"),
        ({"rope_attention_factor": 0.0}, "rope_attention_factor = 0.0"),
        ({"rope_scaling": "dynamic", "head_width": 2}, "wider than 2"),
        ({"rope_scaling": "yarn", "rope_theta": 1.0}, "rope_theta above 1"),
        ({"rope_low_freq_factor": 4.0}, "must lie below"),
        ({"qkv_biases": True}, "qkv_biases = true needs biases = false"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"sliding_window_pattern": 2}, "sliding_window_pattern = 2 needs sliding_window"),
        ({"sliding_window": 4, "sliding_window_pattern": 1}, "sliding_window_pattern = 1"),
        (
            {"rope_local_theta": 9.0, "positions": "rope"},
            "rope_local_theta = 9.0 needs sliding_window",
        ),
        ({"norm_offset": 1.0}, 'norm_offset = 1.0 needs norm = "rms"'),
        ({"attention_softcap": 5.0, "attention": "cudnn"}, 'attention_softcap = 5.0 needs attention = "xla"'),
        (
            {"attention_softcap": 5.0, "attention": "flash_attention_4"},
            'attention_softcap = 5.0 needs attention = "xla"',
        ),
        ({"logit_softcap": 0.0}, "logit_softcap = 0.0"),
        ({"outputs": 1}, r"outputs = 1 needs tied = false \(a separate output projection\)"),
        ({"outputs": 0, "tied": False}, "outputs = 0 must be at least 1, or left out"),
        (
            EXPERTS | {"biases": True, "shared_ffn": 4},
            "shared_ffn = 4 needs biases = false",
        ),
        ({"experts": -1}, "experts = -1 must be from 0"),
        (EXPERTS | {"experts_per_token": 6}, "experts_per_token = 6 must be from 1 to experts = 5"),
        (
            EXPERTS | {"dense_layers": (0, 3)},
            "dense_layers = .* must be different numbers from 0 to layers - 1 = 2",
        ),
        (EXPERTS | {"dense_layers": (0, 1, 2)}, "no layer has experts: .*or change dense_layers"),
        ({"recurrent_step_min": -1.0}, "recurrent_step_min = -1.0 must be at least 0"),
        ({"dense_layers": (0,)}, "dense_layers = .* needs experts"),
        (EXPERTS | {"dense_ffn": 8}, "dense_ffn = 8 needs dense_layers"),
        (EXPERTS | {"router": "top"}, "router = 'top' must be one of softmax, sigmoid"),
        (EXPERTS | {"balance_loss": -0.1}, "balance_loss = -0.1 must be at least 0"),
        (EXPERTS | {"router_scale": 0.0}, "router_scale = 0.0 must be above 0"),
        (EXPERTS | {"router_groups": 2}, "router_groups: .*groups=2 do not divide experts=5"),
        ({"latent_query_rank": 4}, "latent_query_rank = 4 needs latent_rank"),
        (LATENT | {"latent_rope_width": 8}, "latent_rope_width = 8 must be from 2 to below the width .* 8"),
        (LATENT | {"latent_rope_width": 3}, "a head is 3 wide"),
        (LATENT | {"kv_heads": 2}, "latent_rank needs .*neither rope_fraction nor kv_heads"),
        (
            LATENT | {"latent_value_width": 9},
            "latent_value_width = 9 must be at most the width of queries .* 8",
        ),
        (LATENT | {"qk_norm": True}, "qk_norm = true is not supported with latent_rank"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ZeroError, match=message):
        GPTConfig(**(SMALL | settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"biases": False},
        {"tied": False, "mlp": "relu", "scan": False},
        {"tied": False, "outputs": 1},
        LLAMA,
        LLAMA | {"kv_heads": 2, "ffn": 50, "scan": False},
        {"norm": "rms", "mlp": "swiglu", "kv_heads": 1},
        {"heads": 5, "kv_heads": 1, "head_width": 6, "position_offset": 2, "mlp": "gelu_exact"},
        {"dropout": 0.1},
        LLAMA | {"qkv_biases": True, "qk_norm": True, "kv_heads": 2},
        LLAMA | {"mlp": "geglu", "norm_offset": 1.0, "post_norms": True, "qk_norm": True},
        EXPERTS,
        EXPERTS
        | {"ffn": 10, "shared_ffn": 7, "scan": False, "router": "sigmoid", "router_balance_rate": 0.1},
        EXPERTS | {"ffn": 10, "dense_layers": (0, 2), "dense_ffn": 9},
        EXPERTS | {"mlp": "swiglu_clamped", "biases": True, "attention_sinks": True, "kv_heads": 2},
        EXPERTS | {"shared_ffn": 7, "shared_gate": True, "dense_layers": (1,), "out_bias": True},
        EXPERTS | {"shared_ffn": 7, "shared_norms": True, "dense_layers": (1,), "post_norms": True},
        PARALLEL,
        PARALLEL | {"branches": "parallel", "scan": False},
        PARALLEL | {"outputs": 2},
        LATENT,
        LATENT | {"latent_query_rank": 7, "latent_value_width": 5},
        LLAMA
        | {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_joint": True, "kv_heads": 2},
    ],
)
def test_parameter_count_equals_the_models(settings):
    config = GPTConfig(**(SMALL | settings))
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    assert parameter_count(config) == sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_published_models_have_their_parameter_counts():
    gpt2 = GPTConfig(vocab_size=50257)
    assert parameter_count(gpt2) == 124_439_808
    llama2_7b = GPTConfig(vocab_size=32000, layers=32, d_model=4096, heads=32, max_seq_len=4096, **LLAMA)
    assert llama2_7b.ffn_width == 11008
    assert parameter_count(llama2_7b) == 6_738_415_616
    mixtral = GPTConfig(
        **{"vocab_size": 32000, "layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336},
        **LLAMA, experts=8, experts_per_token=2,
    )  # fmt: skip
    assert parameter_count(mixtral) == 46_702_792_704
    assert parameter_count(mixtral, active=True) == 12_879_925_248
    qwen3_30b = GPTConfig(
        **{"vocab_size": 151936, "layers": 48, "d_model": 2048, "heads": 32, "kv_heads": 4, "ffn": 768},
        **LLAMA, head_width=128, qk_norm=True, experts=128, experts_per_token=8,
    )  # fmt: skip
    assert parameter_count(qwen3_30b) == 30_532_122_624
    gpt_oss_20b = GPTConfig(
        **{"vocab_size": 201088, "layers": 24, "d_model": 2880, "heads": 64, "kv_heads": 8, "ffn": 2880},
        **LLAMA | {"biases": True, "mlp": "swiglu_clamped"}, head_width=64, attention_sinks=True,
        experts=32, experts_per_token=4,
    )  # fmt: skip
    assert parameter_count(gpt_oss_20b) == 20_914_757_184
    deepseek_v3 = GPTConfig(
        **{"vocab_size": 129280, "layers": 61, "d_model": 7168, "heads": 128, "head_width": 192, "ffn": 2048},
        **LLAMA, latent_rank=512, latent_query_rank=1536, latent_rope_width=64, latent_value_width=128,
        experts=256, experts_per_token=8, shared_ffn=2048, dense_layers=(0, 1, 2), dense_ffn=18432,
    )  # fmt: skip
    assert parameter_count(deepseek_v3) == 671_026_404_352
    assert describe_parameters(qwen3_30b) == "30,532,122,624 parameters (3,353,032,704 active)"


def test_flops_per_token_counts_what_is_multiplied():
    config = GPTConfig(**SMALL)
    qkv_and_out, mlp, head = 24 * 72 + 24 * 24, 2 * 24 * 96, 37 * 24
    scores_and_values = 12 * 3 * 24 * 10 // 2  # of earlier positions
    assert flops_per_token(config, 10) == 6 * (3 * (qkv_and_out + mlp) + head) + scores_and_values
    short = GPTConfig(**SMALL, sliding_window=4)
    skipped = 10 / 2 - (4 - 4**2 / 20)
    assert flops_per_token(config, 10) - flops_per_token(short, 10) == round(12 * 3 * 24 * skipped)
    assert flops_per_token(config, 3) == flops_per_token(short, 3)
    pattern = GPTConfig(**SMALL, sliding_window=4, sliding_window_pattern=3)
    assert pattern.windowed == (True, True, False)
    assert flops_per_token(config, 10) - flops_per_token(pattern, 10) == round(12 * 2 * 24 * skipped)
    by_number = GPTConfig(**SMALL, sliding_window=4, sliding_window_layers=(0, 1))
    assert by_number.windowed == pattern.windowed
    assert flops_per_token(by_number, 10) == flops_per_token(pattern, 10)
    of_experts = GPTConfig(**SMALL, **EXPERTS, ffn=10, shared_ffn=7)
    dense = GPTConfig(**SMALL, **LLAMA, ffn=2 * 10 + 7)
    gated = replace(of_experts, shared_gate=True)
    assert flops_per_token(gated, 10) - flops_per_token(of_experts, 10) == 6 * 3 * 24
    beside = GPTConfig(**SMALL, branches="parallel_one_norm")
    assert flops_per_token(beside, 10) == flops_per_token(config, 10)
    router = 3 * 24 * 5
    assert flops_per_token(of_experts, 10) - flops_per_token(dense, 10) == 6 * router
    assert parameter_count(of_experts, active=True) - parameter_count(dense) == router
    mixed = GPTConfig(**SMALL, **EXPERTS, ffn=10, dense_layers=(1,), dense_ffn=27)
    whole = GPTConfig(**SMALL, **EXPERTS, ffn=10)
    assert flops_per_token(mixed, 10) - flops_per_token(whole, 10) == 6 * 24 * (3 * (27 - 2 * 10) - 5)
    latent = GPTConfig(**SMALL, **LATENT, latent_query_rank=7, latent_value_width=5, ffn=9)
    queries, keys_and_values, out = 24 * 7 + 7 * 4 * 8, 24 * 14 + 10 * 4 * (4 + 5), 4 * 5 * 24
    matrices = 3 * (queries + keys_and_values + out + 3 * 24 * 9) + head
    assert flops_per_token(latent, 10) == 6 * matrices + 6 * 3 * 4 * (8 + 5) * 5
    with pytest.raises(ZeroError, match="seq_len = 12"):
        flops_per_token(config, 12)
