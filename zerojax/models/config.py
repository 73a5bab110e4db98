"""The shape of a decoder, its number of parameters and its FLOPs."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.experts.mlp import GATED
from zerojax.experts.router import RouterConfig
from zerojax.models.config_checks import check_model, require
from zerojax.models.options import (
    AttentionOptions,
    BlockOptions,
    HeadOptions,
    MLPOptions,
    PositionOptions,
    RecurrentOptions,
    Rotation,
)
from zerojax.validation.arguments import suggests


@suggests
@dataclass(frozen=True, kw_only=True)
class GPTConfig(HeadOptions, MLPOptions, PositionOptions, RecurrentOptions, AttentionOptions, BlockOptions):
    """A decoder-only transformer, of GPT-2's, OPT's, LLaMA's, Gemma's or DeepSeek's family.

    The settings are the fields of the six groups in ``zerojax.models.options``. All of them are arguments
    here. The defaults are GPT-2 124M (Radford et al., 2019). Layers are numbered from 0.
    """

    def __post_init__(self) -> None:
        check_model(self)
        count = parameter_count(self)
        require(
            count <= _MAX_PARAMETERS,
            f"the model has {count:.3g} parameters, and at most {_MAX_PARAMETERS:.0e} are supported",
        )

    @property
    def head_dim(self) -> int:
        """Width of a head's queries and keys: head_width or its default."""
        return self.d_model // self.heads if self.head_width is None else self.head_width

    @property
    def value_dim(self) -> int:
        """Width of a head's values: latent_value_width or its default."""
        return self.head_dim if self.latent_value_width is None else self.latent_value_width

    @property
    def attention_width(self) -> int:
        """Width of all heads' outputs together; 0 without attention."""
        return self.heads * self.value_dim if self.attention_layers else 0

    @property
    def values_width(self) -> int:
        """Width of all heads' projected values together: 0 if they are the keys."""
        return 0 if self.keys_as_values else self.key_value_heads * self.value_dim

    @property
    def qkv_width(self) -> int:
        """Width of all heads' projected queries, keys and values together; 0 without attention."""
        if not self.attention_layers:
            return 0
        return (self.heads + self.key_value_heads) * self.head_dim + self.values_width

    @property
    def rope_width(self) -> int:
        """Elements of a head that are rotated."""
        if self.latent_rope_width is not None:
            return self.latent_rope_width
        fraction = 1.0 if self.rope_scaling == "proportional" else self.rope_fraction
        return int(self.head_dim * fraction)

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads: kv_heads or its default."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_width(self) -> int:
        """Hidden width of the MLP: ffn or its default."""
        if self.ffn is not None:
            return self.ffn
        if self.gated:
            return -(-(8 * self.d_model) // (3 * 256)) * 256
        return 4 * self.d_model

    @property
    def active_ffn_width(self) -> int:
        """Total hidden width of the MLPs that a token passes through in a block; 0 without an MLP."""
        if not self.has_mlp:
            return 0
        return self.experts_per_token * self.ffn_width + self.shared_ffn if self.experts else self.ffn_width

    @property
    def mlps_per_token(self) -> int:
        """Number of MLPs that a token passes through in a block."""
        return self.experts_per_token + (self.shared_ffn > 0) if self.experts else int(self.has_mlp)

    @property
    def router_config(self) -> RouterConfig:
        """How tokens choose their experts."""
        return RouterConfig(
            self.router,
            normalise=self.router_normalise,
            scale=self.router_scale,
            logit_biases=self.biases,
            balance_rate=self.router_balance_rate,
            groups=self.router_groups,
            groups_per_token=self.router_groups_per_token,
            group_best=self.router_group_best,
        )

    @property
    def output_rows(self) -> int:
        """Rows of the output projection: outputs or its default."""
        return self.vocab_size if self.outputs is None else self.outputs

    @property
    def attention_scale(self) -> float | None:
        """The factor of the attention scores; None for 1 / sqrt(head_dim)."""
        return None if self.query_scalar is None else self.query_scalar**-0.5

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.mlp in GATED

    @property
    def value_heads(self) -> int:
        """Heads of values of a recurrent layer: recurrent_heads or its default."""
        return self.heads if self.recurrent_heads is None else self.recurrent_heads

    @property
    def recurrent_keys(self) -> int:
        """Width of the queries, or the keys, of all heads of a recurrent layer together."""
        heads = self.value_heads if self.recurrent_key_heads is None else self.recurrent_key_heads
        return heads * self.recurrent_key_width

    @property
    def recurrent_values(self) -> int:
        """Width of the outputs of all heads of a recurrent layer together."""
        return self.d_model if self.recurrent == "short_conv" else self.value_heads * self.recurrent_width

    @property
    def conv_channels(self) -> int:
        """Width of the convolution of a recurrent layer: of queries, keys and values together."""
        return self.recurrent_values + (0 if self.recurrent == "short_conv" else 2 * self.recurrent_keys)

    @property
    def all_recurrent(self) -> bool:
        """Whether every layer is recurrent, as in ``of_layer`` of a recurrent layer."""
        return len(self.recurrent_layers) == self.layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        others = {*self.recurrent_layers, *(self.mlp_layers or ())}
        return tuple(number for number in range(self.layers) if number not in others)

    @property
    def has_mlp(self) -> bool:
        """Whether any layer has an MLP or experts."""
        return self.mlp_layers is None or len(self.mlp_layers) > 0

    @property
    def has_mixer(self) -> bool:
        """Whether any layer mixes the tokens of a row, by attention or a recurrent layer."""
        return self.mlp_layers is None or len(self.mlp_layers) < self.layers

    @property
    def residual_branches(self) -> int:
        """How many branches of all layers together add to the residual stream."""
        return self.layers * (2 if self.mlp_layers is None else 1)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with experts."""
        some = range(self.layers if self.experts else 0) if self.mlp_layers is None else self.mlp_layers
        return tuple(number for number in some if self.experts and number not in self.dense_layers)

    def of_layer(self, number: int) -> "GPTConfig":
        """The config of a model whose layers are all like this one."""
        every, recurrent = tuple(range(self.layers)), number in self.recurrent_layers
        own: dict[str, Any] = {"recurrent_layers": every if recurrent else (), "recurrent_pre_norms": False}
        if self.recurrent_pre_norms and recurrent:
            own |= {"pre_norms": True, "post_norms": False}
        if self.mlp_layers is not None:
            own["mlp_layers"] = every if number in self.mlp_layers else ()
        if self.experts:
            own |= {"dense_layers": (), "dense_ffn": None}
            own |= {} if number in self.expert_layers else {"experts": 0, "ffn": self.dense_ffn}
        if self.windows_differ:
            own |= self._of_window(self.windowed[number])
        changed = any(getattr(self, name) != value for name, value in own.items())
        return replace(self, **own) if changed else self

    @property
    def windows_differ(self) -> bool:
        """Whether layers with the sliding window have other weights than the others."""
        full = self.full_head_width, self.full_kv_heads, self.keys_as_values or None
        return self.sliding_window is not None and full != (None, None, None)

    def _of_window(self, windowed: bool) -> dict[str, Any]:
        """The fields of a config whose layers all have the sliding window, or none of them."""
        own: dict[str, Any] = {"sliding_window_pattern": None, "sliding_window_layers": None}
        own |= {"full_head_width": None, "full_kv_heads": None}
        if windowed:
            return own | {"keys_as_values": False}
        own |= {"sliding_window": None, "rope_local_theta": None}
        own["head_width"] = self.full_head_width or self.head_width
        return own | {"kv_heads": self.full_kv_heads or self.kv_heads}

    @property
    def order(self) -> tuple[int, ...]:
        """The number of each layer's kind, from 0.

        Layers of a kind have the same branches: recurrent or not, with experts or not. If ``windows_differ``,
        all or none of them have the sliding window.
        """
        windowed = [number for number, one in enumerate(self.windowed) if one and self.windows_differ]
        some = self.dense_layers, self.recurrent_layers, self.mlp_layers or (), windowed
        groups = list(map(set, some))
        kinds = [tuple(number in group for group in groups) for number in range(self.layers)]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        return tuple(numbers[kind] for kind in kinds)

    @property
    def kinds(self) -> tuple[tuple["GPTConfig", int], ...]:
        """For each kind of layers, a config whose layers are all of it, and the number of its layers."""
        counts = Counter(self.order)
        return tuple((self.of_layer(self.order.index(kind)), count) for kind, count in counts.items())

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """The index of each layer among the layers of its kind, which share a cache."""
        order = self.order
        return tuple(order[:number].count(kind) for number, kind in enumerate(order))

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Whether each layer attends within the sliding window only."""
        if self.sliding_window is None:
            return (False,) * self.layers
        if self.sliding_window_layers is not None:
            return tuple(number in self.sliding_window_layers for number in range(self.layers))
        pattern = self.sliding_window_pattern
        return tuple(pattern is None or number % pattern != 0 for number in range(1, self.layers + 1))

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """How each layer rotates queries and keys; "local" uses rope_local_theta."""
        local = self.rope_local_theta is not None
        return tuple(
            "none" if number in self.no_rope_layers else "local" if windowed and local else "full"
            for number, windowed in enumerate(self.windowed)
        )

    def check_language_model(self, what: str) -> None:
        """Refuse a model of scores.

        Args:
            what: the caller that needs a language model, for the message.

        Raises:
            ConfigurationError: ``outputs`` is set.
        """
        require(
            self.outputs is None,
            f"outputs = {self.outputs} makes a model of scores, but {what} needs a language model. Leave it "
            "out, or use zerojax posttrain",
        )


_MAX_PARAMETERS = 10**15


def _block_matrices(c: GPTConfig, *, active: bool) -> int:
    """Elements of one block's weight matrices; ``active`` counts only the matrices that one token meets."""
    mixer = _recurrent_matrices(c) if c.all_recurrent else _attention_matrices(c)
    hidden = c.experts * c.ffn_width + c.shared_ffn if c.experts and not active else c.active_ffn_width
    routers = c.experts + c.shared_gate if c.experts else 0
    return mixer + c.d_model * ((3 if c.gated else 2) * hidden + routers)


def _attention_matrices(c: GPTConfig) -> int:
    """Elements of attention's projections; 0 without attention."""
    outputs = c.d_model * c.attention_width * (1 + c.attention_gate)
    if c.latent_rank is None or not outputs:
        return outputs + c.d_model * c.qkv_width
    ranks = c.latent_rank + c.rope_width + (c.latent_query_rank or 0)
    queries = c.heads * c.head_dim * (c.latent_query_rank or c.d_model)
    return outputs + c.d_model * ranks + queries + c.latent_rank * latent_outputs(c)


def _recurrent_matrices(c: GPTConfig) -> int:
    """Elements of a recurrent layer's projections: its convolution's inputs, gates, steps and outputs.

    Kimi's gates and decays are projected in two steps.
    """
    if c.recurrent == "kimi_delta":
        ranks = c.recurrent_key_width, c.recurrent_width
        outputs = c.conv_channels + c.value_heads + sum(ranks) + c.recurrent_values
        return c.d_model * outputs + ranks[0] * c.recurrent_keys + ranks[1] * c.recurrent_values
    gates = {"gated_delta": 2 * c.value_heads, "mamba2": c.value_heads, "short_conv": c.d_model}[c.recurrent]
    return c.d_model * (c.conv_channels + gates + 2 * c.recurrent_values)


def latent_outputs(c: GPTConfig) -> int:
    """Width of all heads' values and keys (without the rotary part), which are projected from a latent."""
    return c.heads * (c.head_dim - c.rope_width + c.value_dim)


def _norm_parameters(c: GPTConfig) -> int:
    return c.d_model * (2 if c.norm == "layer" and (c.biases or c.norm_biases) else 1)


def parameter_count(config: GPTConfig, *, active: bool = False) -> int:
    """Number of parameters of ``GPT(config)``; tied matrices count once.

    With ``active``, only the experts of one token count.
    """
    c = config
    tables = c.vocab_size + (0 if c.tied else c.output_rows)
    if c.positions == "learned":
        tables += c.max_seq_len + c.position_offset
    blocks = sum(count * _block_parameters(kind, active=active) for kind, count in c.kinds)
    return blocks + tables * c.d_model + c.head_bias * c.output_rows + _norm_parameters(c)


def _block_parameters(c: GPTConfig, *, active: bool) -> int:
    norms = (c.has_mixer + c.has_mlp) * (c.pre_norms + c.post_norms) - (c.branches == "parallel_one_norm")
    block = _block_matrices(c, active=active) + norms * _norm_parameters(c)
    if c.biases and c.has_mlp:
        mlp = (2 if c.gated else 1) * c.ffn_width + c.d_model
        counted = c.experts_per_token if active else c.experts
        block += counted * mlp + c.experts if c.experts else mlp
    if c.experts and c.shared_norms:
        block += 3 * _norm_parameters(c) + c.d_model + c.experts
    return block + (_recurrent_vectors(c) if c.all_recurrent else _attention_vectors(c))


def _recurrent_vectors(c: GPTConfig) -> int:
    """Parameters of a recurrent layer besides its projections."""
    own = {
        "gated_delta": 2 * c.value_heads + c.recurrent_width,
        "kimi_delta": c.value_heads + c.recurrent_keys + c.recurrent_width,
        "mamba2": 3 * c.value_heads + c.recurrent_values + c.conv_channels,
        "short_conv": 0,
    }
    return c.conv_width * c.conv_channels + own[c.recurrent]


def _attention_vectors(c: GPTConfig) -> int:
    """Parameters of attention besides its projections: norms, biases and sinks."""
    if not c.attention_layers:
        return 0
    count = (c.latent_rank or 0) + (c.latent_query_rank or 0)  # the scales of their norms
    if c.qk_norm:
        count += (c.heads + c.key_value_heads if c.qk_norm_joint else 2) * c.head_dim
    if c.biases or c.qkv_biases:
        count += c.qkv_width
    if c.biases or c.out_bias:
        count += c.d_model
    return count + c.attention_sinks * c.heads


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
    matrices = sum(count * _block_matrices(kind, active=True) for kind, count in config.kinds)
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


def attended_tokens(config: GPTConfig, seq_len: int) -> list[float]:
    """Tokens that a position attends to in each layer: the mean over positions.

    A layer without a window counts half of the row. A window w counts w - w^2 / (2 seq_len). Layers without
    attention count none.
    """
    window, attended = min(seq_len, config.sliding_window or seq_len), set(config.attention_layers)
    reached = (
        0 if number not in attended else window if windowed else seq_len
        for number, windowed in enumerate(config.windowed)
    )
    return [reach - reach**2 / (2 * seq_len) for reach in reached]


def attention_flops(config: GPTConfig, seq_len: int) -> float:
    """Floating-point operations of a token's attention in all layers, forward and backward."""
    pairs = [pair_flops(kind) for kind, _ in config.kinds]
    each = zip(config.order, attended_tokens(config, seq_len), strict=True)
    return sum(pairs[kind] * attended for kind, attended in each)
