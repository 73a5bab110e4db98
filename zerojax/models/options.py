"""The settings of a decoder in groups, which ``GPTConfig`` joins. Their fields are the keys of [model]."""

from dataclasses import dataclass
from typing import Literal

from zerojax.experts.mlp import Activation
from zerojax.schedule.tiles import TILE

Norm = Literal["layer", "rms"]
Positions = Literal["learned", "rope"]
Branches = Literal["sequential", "parallel", "parallel_one_norm"]
Router = Literal["softmax", "sigmoid"]
RopeScaling = Literal["none", "linear", "llama3", "dynamic", "yarn", "longrope", "proportional"]
Rotation = Literal["full", "local", "none"]
Recurrent = Literal["gated_delta", "kimi_delta", "mamba2", "short_conv"]
AttentionKernel = Literal["auto", "cudnn", "flash_attention_4", "xla"]
VOCABULARY_TILE = 64
"""The columns of the logits are padded to a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """The residual stream and the blocks that add to it.

    Attributes:
        layers: Number of blocks.
        d_model: Width of the residual stream.
        norm: "layer" (with a bias when biases) or "rms".
        norm_offset: Added to the scales of RMS norms, whose weights then begin at 1 - norm_offset (1 in
            Gemma).
        norm_eps: Added to the variance inside the norms.
        pre_norms: Whether the input of each residual branch is normed.
        post_norms: Whether the output of each residual branch is normed (Gemma 2, and OLMo 2 without
            pre_norms).
        branches: "sequential" means that the MLP reads the residual stream after attention has added to it.
            With "parallel" both read the same input through separate norms (GPT-NeoX). With
            "parallel_one_norm" they share the norm (Cohere).
        mlp_layers: If set, each layer has one branch. These layers have the MLP or the experts, and the
            others have attention or a recurrent layer (Nemotron-H). None gives each layer both.
        residual_scale: Factor of each residual branch's output (Granite).
        layer_inputs: Width of an input that each layer has for each token, beside the residual stream
            (per-layer embeddings, Gemma 4 E2B). 0 means none. It is the sum of a second embedding's row and a
            projection of the token embedding. A gate multiplies it after the MLP.
        layer_scale: Whether a layer's output is multiplied by a number of that layer (Gemma 4). The number is
            state: it begins at 1, and training keeps it.
        biases: Whether linear layers and layer norms have biases.
        norm_biases: Whether layer norms have biases although linear layers have none (StableLM).
        dropout: Probability of zeroing an element of the embedding and of each residual branch.
        init_std: Standard deviation of the initial weights; the projections into the residual
            stream get init_std / sqrt(2 layers), as in GPT-2.
        scan: Whether the blocks are one scanned `zerojax.Stack`, compiled once, or a list of
            modules, each compiled.
        token_tile: Tokens of a device that pass through a block at a time where the backward pass recomputes
            the block (`zerojax.tiled`). Attention and experts are not tiled.
    """

    layers: int = 12
    d_model: int = 768
    norm: Norm = "layer"
    norm_offset: float = 0.0
    norm_eps: float = 1e-5
    pre_norms: bool = True
    post_norms: bool = False
    branches: Branches = "sequential"
    mlp_layers: tuple[int, ...] | None = None
    residual_scale: float = 1.0
    layer_inputs: int = 0
    layer_scale: bool = False
    biases: bool = True
    norm_biases: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    scan: bool = True
    token_tile: int = TILE


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Attention: its heads, norms and windows, and the kernel that computes it.

    Attributes:
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
        qkv_biases: Whether the query, key and value projections have biases although other layers
            have none (Qwen2).
        out_bias: Whether the output projection of attention has a bias although other layers have none.
        qk_norm: Whether each head of the queries and keys goes through an RMS norm before it is
            rotated (Qwen3).
        qk_norm_joint: Whether that norm covers all heads together (OLMo 2).
        qk_norm_rotated: Whether that norm follows the rotation (HunYuan).
        value_norm: Whether each head of the values goes through an RMS norm without a scale (Gemma 4).
        keys_as_values: Whether a head's values are its keys, before their norm and rotation (Gemma 4). Layers
            with the sliding window have values of their own.
        full_head_width: Width of a head in layers without the sliding window, if it differs (Gemma 4).
        full_kv_heads: Key and value heads in layers without the sliding window, if their number differs.
        kv_shared_layers: Number of layers at the end that have no keys and values. Each reads the keys and
            values of the last earlier layer with the same window (Gemma 4 E2B).
        kv_shared_ffn: Hidden width of the MLP in these layers; None means the same as in the others.
        attention_gate: Whether each head's output is multiplied by the sigmoid of a projection of the block's
            input (Qwen3-Next).
        attention_sinks: Whether each head's softmax has one more, learned score without a value (gpt-oss).
        query_scalar: Attention scores are divided by the square root of this; None means the width of
            a head.
        attention_softcap: Attention scores s become cap x tanh(s / cap) (Gemma 2); None means they do
            not. Only XLA's kernel can do this.
        sliding_window: Tokens that a position attends to, itself included (Mistral); None means
            itself and all earlier ones.
        sliding_window_pattern: In each group of this many layers, the last layer attends to all earlier
            positions (2 in Gemma 2, 6 in Gemma 3). None gives all layers the window.
        sliding_window_layers: In place of a pattern, the layers with the window; the others attend to all
            earlier positions (Qwen2).
        attention: The kernel: "cudnn", "flash_attention_4" (of the package fa4-jax), "xla" or "auto". On a
            GPU that supports the dtype and head width, "auto" is FlashAttention-4 for packed documents and
            for layers with different windows, and cuDNN's flash attention otherwise. Elsewhere it is "xla".
            On Hopper FlashAttention-4 is faster than cuDNN for all rows, but its gradients are not
            deterministic: a repeated step differs by rounding.
    """

    heads: int = 12
    head_width: int | None = None
    kv_heads: int | None = None
    latent_rank: int | None = None
    latent_query_rank: int | None = None
    latent_rope_width: int | None = None
    latent_value_width: int | None = None
    qkv_biases: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_joint: bool = False
    qk_norm_rotated: bool = False
    value_norm: bool = False
    keys_as_values: bool = False
    full_head_width: int | None = None
    full_kv_heads: int | None = None
    kv_shared_layers: int = 0
    kv_shared_ffn: int | None = None
    attention_gate: bool = False
    attention_sinks: bool = False
    query_scalar: float | None = None
    attention_softcap: float | None = None
    sliding_window: int | None = None
    sliding_window_pattern: int | None = None
    sliding_window_layers: tuple[int, ...] | None = None
    attention: AttentionKernel = "auto"


@dataclass(frozen=True, kw_only=True)
class RecurrentOptions:
    """Layers with a state of fixed size in place of attention.

    Attributes:
        recurrent_layers: The layers that have a recurrent layer in place of attention (three of four in
            Qwen3.5).
        recurrent: Its kind. Linear attention by the gated delta rule is "gated_delta" (Gated DeltaNet). With
            "kimi_delta" each channel of the keys decays at its own rate (Kimi Delta Attention). Others are
            "mamba2", and "short_conv", a gated convolution over the last tokens (LFM2) that reads conv_width
            only.
        recurrent_heads: Heads of values; None means as many as heads.
        recurrent_key_heads: Heads of queries and keys, a divisor; None means as many. Mamba-2's groups.
        recurrent_width: Width of a head's values.
        recurrent_key_width: Width of a head's queries and keys, Mamba-2's state.
        recurrent_pre_norms: Whether recurrent layers norm the inputs of their branches, and not the outputs.
            Then pre_norms and post_norms are for the other layers (OLMo Hybrid).
        recurrent_negative: "gated_delta", "kimi_delta": whether a token moves the state by up to twice its
            error, which allows negative eigenvalues (2411.12537).
        recurrent_norm_eps: "gated_delta", "kimi_delta": norm_eps of the norm of heads, if it differs from the
            others.
        recurrent_step_min: "mamba2": the smallest step of a token (0.001 in Nemotron-H).
        conv_width: Tokens that the convolution of a recurrent layer sees, the token itself included.
    """

    recurrent_layers: tuple[int, ...] = ()
    recurrent: Recurrent = "gated_delta"
    recurrent_heads: int | None = None
    recurrent_key_heads: int | None = None
    recurrent_width: int = 128
    recurrent_key_width: int = 128
    recurrent_pre_norms: bool = False
    recurrent_negative: bool = False
    recurrent_norm_eps: float | None = None
    recurrent_step_min: float = 0.0
    conv_width: int = 4


@dataclass(frozen=True, kw_only=True)
class PositionOptions:
    """How attention learns the positions of tokens.

    Attributes:
        max_seq_len: The longest sequence, in tokens.
        positions: "learned" (a table of max_seq_len rows) or "rope" (Su et al., 2021).
        position_offset: Unused rows of the learned table before the row of position 0; OPT has 2.
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
            bounds. "longrope": each by a separate factor (Phi-3). "proportional": all by rope_factor.
            Pairs then span the whole head, and rope_fraction of them are rotated (Gemma 4).
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
    """

    max_seq_len: int = 1024
    positions: Positions = "learned"
    position_offset: int = 0
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


@dataclass(frozen=True, kw_only=True)
class MLPOptions:
    """The MLP of each block, or its experts and their router.

    Attributes:
        mlp: "gelu" (the tanh form, as in GPT-2), "gelu_exact", "relu" (OPT), "relu2" (its square), or gated:
            "swiglu" (LLaMA), "geglu" (of the tanh form, Gemma) or "swiglu_clamped" (gpt-oss).
        ffn: Hidden width of the MLP, or of each expert. None means 4 d_model, or if gated 8/3 d_model rounded
            up to a multiple of 256, as in LLaMA (Touvron et al., 2023).
        experts: Number of MLPs in each block. A router chooses some of them for each token (Mixtral). 0 makes
            one MLP for all tokens. biases = true gives experts and the router biases.
        experts_per_token: Experts that each token goes to. Read only with experts, like the following fields
            up to z_loss.
        dense_layers: The layers with one MLP for all tokens in place of experts (the first ones in DeepSeek).
            A scanned model has a stack for each run of equal layers.
        dense_ffn: Hidden width of the MLP in dense_layers; None means the default of ffn.
        shared_ffn: Hidden width of an expert that all tokens go to in addition (DeepSeek); 0 means none.
        shared_gate: Whether that expert's output is multiplied by a gate, the sigmoid of a product with the
            token (Qwen2-MoE).
        expert_latent: Width of the projection of a token that experts read and write in place of the token;
            0 means none (Nemotron 3 Super). The router and the shared expert read the token.
        shared_norms: Whether that expert and the others together each have norms for input and output.
            The router then reads the residual stream through another norm and scale, and each expert's weight
            has a trained factor (Gemma 4).
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
    """

    mlp: Activation = "gelu"
    ffn: int | None = None
    experts: int = 0
    experts_per_token: int = 2
    dense_layers: tuple[int, ...] = ()
    dense_ffn: int | None = None
    shared_ffn: int = 0
    shared_gate: bool = False
    expert_latent: int = 0
    shared_norms: bool = False
    router: Router = "softmax"
    router_normalise: bool = True
    router_scale: float = 1.0
    router_groups: int = 1
    router_groups_per_token: int = 1
    router_group_best: int = 2
    router_balance_rate: float = 0.0
    balance_loss: float = 0.01
    z_loss: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """The token embedding, and the output projection with its loss.

    Attributes:
        vocab_size: Number of tokens. A multiple of 128 keeps the logit matmuls on tensor cores.
        embedding_scale: Factor of the token embedding (sqrt(d_model) in Gemma). A tied output projection
            is not scaled.
        tied: Whether the output projection is the token embedding.
        outputs: Rows of the output projection; None means vocab_size. 1 makes a model of scores, such as a
            reward model, for `zerojax posttrain`; it needs tied = false.
        head_bias: Whether the output projection has a bias (Phi); then it is not tied.
        logit_softcap: Logits l become cap x tanh(l / cap); None means they do not.
        logit_divisor: Divisor of the logits (Granite), applied before any cap.
        loss_chunk: Tokens whose logits exist at a time in the loss; fp32 logits take
            4 x loss_chunk x vocab_size bytes.
    """

    vocab_size: int = 50304
    embedding_scale: float = 1.0
    tied: bool = True
    outputs: int | None = None
    head_bias: bool = False
    logit_softcap: float | None = None
    logit_divisor: float = 1.0
    loss_chunk: int = 2048
