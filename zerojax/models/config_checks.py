"""Checks of a ``GPTConfig``: values out of range, and combinations without a meaning."""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Literal, get_args, get_origin

from zerojax.errors import ConfigurationError, errors_at
from zerojax.validation.bounds import check_scalars

if TYPE_CHECKING:
    from zerojax.models.config import GPTConfig

_COUNTS = (
    *("vocab_size", "layers", "d_model", "heads", "max_seq_len", "rope_original_len", "loss_chunk"),
    *("token_tile", "recurrent_width", "recurrent_key_width", "conv_width"),
)
_OPTIONAL_COUNTS = (
    *("kv_heads", "head_width", "ffn", "dense_ffn", "outputs", "sliding_window"),
    *("full_kv_heads", "full_head_width", "kv_shared_ffn", "recurrent_heads", "recurrent_key_heads"),
    *("latent_rank", "latent_query_rank", "latent_rope_width", "latent_value_width"),
)
_POSITIVE = (
    *("rope_theta", "rope_local_theta", "rope_factor", "rope_low_freq_factor", "rope_beta_slow"),
    *("rope_attention_factor", "rope_fraction", "embedding_scale", "query_scalar", "attention_softcap"),
    *("logit_softcap", "logit_divisor", "norm_eps", "init_std", "residual_scale", "recurrent_norm_eps"),
)
_WINDOWED = (
    *("sliding_window_pattern", "sliding_window_layers", "rope_local_theta"),
    *("full_head_width", "full_kv_heads"),
)
_ROTARY = 'positions = "rope"', lambda c: c.positions == "rope"
_NORMED = "qk_norm = true", lambda c: c.qk_norm
_LATENT = "latent_rank", lambda c: c.latent_rank is not None
_UNTIED = "tied = false (a separate output projection)", lambda c: not c.tied
_ONE_KIND = (
    "attention and an MLP in all layers (no recurrent_layers, no mlp_layers)",
    lambda c: not c.recurrent_layers and c.mlp_layers is None,
)
_BIASES = "biases = false (otherwise all layers have biases)", lambda c: not c.biases
_NEEDS: tuple[tuple[str, tuple[str, "Callable[[GPTConfig], object]"]], ...] = (
    ("position_offset", ('positions = "learned"', lambda c: c.positions == "learned")),
    *((name, _LATENT) for name in ("latent_query_rank", "latent_rope_width", "latent_value_width")),
    *((name, _ROTARY) for name in ("no_rope_layers", "rope_query_growth", "rope_local_theta")),
    *((name, _NORMED) for name in ("qk_norm_joint", "qk_norm_rotated")),
    *((name, _UNTIED) for name in ("outputs", "head_bias")),
    *((name, _BIASES) for name in ("qkv_biases", "out_bias", "norm_biases")),
    *((name, ("sliding_window", lambda c: c.sliding_window is not None)) for name in _WINDOWED),
    ("sliding_window_layers", ("no sliding_window_pattern", lambda c: c.sliding_window_pattern is None)),
    ("norm_biases", ('norm = "layer"', lambda c: c.norm == "layer")),
    ("norm_offset", ('norm = "rms"', lambda c: c.norm == "rms")),
    ("pre_norms", ("post_norms = true (each branch needs a norm)", lambda c: c.post_norms)),
    ("attention_softcap", ('attention = "xla" or "auto"', lambda c: c.attention in ("auto", "xla"))),
    ("dense_layers", ("experts (it lists the layers without them)", lambda c: c.experts != 0)),
    ("dense_ffn", ("dense_layers", lambda c: len(c.dense_layers) > 0)),
    ("shared_gate", ("shared_ffn", lambda c: c.shared_ffn > 0 or not c.experts)),
    ("expert_latent", ("shared_norms = false", lambda c: not c.shared_norms)),
    ("shared_norms", ("shared_ffn", lambda c: c.shared_ffn > 0 or not c.experts)),
    ("shared_norms", ("post_norms = true", lambda c: c.post_norms)),
    ("shared_norms", ('norm = "rms"', lambda c: c.norm == "rms")),
    ("shared_norms", ('branches = "sequential"', lambda c: c.branches == "sequential")),
    ("shared_ffn", ("biases = false", lambda c: not (c.biases and c.experts))),
    ("kv_shared_ffn", ("kv_shared_layers", lambda c: c.kv_shared_layers > 0)),
    *((name, _ONE_KIND) for name in ("kv_shared_layers", "layer_inputs")),
    ("kv_shared_layers", ("no latent_rank", lambda c: c.latent_rank is None)),
    ("kv_shared_ffn", ("experts = 0", lambda c: not c.experts)),
    ("layer_inputs", ("a gated mlp (geglu or swiglu)", lambda c: c.gated)),
    ("layer_inputs", ('norm = "rms"', lambda c: c.norm == "rms")),
)
"""Field, and the setting that it needs if it differs from its default: as text, and as a condition."""
_MAX_LAYERS = 10_000
_MAX_EXPERTS = 10_000
_MAX_PARAMETERS = 10**15
_MAX_UNSCANNED = 1_000  # each is a module, built and compiled separately


def require(condition: bool, message: str) -> None:
    """Raise a ``ConfigurationError`` about [model] unless the condition holds."""
    if not condition:
        raise ConfigurationError(f"[model] {message}")


def check_model(config: "GPTConfig") -> None:
    """Refuse an invalid config, or one with settings that contradict each other."""
    check_scalars(config, "[model] {}".format)
    _check_values(config)
    _check_needs(config)
    _check_widths(config)
    _check_latents(config)
    _check_rope(config)
    _check_features(config)
    _check_recurrent(config)
    if config.experts != 0:
        _check_experts(config)
    _check_size(config)


def _check_size(c: "GPTConfig") -> None:
    """Refuse a size beyond all hardware, by the largest matrices."""
    widths = c.qkv_width + c.conv_channels + 3 * max(c.experts, 1) * c.ffn_width
    count = c.d_model * (c.vocab_size + c.layers * widths)
    require(
        count <= _MAX_PARAMETERS,
        f"the model has about {count:.1g} parameters, and at most {_MAX_PARAMETERS:.0e} are supported",
    )


def _check_values(c: "GPTConfig") -> None:
    for name in _COUNTS:
        require(getattr(c, name) >= 1, f"{name} = {getattr(c, name)} must be at least 1")
    for name in _OPTIONAL_COUNTS:
        value = getattr(c, name)
        require(value is None or value >= 1, f"{name} = {value} must be at least 1, or left out")
    for name in _POSITIVE:
        value = getattr(c, name)
        require(value is None or value > 0, f"{name} = {value} must be above 0")
    for field in fields(c):
        if get_origin(field.type) is Literal:
            choices, value = get_args(field.type), getattr(c, field.name)
            require(value in choices, f"{field.name} = {value!r} must be one of {', '.join(choices)}")
    require(0 <= c.dropout < 1, f"dropout = {c.dropout} must be at least 0 and below 1")
    most = _MAX_LAYERS if c.scan else _MAX_UNSCANNED
    require(c.layers <= most, f"layers = {c.layers} must be at most {most:,}{' without scan' * (not c.scan)}")


def _check_needs(c: "GPTConfig") -> None:
    defaults = {field.name: field.default for field in fields(c)}
    for name, (needed, holds) in _NEEDS:
        if (value := getattr(c, name)) != defaults[name]:
            message = f"{name} = {json.dumps(value)} needs {needed}: set that, or leave {name} out"
            require(bool(holds(c)), message)


def _check_widths(c: "GPTConfig") -> None:
    require(
        c.head_width is not None or c.d_model % c.heads == 0,
        f"d_model = {c.d_model} does not divide into heads = {c.heads}",
    )
    require(
        c.heads % c.key_value_heads == 0, f"heads = {c.heads} is not a multiple of kv_heads = {c.kv_heads}"
    )


def _check_latents(c: "GPTConfig") -> None:
    if c.latent_rank is None:
        return
    require(
        c.latent_rope_width is not None and c.latent_rope_width < c.head_dim,
        f"latent_rope_width = {c.latent_rope_width} must be from 2 to below the width of a head, "
        f"{c.head_dim}",
    )
    require(
        c.positions == "rope" and c.rope_fraction == 1 and c.key_value_heads == c.heads,
        'latent_rank needs positions = "rope", and neither rope_fraction nor kv_heads. Every head makes its '
        "keys from the latent, and latent_rope_width sets how much of a key is rotated",
    )
    require(
        c.value_dim <= c.head_dim,
        f"latent_value_width = {c.latent_value_width} must be at most the width of queries and keys, "
        f"{c.head_dim}",
    )
    of_heads = ("qk_norm", "value_norm", "keys_as_values", "attention_sinks")
    for name in ("biases", "qkv_biases", "out_bias", *of_heads):
        require(not getattr(c, name), f"{name} = true is not supported with latent_rank: leave it out")


def _check_rope(c: "GPTConfig") -> None:
    for name in ("position_offset", "rope_query_growth", "recurrent_step_min"):
        require(getattr(c, name) >= 0, f"{name} = {getattr(c, name)} must be at least 0")
    require(
        c.rope_low_freq_factor < c.rope_high_freq_factor,
        f"rope_low_freq_factor = {c.rope_low_freq_factor} must lie below rope_high_freq_factor = "
        f"{c.rope_high_freq_factor}",
    )
    require(
        c.rope_beta_slow <= c.rope_beta_fast,
        f"rope_beta_slow = {c.rope_beta_slow} must be at most rope_beta_fast = {c.rope_beta_fast}",
    )
    require(c.rope_fraction <= 1, f"rope_fraction = {c.rope_fraction} must be at most 1")
    require(
        c.positions != "rope" or (c.rope_width > 0 and c.rope_width % 2 == 0),
        f'positions = "rope" rotates pairs, but a head is {c.rope_width} wide '
        "(latent_rope_width; or head_width, or d_model / heads, times rope_fraction): make it even",
    )
    require(
        c.rope_scaling != "dynamic" or c.rope_width > 2,
        'rope_scaling = "dynamic" needs heads wider than 2 (head_width, or d_model / heads)',
    )
    for name in ("rope_short_factors", "rope_long_factors"):
        factors = getattr(c, name)
        wanted = c.rope_width // 2 if c.rope_scaling == "longrope" else 0
        require(
            len(factors) == wanted and all(factor > 0 for factor in factors),
            f'{name} = {factors}: rope_scaling = "{c.rope_scaling}" needs {wanted} numbers above 0',
        )
    require(
        c.rope_scaling != "longrope" or c.rope_original_len > 1,
        f'rope_original_len = {c.rope_original_len} must be above 1 with rope_scaling = "longrope"',
    )
    _check_layers(c, "no_rope_layers")
    require(
        not (c.windows_differ and c.no_rope_layers),
        "no_rope_layers is not supported with kv_shared_layers, or with full_head_width, full_kv_heads or "
        "keys_as_values in layers without the window: leave it out",
    )
    require(
        c.rope_scaling != "yarn" or c.rope_theta > 1,
        f'rope_scaling = "yarn" needs rope_theta above 1, not {c.rope_theta}',
    )


def _check_layers(c: "GPTConfig", name: str) -> None:
    """Refuse repeated layer numbers, and numbers of layers that do not exist."""
    numbers = getattr(c, name)
    require(
        len(set(numbers)) == len(numbers) and all(0 <= number < c.layers for number in numbers),
        f"{name} = {numbers} must be different numbers from 0 to layers - 1 = {c.layers - 1}",
    )


def _check_features(c: "GPTConfig") -> None:
    require(
        c.branches != "parallel_one_norm" or c.pre_norms,
        'branches = "parallel_one_norm" has one norm before both branches: set pre_norms = true',
    )
    if c.mlp_layers is not None:
        _check_one_branch(c, c.mlp_layers)
    for name in ("layer_inputs", "kv_shared_layers"):
        require(getattr(c, name) >= 0, f"{name} = {getattr(c, name)} must be at least 0")
    first = c.layers - c.kv_shared_layers
    require(first >= 0, f"kv_shared_layers = {c.kv_shared_layers} must be below layers = {c.layers}")
    windows = set(c.windowed)
    require(
        c.shares_keys or windows == set(c.windowed[:first]),
        f"kv_shared_layers = {c.kv_shared_layers}: no earlier layer has the window of some of these layers. "
        "Lower it",
    )
    pattern, layers = c.sliding_window_pattern, c.sliding_window_layers
    require(
        pattern is None or pattern >= 2, f"sliding_window_pattern = {pattern} must be at least 2, or left out"
    )
    if layers is not None:
        _check_layers(c, "sliding_window_layers")
        require(len(layers) > 0, "sliding_window_layers = []: name a layer, or leave it out")


def _check_one_branch(c: "GPTConfig", with_mlp: tuple[int, ...]) -> None:
    _check_layers(c, "mlp_layers")
    require(c.branches == "sequential", f"branches = {c.branches!r} needs two branches: leave mlp_layers out")
    for name, needed in (("recurrent_layers", False), ("dense_layers", True)):
        wrong = [number for number in getattr(c, name) if (number in with_mlp) != needed]
        require(
            not wrong,
            f"{name} and mlp_layers {'lack' if needed else 'share'} layer {wrong[:1]}: each layer has one "
            "branch, and mlp_layers lists all layers with an MLP",
        )


def _check_recurrent(c: "GPTConfig") -> None:
    _check_layers(c, "recurrent_layers")
    keys = c.recurrent_key_heads or c.value_heads
    require(
        not c.recurrent_layers or c.recurrent == "short_conv" or c.value_heads % keys == 0,
        f"recurrent_heads = {c.value_heads} is not a multiple of recurrent_key_heads = {keys}",
    )
    require(
        not c.recurrent_layers or c.recurrent != "kimi_delta" or keys == c.value_heads,
        f'recurrent_key_heads = {keys} is not supported with recurrent = "kimi_delta": leave it out',
    )
    require(
        not c.recurrent_layers or not c.biases,
        "recurrent_layers have no biases: set biases to false, or leave them out",
    )
    require(
        not c.attention_gate or c.latent_rank is None,
        "attention_gate = true is not supported with latent_rank: leave one of them out",
    )


def _check_experts(c: "GPTConfig") -> None:
    require(
        1 <= c.experts <= _MAX_EXPERTS, f"experts = {c.experts} must be from 0 (none) to {_MAX_EXPERTS:,}"
    )
    require(
        1 <= c.experts_per_token <= c.experts,
        f"experts_per_token = {c.experts_per_token} must be from 1 to experts = {c.experts}",
    )
    for name in ("shared_ffn", "expert_latent", "router_balance_rate", "balance_loss", "z_loss"):
        require(getattr(c, name) >= 0, f"{name} = {getattr(c, name)} must be at least 0")
    _check_layers(c, "dense_layers")
    require(
        len(c.expert_layers) > 0,
        "no layer has experts: set experts = 0 and ffn, or change dense_layers or mlp_layers",
    )
    require(c.router_scale > 0, f"router_scale = {c.router_scale} must be above 0")
    with errors_at("[model] router_groups"):
        c.router_config.check(c.experts, c.experts_per_token)
