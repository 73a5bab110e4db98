"""The number of a decoder's parameters, and its FLOPs. Both follow from the shapes of its modules."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from flax import nnx

from zerojax.adapters.roles import ExpertParam
from zerojax.errors import ConfigurationError
from zerojax.models.config import GPTConfig
from zerojax.models.gpt import GPT
from zerojax.sharding.param_tree import Path


@cache
def abstract_weights(config: GPTConfig) -> Mapping[Path, nnx.Param]:
    """The weights of ``GPT(config)``, scanned, as shapes and dtypes by path."""
    model = nnx.eval_shape(lambda: GPT(replace(config, scan=True), rngs=nnx.Rngs(0)))
    return {tuple(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param))}


class _Size(NamedTuple):
    """Elements of a weight.

    Attributes:
        every: all of them.
        active: elements that one token meets: of its experts only.
        is_matrix: whether the weight multiplies tokens, except the output projection.
    """

    every: int
    active: int
    is_matrix: bool


@cache
def _weights(config: GPTConfig) -> list[_Size]:
    found = []
    for path, x in abstract_weights(config).items():
        stacked = path[0] == "blocks"
        of_experts = isinstance(x, ExpertParam)
        active = x.size * config.experts_per_token // config.experts if of_experts else x.size
        is_matrix = path[-1] in ("kernel", "router") or (of_experts and len(x.shape) == 3 + stacked)
        found.append(_Size(x.size, active, is_matrix))
    return found


def parameter_count(config: GPTConfig, *, active: bool = False) -> int:
    """Number of parameters of ``GPT(config)``; tied matrices count once.

    With ``active``, only the experts of one token count.
    """
    return sum(one.active if active else one.every for one in _weights(config))


def describe_parameters(config: GPTConfig) -> str:
    """The number of parameters as text, for a mixture of experts also the number that one token meets."""
    text = f"{parameter_count(config):,} parameters"
    return f"{text} ({parameter_count(config, active=True):,} active)" if config.experts else text


def flops_per_token(config: GPTConfig, seq_len: int) -> int:
    """Floating-point operations of one training token, forward and backward.

    Each weight that multiplies the token counts 6. That includes the output projection and the token's
    experts, but no embedding look-ups. Each token that a position attends to in a layer (``attention_flops``)
    counts 6 x heads x (head_dim + value_dim). Recurrent layers count ``recurrence_flops`` instead.

    As in PaLM (Chowdhery et al., 2022, appendix B), recomputation is not counted. Unlike in PaLM, causal
    masking is deducted: in long rows the masked pairs would lift the figure above the chip's peak. Model
    FLOPs utilisation is this times tokens per second, divided by the peak.

    Raises:
        ConfigurationError: seq_len is below 1 or above config.max_seq_len.
    """
    if not 1 <= seq_len <= config.max_seq_len:
        raise ConfigurationError(f"seq_len = {seq_len} must be from 1 to max_seq_len = {config.max_seq_len}")
    matrices = sum(active for _, active, is_matrix in _weights(config) if is_matrix)
    matrices += config.output_rows * config.d_model
    attention = round(attention_flops(config, seq_len))
    return 6 * matrices + attention + len(config.recurrent_layers) * recurrence_flops(config)


def recurrence_flops(config: GPTConfig) -> int:
    """Floating-point operations of a recurrent layer without its projections, for a token.

    The gated delta rule reads the state by key and by query, and writes it once: 2 each for its elements, and
    twice as many in the backward pass. Mamba-2 does not read it by key.
    """
    state = config.value_heads * config.recurrent_key_width * config.recurrent_width
    rule = {"gated_delta": 18, "kimi_delta": 18, "mamba2": 12, "short_conv": 0}[config.recurrent] * state
    return rule + 6 * config.conv_width * config.conv_channels


def pair_flops(config: GPTConfig) -> int:
    """Floating-point operations of a layer's attention for one query and key, forward and backward."""
    return 6 * config.heads * (config.head_dim + config.value_dim)


def attention_flops(config: GPTConfig, seq_len: int) -> float:
    """Floating-point operations of a token's attention in all layers, forward and backward.

    A layer without a window counts half of the row. A window w counts w - w^2 / (2 seq_len), the mean over
    positions. Layers without attention count none.
    """
    pairs = [pair_flops(kind) for kind, _ in config.kinds]
    window, attended = min(seq_len, config.sliding_window or seq_len), set(config.attention_layers)
    reached = (
        0 if number not in attended else window if windowed else seq_len
        for number, windowed in enumerate(config.windowed)
    )
    each = zip(config.order, reached, strict=True)
    return sum(pairs[kind] * (reach - reach**2 / (2 * seq_len)) for kind, reach in each)
