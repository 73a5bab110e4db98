"""The shape of a decoder, its number of parameters and its FLOPs."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from zerojax.errors import ConfigurationError
from zerojax.experts import RouterConfig
from zerojax.models.config_checks import check_model, require
from zerojax.schedule.tiles import TILE
from zerojax.validation.arguments import suggests

Norm = Literal["layer", "rms"]
Positions = Literal["learned", "rope"]
Activation = Literal["gelu", "gelu_exact", "relu", "relu2", "swiglu", "geglu", "swiglu_clamped"]
Branches = Literal["sequential", "parallel", "parallel_one_norm"]
Router = Literal["softmax", "sigmoid"]
RopeScaling = Literal["none", "linear", "llama3", "dynamic", "yarn", "longrope"]
Rotation = Literal["full", "local", "none"]
Recurrent = Literal["gated_delta", "mamba2", "short_conv"]
AttentionKernel = Literal["auto", "cudnn", "flash_attention_4", "xla"]


@suggests
@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only transformer, of GPT-2's, OPT's, LLaMA's, Gemma's or DeepSeek's family.

    The defaults are GPT-2 124M (Radford et al., 2019). Layers are numbered from 0.

    Attributes:
        vocab_size: Number of tokens. A multiple of 128 keeps the logit matmuls on tensor cores.
        layers: Number of blocks.
        d_model: Width of the residual stream.
        heads: Query heads.
        head_width: Width of a head; None means d_model / heads.
        kv_heads: Key and value heads, fewer than heads for grouped-query attention
            (Ainslie et al., 2023); None means as many as heads.
        latent_rank: Width of the normed latent from which all heads compute keys and values (multi-head
            latent attention, DeepSeek-V2, 2405.04434); None means there is none. With a latent, head_width
            is the width of a query and a key, rotary part included.
        latent_query_rank: Width of a normed latent for queries; None projects queries from the stream.
        latent_rope_width: The last elements of each query and key, which are rotated. All heads' keys share
            these elements.
        latent_value_width: Width of a head's values, at most a key's width; None means the same width.
        ffn: Hidden width of the MLP, or of each expert. None means 4 d_model, or if gated 8/3 d_model rounded
            up to a multiple of 256, as in LLaMA (Touvron et al., 2023).
        norm: "layer" (with a bias when biases) or "rms".
        norm_offset: Added to the scales of RMS norms, whose weights then begin at 1 - norm_offset (1 in
            Gemma).
        pre_norms: Whether the input of each residual branch is normed.
        branches: "sequential" means that the MLP reads the residual stream after attention has added to it.
            With "parallel" both read the same input through separate norms (GPT-NeoX). With
            "parallel_one_norm" they share the norm (Cohere).
        post_norms: Whether the output of each residual branch is normed (Gemma 2, and OLMo 2 without
            pre_norms).
        residual_scale: Factor of each residual branch's output (Granite).
        positions: "learned" (a table of max_seq_len rows) or "rope" (Su et al., 2021).
        position_offset: Unused rows of the learned table before the row of position 0; OPT has 2.
        mlp: "gelu" (the tanh form, as in GPT-2), "gelu_exact", "relu" (OPT), "relu2" (its square), or gated:
            "swiglu" (LLaMA), "geglu" (of the tanh form, Gemma) or "swiglu_clamped" (gpt-oss).
        experts: Number of MLPs in each block. A router chooses some of them for each token (Mixtral). 0 makes
            one MLP for all tokens. Experts are gated, and biases = true gives them and the router biases.
        experts_per_token: Experts that each token goes to. Read only with experts, like the following fields
            up to z_loss.
        dense_layers: The layers with one MLP for all tokens in place of experts (the first ones in DeepSeek).
            A scanned model has a stack for each run of equal layers.
        dense_ffn: Hidden width of the MLP in dense_layers; None means the default of ffn.
        shared_ffn: Hidden width of an expert that all tokens go to in addition (DeepSeek); 0 means none.
        shared_gate: Whether that expert's output is multiplied by a gate, the sigmoid of a product with the
            token (Qwen2-MoE).
        router: How logits become the scores that choose: "softmax" over all experts, or "sigmoid" of each
            (DeepSeek-V3).
        router_normalise: Whether the weights of a token's experts are divided by their sum.
        router_scale: Factor of the weights of a token's experts.
        router_groups: Number of groups of neighbouring experts (DeepSeek-V2).
        router_groups_per_token: How many groups a token's experts come from: the groups with the best scores.
        router_group_best: A group's score is the sum of this many of its best experts' scores: 1 in
            DeepSeek-V2, 2 in DeepSeek-V3.
        router_balance_rate: How far a step moves each expert's selection bias towards even loads
            (DeepSeek-V3). The bias changes the choice only, not the weights. 0 means there is no bias.
        balance_loss: Coefficient of the loss that keeps experts evenly loaded (Fedus et al., 2021), a mean
            over layers.
        z_loss: Coefficient of the loss that keeps the router's logits small (Zoph et al., 2022), a mean over
            layers.
        embedding_scale: Factor of the token embedding (sqrt(d_model) in Gemma). A tied output projection
            is not scaled.
        tied: Whether the output projection is the token embedding.
        outputs: Rows of the output projection; None means vocab_size. 1 makes a model of scores, such as a
            reward model, for `zerojax posttrain`; it needs tied = false.
        head_bias: Whether the output projection has a bias (Phi); then it is not tied.
        biases: Whether linear layers and layer norms have biases.
        qkv_biases: Whether the query, key and value projections have biases although other layers
            have none (Qwen2).
        out_bias: Whether the output projection of attention has a bias although other layers have none.
        norm_biases: Whether layer norms have biases although linear layers have none (StableLM).
        qk_norm: Whether each head of the queries and keys goes through an RMS norm before it is
            rotated (Qwen3).
        qk_norm_joint: Whether that norm covers all heads together (OLMo 2).
        qk_norm_rotated: Whether that norm follows the rotation (HunYuan).
        attention_gate: Whether each head's output is multiplied by the sigmoid of a projection of the block's
            input (Qwen3-Next).
        recurrent_layers: The layers that have a recurrent layer in place of attention (three of four in
            Qwen3.5).
        recurrent: Its kind: "gated_delta", linear attention by the gated delta rule (Gated DeltaNet),
            "mamba2", or "short_conv", a gated convolution over the last tokens (LFM2), which reads conv_width
            only.
        recurrent_heads: Heads of values; None means as many as heads.
        recurrent_key_heads: Heads of queries and keys, a divisor; None means as many. Mamba-2's groups.
        recurrent_width: Width of a head's values.
        recurrent_key_width: Width of a head's queries and keys, Mamba-2's state.
        recurrent_pre_norms: Whether recurrent layers norm the inputs of their branches, and not the outputs.
            Then pre_norms and post_norms are for the other layers (OLMo Hybrid).
        recurrent_negative: "gated_delta": whether a token moves the state by up to twice its error, which
            allows negative eigenvalues (2411.12537).
        recurrent_norm_eps: "gated_delta": norm_eps of the norm of heads, if it differs from the others.
        conv_width: Tokens that the convolution of a recurrent layer sees, the token itself included.
        attention_sinks: Whether each head's softmax has one more, learned score without a value (gpt-oss).
        query_scalar: Attention scores are divided by the square root of this; None means the width of
            a head.
        sliding_window: Tokens that a position attends to, itself included (Mistral); None means
            itself and all earlier ones.
        sliding_window_pattern: In each group of this many layers, the last layer attends to all earlier
            positions (2 in Gemma 2, 6 in Gemma 3). None gives all layers the window.
        sliding_window_layers: In place of a pattern, the layers with the window; the others attend to all
            earlier positions (Qwen2).
        attention_softcap: Attention scores s become cap x tanh(s / cap) (Gemma 2); None means they do
            not. Only XLA's kernel can do this.
        logit_softcap: Logits l become cap x tanh(l / cap); None means they do not.
        logit_divisor: Divisor of the logits (Granite), applied before any cap.
        max_seq_len: The longest sequence, in tokens.
        dropout: Probability of zeroing an element of the embedding and of each residual branch.
        rope_theta: Base of the rotary wavelengths. Read only if positions is "rope", like the following
            fields up to rope_query_growth.
        rope_fraction: The part of each head, from its beginning, that is rotated (0.5 in GLM4).
        rope_interleaved: Whether a rotated pair is two neighbours (GLM4), or an element of each half.
        no_rope_layers: The layers whose queries and keys are not rotated (SmolLM3).
        rope_local_theta: The base in layers with the sliding window, where no wavelength is stretched
            (Gemma 3); None rotates all layers alike.
        rope_scaling: How wavelengths are stretched for longer contexts. "none"; "linear": all by
            rope_factor. "llama3": long ones by rope_factor, short ones not, interpolated between the two
            bounds. "dynamic": by a theta that grows with the sequence beyond rope_original_len. "yarn":
            pairs that turn rarely by rope_factor, pairs that turn often not, interpolated between the two
            bounds. "longrope": each by a separate factor (Phi-3).
        rope_factor: Factor of the stretching.
        rope_low_freq_factor: "llama3": wavelengths above rope_original_len / this are stretched in full.
        rope_high_freq_factor: "llama3": wavelengths below rope_original_len / this are not stretched.
        rope_original_len: Tokens of the context before its extension; "linear" does not read it.
        rope_beta_fast: "yarn": pairs with at least this many turns in the original context are not stretched.
        rope_beta_slow: "yarn": pairs with at most this many turns in the original context are stretched in
            full.
        rope_truncate: "yarn": whether the bounds of the interpolation are whole pairs (not in gpt-oss).
        rope_attention_factor: "yarn", "longrope": factor of the rotated queries and keys; None means
            1 + 0.1 ln(rope_factor), or sqrt(1 + ln(rope_factor) / ln(rope_original_len)).
        rope_short_factors: "longrope": a factor for each wavelength, for sequences of at most
            rope_original_len tokens.
        rope_long_factors: "longrope": a factor for each wavelength, for longer sequences.
        rope_query_growth: Queries at position p are multiplied by
            1 + this x ln(1 + floor(p / rope_original_len)) (Ministral 3).
        norm_eps: Added to the variance inside the norms.
        init_std: Standard deviation of the initial weights; the projections into the residual
            stream get init_std / sqrt(2 layers), as in GPT-2.
        scan: Whether the blocks are one scanned `zerojax.Stack`, compiled once, or a list of
            modules, each compiled.
        attention: The kernel: "cudnn", "flash_attention_4" (of the package fa4-jax), "xla" or "auto". On a
            GPU that supports the dtype and head width, "auto" is FlashAttention-4 for packed documents and
            for layers with different windows, and cuDNN's flash attention otherwise. Elsewhere it is "xla".
            On Hopper FlashAttention-4 is faster than cuDNN for all rows, but its gradients are not
            deterministic: a repeated step differs by rounding.
        loss_chunk: Tokens whose logits exist at a time in the loss; fp32 logits take
            4 x loss_chunk x vocab_size bytes.
        token_tile: Tokens of a device that pass through a block at a time where the backward pass recomputes
            the block (`zerojax.tiled`). Attention and experts are not tiled.
    """

    vocab_size: int = 50304
    layers: int = 12
    d_model: int = 768
    heads: int = 12
    head_width: int | None = None
    kv_heads: int | None = None
    latent_rank: int | None = None
    latent_query_rank: int | None = None
    latent_rope_width: int | None = None
    latent_value_width: int | None = None
    ffn: int | None = None
    norm: Norm = "layer"
    norm_offset: float = 0.0
    pre_norms: bool = True
    branches: Branches = "sequential"
    post_norms: bool = False
    residual_scale: float = 1.0
    positions: Positions = "learned"
    position_offset: int = 0
    mlp: Activation = "gelu"
    experts: int = 0
    experts_per_token: int = 2
    dense_layers: tuple[int, ...] = ()
    dense_ffn: int | None = None
    shared_ffn: int = 0
    shared_gate: bool = False
    router: Router = "softmax"
    router_normalise: bool = True
    router_scale: float = 1.0
    router_groups: int = 1
    router_groups_per_token: int = 1
    router_group_best: int = 2
    router_balance_rate: float = 0.0
    balance_loss: float = 0.01
    z_loss: float = 0.0
    embedding_scale: float = 1.0
    tied: bool = True
    outputs: int | None = None
    head_bias: bool = False
    biases: bool = True
    qkv_biases: bool = False
    out_bias: bool = False
    norm_biases: bool = False
    qk_norm: bool = False
    qk_norm_joint: bool = False
    qk_norm_rotated: bool = False
    attention_gate: bool = False
    recurrent_layers: tuple[int, ...] = ()
    recurrent: Recurrent = "gated_delta"
    recurrent_heads: int | None = None
    recurrent_key_heads: int | None = None
    recurrent_width: int = 128
    recurrent_key_width: int = 128
    recurrent_pre_norms: bool = False
    recurrent_negative: bool = False
    recurrent_norm_eps: float | None = None
    conv_width: int = 4
    attention_sinks: bool = False
    query_scalar: float | None = None
    sliding_window: int | None = None
    sliding_window_pattern: int | None = None
    sliding_window_layers: tuple[int, ...] | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_divisor: float = 1.0
    max_seq_len: int = 1024
    dropout: float = 0.0
    rope_theta: float = 10000.0
    rope_fraction: float = 1.0
    rope_interleaved: bool = False
    no_rope_layers: tuple[int, ...] = ()
    rope_local_theta: float | None = None
    rope_scaling: RopeScaling = "none"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_len: int = 8192
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    rope_attention_factor: float | None = None
    rope_short_factors: tuple[float, ...] = ()
    rope_long_factors: tuple[float, ...] = ()
    rope_query_growth: float = 0.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    scan: bool = True
    attention: AttentionKernel = "auto"
    loss_chunk: int = 2048
    token_tile: int = TILE

    def __post_init__(self) -> None:
        check_model(self)
        count = parameter_count(self)
        require(count <= _MAX_PARAMETERS, f"{count:.3g} parameters: at most {_MAX_PARAMETERS:.0e}")

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
        """Width of all heads' outputs together."""
        return self.heads * self.value_dim

    @property
    def qkv_width(self) -> int:
        """Width of all heads' queries, keys and values together."""
        return (self.heads + self.key_value_heads) * self.head_dim + self.key_value_heads * self.value_dim

    @property
    def rope_width(self) -> int:
        """Elements of a head that are rotated."""
        if self.latent_rope_width is not None:
            return self.latent_rope_width
        return int(self.head_dim * self.rope_fraction)

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
        """Total hidden width of the MLPs that a token passes through in a block."""
        return self.experts_per_token * self.ffn_width + self.shared_ffn if self.experts else self.ffn_width

    @property
    def mlps_per_token(self) -> int:
        """Number of MLPs that a token passes through in a block."""
        return self.experts_per_token + (self.shared_ffn > 0) if self.experts else 1

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
        return self.mlp in ("swiglu", "geglu", "swiglu_clamped")

    @property
    def value_heads(self) -> int:
        """Heads of values of a recurrent layer, recurrent_heads resolved."""
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
        """Whether every layer is recurrent, as in the config of one that is."""
        return len(self.recurrent_layers) == self.layers

    def of_layer(self, number: int) -> "GPTConfig":
        """The config of a model whose layers are all like this one."""
        own = self
        if self.recurrent_pre_norms:
            own = replace(own, recurrent_pre_norms=False)
            if number in self.recurrent_layers:
                own = replace(own, pre_norms=True, post_norms=False)
        if number in self.dense_layers:
            own = replace(own, experts=0, ffn=self.dense_ffn, dense_layers=(), dense_ffn=None)
        if self.recurrent_layers and not self.all_recurrent:
            every = tuple(range(self.layers))
            own = replace(own, recurrent_layers=every if number in self.recurrent_layers else ())
        return own

    @property
    def order(self) -> tuple[int, ...]:
        """The kind of each layer: whether it is recurrent and whether it has experts; numbers from 0."""
        dense, recurrent = set(self.dense_layers), set(self.recurrent_layers)
        kinds = [(number in dense, number in recurrent) for number in range(self.layers)]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        return tuple(numbers[kind] for kind in kinds)

    @property
    def kinds(self) -> tuple[tuple["GPTConfig", int], ...]:
        """The configs of the kinds of layers, and how many there are."""
        counts = Counter(self.order)
        return tuple((self.of_layer(self.order.index(kind)), count) for kind, count in counts.items())

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """The index of each layer among those that have a cache like it: recurrent ones, or the others."""
        recurrent, seen = set(self.recurrent_layers), [0, 0]
        found = []
        for number in range(self.layers):
            found.append(seen[number in recurrent])
            seen[number in recurrent] += 1
        return tuple(found)

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
    attention = c.d_model * c.attention_width * (1 + c.attention_gate)
    if c.all_recurrent:
        attention = _recurrent_matrices(c)
    elif c.latent_rank is None:
        attention += c.d_model * c.qkv_width
    else:
        ranks = c.latent_rank + c.rope_width + (c.latent_query_rank or 0)
        queries = c.heads * c.head_dim * (c.latent_query_rank or c.d_model)
        attention += c.d_model * ranks + queries + c.latent_rank * latent_outputs(c)
    hidden = c.experts * c.ffn_width + c.shared_ffn if c.experts and not active else c.active_ffn_width
    routers = c.experts + c.shared_gate if c.experts else 0
    return attention + c.d_model * ((3 if c.gated else 2) * hidden + routers)


def _recurrent_matrices(c: GPTConfig) -> int:
    """Elements of a recurrent layer's projections: its convolution's inputs, gates, steps and outputs."""
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
    norms = 2 * (c.pre_norms + c.post_norms) - (c.branches == "parallel_one_norm")
    block = _block_matrices(c, active=active) + norms * _norm_parameters(c)
    if c.all_recurrent:
        own = {
            "gated_delta": 2 * c.value_heads + c.recurrent_width,
            "mamba2": 3 * c.value_heads + c.recurrent_values + c.conv_channels,
            "short_conv": 0,
        }
        return block + c.conv_width * c.conv_channels + own[c.recurrent]
    if c.qk_norm:
        block += (c.heads + c.key_value_heads if c.qk_norm_joint else 2) * c.head_dim
    block += (c.latent_rank or 0) + (c.latent_query_rank or 0)  # the scales of their norms
    if c.biases or c.qkv_biases:
        block += c.qkv_width
    if c.biases or c.out_bias:
        block += c.d_model
    if c.biases:
        mlp = (2 if c.gated else 1) * c.ffn_width + c.d_model
        counted = c.experts_per_token if active else c.experts
        block += counted * mlp + c.experts if c.experts else mlp
    if c.attention_sinks:
        block += c.heads
    return block


def describe_parameters(config: GPTConfig) -> str:
    """The number of parameters as text, for a mixture of experts also the number that one token meets."""
    text = f"{parameter_count(config):,} parameters"
    return f"{text} ({parameter_count(config, active=True):,} active)" if config.experts else text


def flops_per_token(config: GPTConfig, seq_len: int) -> int:
    """Floating-point operations of one training token, forward and backward.

    Each weight that multiplies the token counts 6. That includes the output projection and the token's
    experts, but no embedding look-ups. Each token that a position attends to in a layer (``attended_tokens``)
    counts 6 x heads x (head_dim + value_dim). Recurrent layers count ``recurrence_flops`` instead.

    As in PaLM (Chowdhery et al., 2022, appendix B), recomputation is not counted. Unlike in PaLM, causal
    masking is deducted: in long rows the masked pairs would lift the figure above the chip's peak. Model
    FLOPs utilisation is this times tokens per second, divided by the peak.

    Raises:
        ConfigurationError: seq_len is below 1 or above config.max_seq_len.
    """
    if not 1 <= seq_len <= config.max_seq_len:
        raise ConfigurationError(f"seq_len = {seq_len}: from 1 to max_seq_len = {config.max_seq_len}")
    matrices = sum(count * _block_matrices(kind, active=True) for kind, count in config.kinds)
    matrices += config.output_rows * config.d_model
    attention = round(pair_flops(config) * attended_tokens(config, seq_len))
    return 6 * matrices + attention + len(config.recurrent_layers) * recurrence_flops(config)


def recurrence_flops(config: GPTConfig) -> int:
    """Floating-point operations of a recurrent layer without its projections, for a token.

    The gated delta rule reads the state by key and by query, and writes it once: 2 each for its elements, and
    twice as many in the backward pass. Mamba-2 does not read it by key.
    """
    state = config.value_heads * config.recurrent_key_width * config.recurrent_width
    rule = {"gated_delta": 18, "mamba2": 12, "short_conv": 0}[config.recurrent] * state
    return rule + 6 * config.conv_width * config.conv_channels


def pair_flops(config: GPTConfig) -> int:
    """Floating-point operations of a layer's attention for one query and key, forward and backward."""
    return 6 * config.heads * (config.head_dim + config.value_dim)


def attended_tokens(config: GPTConfig, seq_len: int) -> float:
    """Tokens that a position attends to: the mean over positions, summed over layers.

    A layer without a window counts half of the row. A window w counts w - w^2 / (2 seq_len). Recurrent layers
    add none.
    """
    window = min(seq_len, config.sliding_window or seq_len)
    recurrent = set(config.recurrent_layers)
    layers = enumerate(config.windowed)
    reached = (window if windowed else seq_len for number, windowed in layers if number not in recurrent)
    return sum(reach - reach**2 / (2 * seq_len) for reach in reached)
