"""The work of a decoder in one micro-batch on one device: FLOPs and activation bytes.

Let t be the tokens, s the tokens per sequence, d the model's width and f the width of the MLP. The width of
queries, keys and values is q = (heads + 2 kv_heads) head_dim, and the width of the attention's output is a.

**FLOPs.** A block of matrices of w elements takes 2 w t FLOPs forward and twice as many backward. Causal
attention takes 2 a s t forward, half of the full square's 4 a s t, and twice as many backward. In a sliding
window of w tokens it takes 4 a t (w - w^2 / 2s) forward. XLA's attention always computes the full square. The
backward kernels of cuDNN and FlashAttention-4 compute the scores again, half of the forward pass. A row
counts as one document; packed documents take less. Recomputing a block in the backward pass takes its forward
FLOPs once more, except the attention's under ``remat="attention"``.

**Activations.** A layer keeps elements from its forward pass for its backward pass. The table also has the
most that are alive in addition during the backward pass. Both were counted in programs compiled for H100
(docs/planner.md has the check):

========= ============================== =========================
remat     kept, per token and layer      working, per token
========= ============================== =========================
full      d                              9 d + 2 q + 2 f (SwiGLU 3 f)
attention d + a                          the same
none      2 d + q + a + f (SwiGLU 2 f)   1.5 d + q + 2 f
========= ============================== =========================

With latents of l elements, including latent queries and rotary parts, "none" keeps l more. Products with
weights read 2 d + a + f elements a token and layer, and make 2 d + q + f (SwiGLU 2 f). In fp8 these elements
are converted. A layer's own input of i elements takes 4 i more, with its copies and its gradient. "none" also
keeps d + 2 i.

**Tiles.** Above ``token_tile`` tokens, blocks without experts that recompute go through their projections and
their MLP in tiles of T tokens. Then q + 2 a + d are alive a token: the operands and results of attention, and
the gradients of its output and of the block's output. "attention" keeps a of these elements. A tile takes
4 d + 4 f (gated 6.5 f) a token.

**Attention's backward pass** works at another moment. It takes 2 q + 2 a + d with the gradients, and the
kernel's workspace (``backward_workspace``). "attention" and "none" keep a of these, and "none" also q.

**Experts.** f is the width of all experts of a token together. Products read and make a further d for each
expert. While a layer works, it has four copies of the rows of k experts a token, 4 k d. If routers send a
node's tokens to few devices, these take more.

**Shared rows.** If k devices share a row, t is 1/k of its tokens. Attention then reads and makes heads for
all tokens of the row, e elements a token in all: queries, keys, values and outputs, including repeated keys
and heads of zeros. A device sends (k - 1)/k e t of them in each pass, and once more where they are
recomputed. While attention works, in tiles, they replace the device's own heads, but its outputs exist twice.
Without tiles they exist in addition. "none" keeps them instead of q, and the outputs twice.

**Scores.** cuDNN's attention and FlashAttention-4 keep one fp32 number per head. XLA's attention has fp32
scores, heads x s per token. "none" keeps them once. The backward pass uses 2.7 times their memory, and 3 q
more in another layout.

**Recurrent layers** have the convolution's channels and the gates in place of q, and all heads' outputs in
place of a. With "none" the channels are kept before and after the convolution, and as heads. Chunks of C
tokens make products of C elements for each head and token. Their backward pass always computes them again,
and then holds a state for each chunk. The work inside chunks counts as executed FLOPs, but the model's FLOPs
have the rule token by token.

**Loss.** It holds one chunk's logits in fp32, their gradient in the compute dtype, and six widths per token.
At the same time the last layer keeps as much as with "none", because its backward pass is next and XLA does
not recompute it. With several chunks the loss sums the gradient of the unembedding in fp32. With a single
chunk it keeps the logits' gradient, and the matmul for the unembedding's gradient is last. A frozen
unembedding has no gradient, so XLA removes the matmul and its sums. A frozen embedding has no gradient to
combine at the end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pallas_kernels.delta_chunks_reference import CHUNK
from zerojax.models.attention import HOPPER, has_flash
from zerojax.models.config import GPTConfig
from zerojax.models.options import VOCABULARY_TILE
from zerojax.models.shared_rows import spread_of
from zerojax.models.size import attention_flops, flops_per_token, pair_flops, recurrence_flops
from zerojax.schedule.tiles import tokens_of_tile
from zerojax.sharding.layout import ParamLayout
from zerojax.train.spec import TrainSpec
from zerojax.zero_config.config import ZeroConfig
from zerojax.zero_config.options import Remat

ITEM = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Work:
    """One micro-batch on one device.

    Attributes:
        tokens: number of tokens.
        forward: FLOPs executed in the forward pass, including the head with both its gradients.
        backward: FLOPs executed in the backward pass of the blocks, including recomputation.
        weights_forward: FLOPs of ``forward`` for products with the blocks' weights.
        weights_backward: FLOPs of ``backward`` for products with the blocks' weights.
        cudnn_forward: FLOPs of ``forward`` in cuDNN's attention.
        cudnn_backward: FLOPs of ``backward`` in cuDNN's attention.
        read: elements that products with the blocks' weights read, in all layers.
        made: elements that products with the blocks' weights make, in all layers.
        model_flops: FLOPs for the MFU: no recomputation, causal attention, no gradients of frozen matrices.
        stream: bytes of the residual stream between two layers.
        kept: bytes of activations kept for the backward pass, in all layers.
        working: bytes of activations in use during one layer's backward pass.
        loss: bytes while the loss is computed.
        head: bytes of the unembedding's gradient, or kept for it, during the backward pass of the blocks; 0
            if it is frozen.
        tables: bytes of the trained tables' gradients at the end, where they are added (the embedding's in
            fp32).
        exchanged: bytes of tokens that a device sends to other devices of its node, which have their experts.
        heads: bytes that a device sends for attention to the devices of its node that share its rows.
    """

    tokens: int
    forward: float
    backward: float
    weights_forward: float
    weights_backward: float
    cudnn_forward: float
    cudnn_backward: float
    read: int
    made: int
    model_flops: float
    stream: int
    kept: int
    working: int
    loss: int
    head: int
    tables: int
    exchanged: int = 0
    heads: int = 0

    @property
    def flops(self) -> float:
        """FLOPs executed in both passes of one device."""
        return self.forward + self.backward


def flash_attention(config: GPTConfig, dtype: str, *, generation: int = HOPPER) -> bool:
    """Whether attention on a GPU is a kernel that keeps no scores: cuDNN's, or FlashAttention-4."""
    takes = dtype == "bfloat16" and all(
        has_flash(kind.head_dim, kind.value_dim, generation=generation) for kind, _ in config.kinds
    )
    if config.attention == "auto":
        return takes and config.attention_softcap is None
    return config.attention != "xla"


def backward_workspace(heads: int, kv_heads: int, head_dim: int) -> int:
    """Bytes a token of the workspace of cuDNN's attention in its backward pass.

    cudnn-frontend sums gradients of queries in fp32, and has one fp32 number a head. With grouped heads it
    makes bf16 gradients of keys and values for each query head, and sums over groups afterwards
    (``CompositeSDPABackwardNode``: dQ_accum, softmax_sum, dK_fullhead, dV_fullhead). With this workspace,
    programs compiled for 32 heads over 8 take the temporaries that XLA reported on an H100, within 3%
    (docs/long-context.md). Without groups the graph has no dK_fullhead and dV_fullhead, and was not measured.
    """
    of_groups = 2 * 2 * head_dim if kv_heads < heads else 0
    return heads * (4 * head_dim + 4 + of_groups)


def _kernel_workspace(c: GPTConfig, heads: int, kv_heads: int) -> int:
    """Bytes a token of the workspace of ``c.attention`` in its backward pass.

    FlashAttention-4 has two fp32 numbers a head, and sums over groups in fp32.
    """
    if c.attention != "flash_attention_4":
        return backward_workspace(heads, kv_heads, c.head_dim)
    of_groups = 2 * 4 * kv_heads * c.head_dim if kv_heads < heads else 0
    return heads * (4 * c.head_dim + 8) + of_groups


def sequences_of(rows: int, devices: int, zero: ZeroConfig) -> int:
    """Sequences of a micro-batch on one device, or on the devices that share them; at least one."""
    return max(1, rows * zero.sequence_parallel // (devices * zero.accumulate))


def work_of(
    spec: TrainSpec, config: GPTConfig, *, sequences: int, length: int, generation: int = HOPPER
) -> Work:
    """The work of a decoder of shape ``config`` with the options of its train spec; see ``decoder_work``."""
    zero, dtype = spec.zero, str(spec.zero.compute_dtype)
    work = decoder_work(
        config,
        remat=zero.remat,
        dtype=dtype,
        sequences=sequences,
        length=length,
        frozen=spec.frozen,
        sharing=zero.sequence_parallel,
        generation=generation,
    )
    spread = any(leaf.parts > 1 for group in spec.unit_groups for leaf in group.every)
    others = spec.world.local - 1 if spread else 0
    return replace(
        work,
        exchanged=others
        * work.tokens
        * len(config.expert_layers)
        * _exchanged_bytes(config, zero.remat, dtype),
        # The gradients of frozen matrices take no FLOPs.
        model_flops=work.model_flops - share_of(spec, lambda leaf: leaf.frozen) * work.weights_forward,
    )


def share_of(spec: TrainSpec, some: Callable[[ParamLayout], bool]) -> float:
    """The fraction of the elements of all units' matrices that is in the matrices selected by ``some``."""
    every = (leaf for group in spec.unit_groups for leaf in group.every)
    matrices = [leaf for leaf in every if len(leaf.shape) > 1 and leaf.path[-1] != "embedding"]
    return sum(leaf.count for leaf in matrices if some(leaf)) / max(1, sum(leaf.count for leaf in matrices))


def decoder_work(
    config: GPTConfig,
    *,
    remat: Remat,
    dtype: str,
    sequences: int,
    length: int,
    head: bool = True,
    frozen: Sequence[ParamLayout] = (),
    sharing: int = 1,
    generation: int = HOPPER,
) -> Work:
    """The work of a decoder.

    Args:
        config: its shape.
        remat: as ``ZeroConfig.remat``.
        dtype: of compute, "bfloat16" or "float32".
        sequences: sequences of a micro-batch on one device, or on the devices that share them.
        length: tokens of a sequence.
        head: False for a bare stack of blocks, without embedding, unembedding and loss.
        frozen: the parameters of ``zerojax.models.GPT`` that are not trained (``TrainSpec.frozen``). They
            change the bytes and the head's FLOPs, but not the blocks' FLOPs.
        sharing: how many devices share a sequence (``ZeroConfig.sequence_parallel``).
        generation: the GPU's major compute capability, which decides the attention kernel.

    Raises:
        ConfigurationError: the sequence is longer than the model takes.
    """
    c, tokens = config, sequences * length // sharing
    flash = flash_attention(config, dtype, generation=generation)
    model_flops = tokens * flops_per_token(c, length)
    unembedding = 6 * c.output_rows * c.d_model * tokens
    matrices = model_flops - unembedding - tokens * attention_flops(c, length)
    matrices -= tokens * len(c.recurrent_layers) * recurrence_flops(c)
    modules = {leaf.path[0] for leaf in frozen}
    spared = unembedding / 3 if _unembedding(c) in modules else 0  # its gradient
    attended = len(c.attention_layers)
    attention = tokens * _computed_flops(c, length, flash=flash)
    recurrence = 3 * tokens * _over_layers(c, _chunk_flops)
    wide = max((kind for kind, _ in c.kinds), key=lambda kind: kind.qkv_width)
    spread = spread_of(c.heads, wide.key_value_heads, sharing)
    attention *= spread.heads / c.heads
    # The backward pass begins with a stack's last layer and does not recompute it, except in tiles.
    all_but_last = 1 - 1 / c.layers if c.scan else 1.0
    matrices_again = 0.0 if remat == "none" else matrices / 3
    matrices_again *= 1.0 if _in_tiles(c, remat, tokens) else all_but_last
    scores = c.head_dim / (c.head_dim + c.value_dim) * attention / 3
    attention_again = (all_but_last * attention / 3 if remat == "full" else 0) + (scores if flash else 0)
    recurrence_again = recurrence / 3 * (1 + (all_but_last if remat == "full" else 0))
    again = matrices_again + attention_again + recurrence_again
    cudnn = flash and c.attention != "flash_attention_4"
    item = ITEM[dtype]
    fp32 = 4 * attended * _kept_fp32(c, remat, length, flash=flash)
    kept = tokens * (item * _over_layers(c, lambda kind: _kept_width(kind, remat)) + fp32)
    back = spread.heads * wide.value_dim
    there = (spread.heads + spread.copies) * wide.head_dim + spread.copies * wide.value_dim
    sent = tokens * item * (there + back) if sharing > 1 else 0
    exchanged = _over_layers(c, partial(_exchanged_width, sharing=sharing)) if sharing > 1 else 0
    working = item * max(_working(kind, remat, tokens) for kind, _ in c.kinds)
    # In tiles the exchanged heads replace the device's own, but its outputs exist twice.
    working += min(sent, tokens * item * back) if _in_tiles(c, remat, tokens) else sent
    if sent and remat == "none":
        kept += tokens * attended * item * (there - wide.qkv_width + back)
    if flash:
        read = {"full": there + back, "attention": there, "none": 0}[remat]
        workspace = _kernel_workspace(wide, spread.heads, spread.copies)
        working = max(working, tokens * (item * (read + there + back + c.d_model) + workspace))
    else:
        working += tokens * (2.7 * 4 * c.heads * length + 3 * item * wide.qkv_width)
    if c.recurrent_layers:
        working = max(working, tokens * max(_chunk_bytes(kind, item) for kind, _ in c.kinds))
    distance = {"loss": tokens * c.d_model * (4 + item), "head": 0, "tables": 0}  # a bare stack's loss, fp32
    at_loss = _head_bytes(c, tokens, item, modules) if head else distance
    if not _in_tiles(c, remat, tokens):
        kind = c.kinds[-1][0]
        at_loss["loss"] += tokens * item * (_kept_width(kind, "none") - _kept_width(kind, remat))
    return Work(
        tokens=tokens,
        forward=(matrices + attention + recurrence) / 3 + (unembedding - spared if head else 0),
        backward=2 * (matrices + attention + recurrence) / 3 + again,
        weights_forward=matrices / 3,
        weights_backward=2 * matrices / 3 + matrices_again,
        cudnn_forward=cudnn * attention / 3,
        cudnn_backward=cudnn * (2 * attention / 3 + attention_again),
        read=tokens * _over_layers(c, _read_width),
        made=tokens * _over_layers(c, _made_width),
        model_flops=model_flops - (spared if head else unembedding),
        stream=tokens * c.d_model * item,
        kept=kept,
        working=round(working),
        heads=tokens * item * exchanged * (sharing - 1) // sharing * (2 if remat == "none" else 3),
        **at_loss,
    )


def _over_layers(c: GPTConfig, width: Callable[[GPTConfig], int]) -> int:
    """The sum of a width over all layers."""
    return sum(count * width(kind) for kind, count in c.kinds)


def _read_width(c: GPTConfig) -> int:
    """Elements per token that products with a layer's weights read."""
    ranks = (c.latent_rank or 0) + (c.latent_query_rank or 0) if c.attention_layers else 0
    own = c.d_model + c.layer_inputs if c.layer_inputs else 0
    return c.has_mixer * c.d_model + c.mlp_inputs_width + ranks + _heads_width(c) + c.active_ffn_width + own


def _made_width(c: GPTConfig) -> int:
    """Elements per token that products with a layer's weights make."""
    made = _projected_width(c) + _latent_width(c) + _mlp_width(c)
    made += c.d_model + c.layer_inputs if c.layer_inputs else 0
    return c.has_mixer * c.d_model + c.mlp_inputs_width + made


def _heads_width(c: GPTConfig) -> int:
    """Elements per token of all heads' outputs."""
    return c.recurrent_values if c.all_recurrent else c.attention_width


def _projected_width(c: GPTConfig) -> int:
    """Elements per token of queries, keys, values and gates, or of a recurrent layer's channels and gates."""
    if c.all_recurrent:
        decays = c.recurrent_keys if c.recurrent == "kimi_delta" else 0  # one for each channel of keys
        return c.conv_channels + c.recurrent_values + decays
    return c.qkv_width + c.attention_gate * c.attention_width


def _chunk_flops(c: GPTConfig) -> int:
    """Forward FLOPs of a recurrent layer for a token besides its projections, chunk by chunk."""
    if not c.all_recurrent or c.recurrent == "short_conv":
        return c.all_recurrent * 2 * c.conv_width * c.conv_channels
    key, value, delta = c.recurrent_key_width, c.recurrent_width, c.recurrent != "mamba2"
    # Inside a chunk: scores, and for the delta rule the system, its inverse and the inverse's products.
    within = 2 * CHUNK * (key + value) + delta * CHUNK * (2 * key + CHUNK // 3 + 2 * (key + value))
    return c.value_heads * (within + (4 + 2 * delta) * key * value) + 2 * c.conv_width * c.conv_channels


def _chunk_bytes(c: GPTConfig, item: int) -> int:
    """Bytes per token in use during a recurrent layer's backward pass; 0 for other layers.

    Each head has queries, keys, removed terms, scores and values in fp32, and a part of a state. The counts,
    which include gradients, are from programs compiled for an H100. "kimi_delta" was not compiled there, and
    takes the gated delta rule's.
    """
    if not c.all_recurrent or c.recurrent == "short_conv":
        return 0
    key, value = c.recurrent_key_width, c.recurrent_width
    of_head = item * (3 * key + CHUNK) + 4 * (CHUNK + 2 * value) + item * key * value // CHUNK
    copies = 3.8 if c.recurrent == "mamba2" else 5.4
    return round(copies * c.value_heads * of_head) + item * (
        4 * c.conv_channels + 2 * c.recurrent_values + c.d_model
    )


def _exchanged_width(c: GPTConfig, sharing: int) -> int:
    """Elements per token that a layer sends and receives if ``sharing`` devices share rows."""
    if c.attention_layers:
        spread = spread_of(c.heads, c.key_value_heads, sharing)
        return (spread.heads + spread.copies) * (c.head_dim + c.value_dim)
    if not c.all_recurrent:
        return 0
    by_head = {
        "gated_delta": 2 * c.value_heads,
        "kimi_delta": c.value_heads + c.recurrent_keys,
        "mamba2": c.value_heads,
        "short_conv": 0,
    }
    keys = 0 if c.recurrent == "short_conv" else c.recurrent_keys // c.recurrent_key_width
    copies = math.lcm(keys, sharing) // keys - 1 if keys else 0  # of a head of keys, for its other devices
    return c.conv_channels + 2 * copies * c.recurrent_keys + c.recurrent_values + by_head[c.recurrent]


def _exchanged_bytes(c: GPTConfig, remat: Remat, dtype: str) -> int:
    """Bytes of a token and its gradients that travel to another device and back in one layer.

    A token travels with a weight and a number for each of its experts, twice if the layer is recomputed. The
    sum of its experts' outputs returns, then also twice if a norm reads it. Gradients travel the same ways.
    """
    token, weights = ITEM[dtype] * c.expert_width, 4 * c.experts_per_token
    there, times = token + 2 * weights, 1 if remat == "none" else 2
    back = token * (times if c.post_norms else 1)
    return there * times + back + token + (token + weights)


def _computed_flops(c: GPTConfig, length: int, *, flash: bool) -> float:
    """FLOPs of a token's attention in all layers, as kernels compute it, forward and backward.

    XLA computes all pairs, and flash kernels skip pairs outside a window. If windows are data, because they
    differ between the layers of a kind, cuDNN gets a mask and computes half of all pairs.
    """
    pairs = sum(count * pair_flops(kind) for kind, count in c.kinds if kind.attention_layers)
    if not flash:
        return pairs * length
    if c.attention == "cudnn" and c.scan and len(set(c.windowed)) > 1 and not c.windows_differ:
        return pairs * length / 2
    return attention_flops(c, length)


def _latent_width(c: GPTConfig) -> int:
    """Elements per token of the latents of keys, values and queries."""
    if c.latent_rank is None or not c.attention_layers:
        return 0
    return c.latent_rank + c.rope_width + (c.latent_query_rank or 0)


def _mlp_width(c: GPTConfig) -> int:
    return c.active_ffn_width * (2 if c.gated else 1)


def _kept_width(c: GPTConfig, remat: Remat) -> int:
    """Elements per token and layer kept for the backward pass, in the compute dtype."""
    own = 4 * c.layer_inputs
    if remat == "full":
        return c.d_model + own
    if remat == "attention":
        return c.d_model + _heads_width(c) + own
    again = 2 * c.conv_channels if c.all_recurrent else 0
    branches = c.has_mixer + c.has_mlp + (c.layer_inputs > 0)
    made = _latent_width(c) + _projected_width(c) + _heads_width(c) + _mlp_width(c) + 2 * c.expert_latent
    return branches * c.d_model + made + again + own + 2 * c.layer_inputs


def _kept_fp32(c: GPTConfig, remat: Remat, length: int, *, flash: bool) -> int:
    """fp32 numbers per token and layer kept for the backward pass: log-sum-exps, or scores."""
    if remat == "full":
        return 0
    if flash:
        return c.heads
    return c.heads * length if remat == "none" else 0


def _working(c: GPTConfig, remat: Remat, tokens: int) -> float:
    """Elements in use during a layer's backward pass outside of attention's kernel, in the compute dtype."""
    rows = 4 * c.experts_per_token * c.expert_width if c.experts else 0
    if remat == "none":
        return tokens * (rows + 1.5 * c.d_model + _projected_width(c) + 2 * c.active_ffn_width)
    whole = tokens * (
        rows + 9 * c.d_model + 2 * _projected_width(c) + (3 if c.gated else 2) * c.active_ffn_width
    )
    if not _in_tiles(c, remat, tokens):
        return whole
    in_attention = _projected_width(c) + (2 if remat == "full" else 1) * _heads_width(c) + c.d_model
    in_tile = 4 * c.d_model + (6.5 if c.gated else 4) * c.active_ffn_width
    return tokens * in_attention + tokens_of_tile(tokens, c.token_tile) * in_tile


def _in_tiles(c: GPTConfig, remat: Remat, tokens: int) -> bool:
    """Whether a layer is computed again in tiles of tokens."""
    return remat != "none" and not c.experts and tokens > c.token_tile


def _unembedding(c: GPTConfig) -> str:
    """The module that makes logits or scores."""
    return "embed" if c.tied and c.outputs is None else "head"


def _head_bytes(c: GPTConfig, tokens: int, item: int, frozen: set[str]) -> dict[str, int]:
    """Bytes of the loss and of the tables' gradients. ``frozen`` names the GPT's frozen modules."""
    chunks = -(-tokens // c.loss_chunk)
    embedding, unembedding = "embed" not in frozen, _unembedding(c) not in frozen
    if c.outputs is not None:  # one chunk, and the embedding's gradient is the only one of its size
        scores, rows = tokens * c.outputs, embedding * c.vocab_size + unembedding * c.outputs
        return {
            "loss": 4 * scores + 8 * tokens * c.d_model * item,
            "head": unembedding * 4 * scores,
            "tables": 4 * rows * c.d_model,
        }
    columns = -(-c.vocab_size // VOCABULARY_TILE) * VOCABULARY_TILE
    logits, table = -(-tokens // chunks) * columns, columns * c.d_model
    sums = 4 * table if unembedding and chunks > 1 else 0
    sums += c.head_bias * item * table  # a copy with the bias as a column
    inputs = c.vocab_size * c.layers * c.layer_inputs * ("layer_inputs" not in frozen)
    return {
        "loss": logits * (4 + item) + sums + 6 * tokens * c.d_model * item,
        "head": unembedding * item * (table if chunks > 1 else logits),
        # A tied table adds both gradients at the end. Otherwise the unembedding's is finished long before.
        "tables": (4 * embedding + item * (unembedding and _unembedding(c) == "embed")) * table + 4 * inputs,
    }
