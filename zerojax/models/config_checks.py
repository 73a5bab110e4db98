"""Checks of a ``GPTConfig``: values out of range, and combinations without a meaning."""

from dataclasses import fields
from typing import TYPE_CHECKING, Literal, get_args, get_origin

from zerojax.errors import ConfigurationError
from zerojax.validation.bounds import check_numbers

if TYPE_CHECKING:
    from zerojax.models.config import GPTConfig

_COUNTS = (
    *("vocab_size", "layers", "d_model", "heads", "max_seq_len", "rope_original_len", "loss_chunk"),
    "token_tile",
)
_OPTIONAL_COUNTS = (
    *("kv_heads", "head_width", "ffn", "dense_ffn", "outputs", "sliding_window"),
    *("latent_rank", "latent_query_rank", "latent_rope_width", "latent_value_width"),
)
_POSITIVE = (
    "rope_theta",
    "rope_local_theta",
    "rope_factor",
    "rope_low_freq_factor",
    "rope_beta_slow",
    "rope_attention_factor",
    "embedding_scale",
    "query_scalar",
    "attention_softcap",
    "logit_softcap",
    "norm_eps",
    "init_std",
    "residual_scale",
    "logit_divisor",
    "rope_fraction",
)
_MAX_LAYERS = 10_000
_MAX_EXPERTS = 10_000
_MAX_UNSCANNED = 1_000  # each is a module, built and compiled separately


def require(condition: bool, message: str) -> None:
    """Raise a ``ConfigurationError`` about [model] unless the condition holds."""
    if not condition:
        raise ConfigurationError(f"[model] {message}")


def check_model(config: "GPTConfig") -> None:
    """Refuse an invalid config."""
    check_numbers(config, "[model] {}".format)
    _check_values(config)
    _check_widths(config)
    _check_latents(config)
    _check_rope(config)
    _check_features(config)
    if config.experts != 0:
        _check_experts(config)
    require(
        config.experts != 0 or not config.dense_layers,
        f"dense_layers = {config.dense_layers} needs a model with experts: set experts, or leave it out",
    )
    require(
        config.dense_ffn is None or len(config.dense_layers) > 0,
        f"dense_ffn = {config.dense_ffn} needs dense_layers: set them, or leave it out",
    )


def _check_values(c: "GPTConfig") -> None:
    for name in _COUNTS:
        require(getattr(c, name) >= 1, f"{name} = {getattr(c, name)}: at least 1")
    for name in _OPTIONAL_COUNTS:
        value = getattr(c, name)
        require(value is None or value >= 1, f"{name} = {value}: at least 1, or left out")
    for name in _POSITIVE:
        value = getattr(c, name)
        require(value is None or value > 0, f"{name} = {value}: above 0")
    for field in fields(c):
        if get_origin(field.type) is Literal:
            choices, value = get_args(field.type), getattr(c, field.name)
            require(value in choices, f"{field.name} = {value!r}: one of {', '.join(choices)}")
    require(0 <= c.dropout < 1, f"dropout = {c.dropout}: at least 0 and below 1")
    most = _MAX_LAYERS if c.scan else _MAX_UNSCANNED
    require(c.layers <= most, f"layers = {c.layers}: at most {most:,}{', or scan' * (not c.scan)}")


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
        for name in ("latent_query_rank", "latent_rope_width", "latent_value_width"):
            value = getattr(c, name)
            require(value is None, f"{name} = {value} needs latent_rank: set it, or leave {name} out")
        return
    require(
        c.latent_rope_width is not None and c.latent_rope_width < c.head_dim,
        f"latent_rope_width = {c.latent_rope_width}: with latent_rank, from 2 to below the width of a head, "
        f"{c.head_dim}",
    )
    require(
        c.positions == "rope" and c.rope_fraction == 1 and c.key_value_heads == c.heads,
        'latent_rank needs positions = "rope", and neither rope_fraction nor kv_heads. Every head makes its '
        "keys from the latent, and latent_rope_width sets how much of a key is rotated",
    )
    require(
        c.value_dim <= c.head_dim,
        f"latent_value_width = {c.latent_value_width}: at most the width of queries and keys, {c.head_dim}",
    )
    for name in ("biases", "qkv_biases", "out_bias", "qk_norm", "attention_sinks"):
        require(not getattr(c, name), f"{name} = true is not supported with latent_rank: leave it out")


def _check_rope(c: "GPTConfig") -> None:
    require(
        c.position_offset == 0 or (c.position_offset > 0 and c.positions == "learned"),
        f"position_offset = {c.position_offset}: 0 or more, and 0 without learned positions",
    )
    require(
        c.rope_low_freq_factor < c.rope_high_freq_factor,
        f"rope_low_freq_factor = {c.rope_low_freq_factor} must lie below rope_high_freq_factor = "
        f"{c.rope_high_freq_factor}",
    )
    require(
        c.rope_beta_slow <= c.rope_beta_fast,
        f"rope_beta_slow = {c.rope_beta_slow}: at most rope_beta_fast = {c.rope_beta_fast}",
    )
    require(c.rope_fraction <= 1, f"rope_fraction = {c.rope_fraction}: at most 1")
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
        f'rope_original_len = {c.rope_original_len}: above 1 with rope_scaling = "longrope"',
    )
    require(c.rope_query_growth >= 0, f"rope_query_growth = {c.rope_query_growth}: at least 0")
    _check_layers(c, "no_rope_layers")
    require(
        c.positions == "rope" or not (c.no_rope_layers or c.rope_query_growth),
        'no_rope_layers and rope_query_growth need positions = "rope"',
    )
    require(
        c.rope_scaling != "yarn" or c.rope_theta > 1,
        f'rope_scaling = "yarn" needs rope_theta above 1, not {c.rope_theta}',
    )
    require(
        c.rope_local_theta is None or (c.positions == "rope" and c.sliding_window is not None),
        f"rope_local_theta = {c.rope_local_theta} applies to layers with a window: set sliding_window and "
        'positions = "rope", or leave it out',
    )


def _check_layers(c: "GPTConfig", name: str) -> None:
    """Refuse repeated layer numbers, and numbers of layers that do not exist."""
    numbers = getattr(c, name)
    require(
        len(set(numbers)) == len(numbers) and all(0 <= number < c.layers for number in numbers),
        f"{name} = {numbers}: different numbers from 0 to layers - 1 = {c.layers - 1}",
    )


def _check_features(c: "GPTConfig") -> None:
    require(
        c.pre_norms or c.post_norms,
        "pre_norms = false leaves the branches without a norm: set post_norms = true",
    )
    for name in ("qk_norm_joint", "qk_norm_rotated"):
        require(c.qk_norm or not getattr(c, name), f"{name} = true needs qk_norm = true")
    require(
        c.branches != "parallel_one_norm" or c.pre_norms,
        'branches = "parallel_one_norm" has one norm before both branches: set pre_norms = true',
    )
    require(
        c.outputs is None or not c.tied,
        f"outputs = {c.outputs} needs a separate output projection: set tied = false, or leave outputs out",
    )
    for name in ("qkv_biases", "out_bias", "norm_biases"):
        require(
            not (c.biases and getattr(c, name)),
            f"{name}: biases = true gives them to every layer; set it to false, or leave {name} out",
        )
    require(
        not c.head_bias or not c.tied,
        "head_bias = true needs a separate output projection: set tied = false, or leave it out",
    )
    require(
        not c.norm_biases or c.norm == "layer",
        'norm_biases = true needs layer norms: set norm = "layer", or leave it out',
    )
    require(
        c.norm_offset == 0 or c.norm == "rms",
        f'norm_offset = {c.norm_offset} needs RMS norms: set norm = "rms", or leave it out',
    )
    pattern = c.sliding_window_pattern
    require(
        pattern is None or (pattern >= 2 and c.sliding_window is not None),
        f"sliding_window_pattern = {pattern}: at least 2, and with a sliding_window, or left out",
    )
    layers = c.sliding_window_layers
    if layers is not None:
        _check_layers(c, "sliding_window_layers")
    require(
        layers is None or (len(layers) > 0 and c.sliding_window is not None and pattern is None),
        f"sliding_window_layers = {layers}: at least one, with a sliding_window and without a "
        "sliding_window_pattern, or left out",
    )
    require(
        c.attention_softcap is None or c.attention in ("auto", "xla"),
        f'attention = "{c.attention}" has no softcap for attention_softcap: set attention = "xla", or leave '
        "it out",
    )


def _check_experts(c: "GPTConfig") -> None:
    require(1 <= c.experts <= _MAX_EXPERTS, f"experts = {c.experts}: from 0 (none) to {_MAX_EXPERTS:,}")
    require(
        1 <= c.experts_per_token <= c.experts,
        f"experts_per_token = {c.experts_per_token}: from 1 to experts = {c.experts}",
    )
    require(c.gated, f"experts are gated: set mlp to swiglu, geglu or swiglu_clamped, not {c.mlp}")
    require(
        not (c.biases and c.shared_ffn),
        "shared_ffn: the expert that all tokens go to cannot have biases. Set biases = false, or leave "
        "shared_ffn out",
    )
    require(
        c.shared_ffn > 0 or not c.shared_gate,
        "shared_gate = true gates the expert that all tokens go to: set shared_ffn, or leave it out",
    )
    for name in ("shared_ffn", "router_balance_rate", "balance_loss", "z_loss"):
        require(getattr(c, name) >= 0, f"{name} = {getattr(c, name)}: at least 0")
    _check_layers(c, "dense_layers")
    require(
        len(c.dense_layers) < c.layers,
        "dense_layers lists all layers: set experts = 0 and ffn, or leave a layer out",
    )
    require(c.router_scale > 0, f"router_scale = {c.router_scale}: above 0")
    try:
        c.router_config.check(c.experts, c.experts_per_token)
    except ConfigurationError as error:
        raise ConfigurationError(f"[model] router_groups: {error}") from error
