"""The work of a decoder in one micro-batch on one device: FLOPs and activation bytes.

Let t be the tokens, d the model's width, q = (heads + 2 kv_heads) head_dim the width of queries, keys and
values, a that of the attention's output and f that of the MLP. With latents of l elements, those of queries
and rotary parts included, "none" keeps l more. A block of matrices of w elements takes 2 w t FLOPs forward
and twice that backward; causal attention takes 2 a s t forward at s tokens per sequence (half of the 4 a s t
of a full square) and twice that backward, in a sliding window of w tokens 4 a t (w - w^2 / 2s). XLA's
attention computes the full square in either case. The backward kernels of cuDNN and FlashAttention-4 compute
the scores again, half of the forward pass. A row counts as one document: packed ones take less. Recomputing a
block in the backward pass takes its forward FLOPs once more, under ``remat="attention"`` without the
attention's.

Elements kept from a layer's forward pass for its backward pass, and the most alive in addition during its
backward pass (counted in programs compiled for H100; docs/planner.md has the check):

========= ============================== =========================
remat     kept, per token and layer      working, per token
========= ============================== =========================
full      d                              9 d + 2 q + 2 f (SwiGLU 3 f)
attention d + a                          the same
none      2 d + q + a + f (SwiGLU 2 f)   1.5 d + q + 2 f
========= ============================== =========================

Products with weights read 2 d + a + f elements a token and layer, and make 2 d + q + f (SwiGLU 2 f). In fp8
they are converted.

Above ``token_tile`` tokens, blocks without experts that recompute go through their projections and their MLP
in tiles of T tokens. Then q + 2 a + d are alive a token: what attention reads and makes, and the gradients of
its output and of the block's. "attention" keeps a of these. A tile takes 4 d + 4 f (gated 6.5 f) a token.

At another moment the backward pass of attention works: 2 q + 2 a + d with the gradients, and the kernel's
workspace, ``backward_workspace``. "attention" and "none" keep a of these, and "none" q.

In a mixture f is the width of all experts of a token together, and products read and make a d for each of
these. While a layer works, the rows of k experts a token are there four times, 4 k d. Tokens of a node that
routers send to few devices take more.

Where k devices share a row, t is 1/k of its tokens. Attention then reads and makes heads for all tokens of
the row, e elements a token in all: queries, keys, values and outputs, repeated keys and heads of zeros
included. A device sends (k - 1)/k e t of them in each pass, and once more where they are recomputed. While
attention works they are there instead of the device's own, in tiles the outputs besides, and otherwise all of
them; "none" keeps them instead of q, and the outputs twice.

cuDNN's attention and FlashAttention-4 also keep one fp32 number per head. XLA's has fp32 scores, heads x s
per token, of which "none" keeps one copy and the backward pass uses 2.7, and 3 q more in another layout. The
loss holds one chunk's logits in fp32, their gradient in the compute dtype, and six widths per token. With
them the last layer, whose backward pass is next, keeps what "none" keeps: XLA does not compute it again. With
several chunks it sums the gradient of the unembedding in fp32; with a single chunk the logits' gradient is
kept and that matmul comes last. A frozen unembedding has no gradient, so XLA
removes the matmul and its sums; a frozen embedding has none to combine at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zerojax.models.attention import has_flash
from zerojax.models.config import GPTConfig, attended_tokens, flops_per_token, pair_flops
from zerojax.models.loss import VOCABULARY_TILE
from zerojax.models.shared_rows import spread_of
from zerojax.schedule.tiles import tokens_of_tile
from zerojax.sharding.layout import ParamLayout
from zerojax.train.spec import TrainSpec
from zerojax.zero_config.config import Remat, ZeroConfig

ITEM = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Work:
    """One micro-batch on one device.

    Attributes:
        tokens: predicted.
        forward: FLOPs executed in the forward pass, including the head with both its gradients.
        backward: FLOPs executed in the backward pass of the blocks, including recomputation.
        weights_forward: those of ``forward`` that are products of the blocks' weights.
        weights_backward: those of ``backward``, likewise.
        cudnn_forward: those of ``forward`` that are of cuDNN's attention.
        cudnn_backward: those of ``backward``, likewise.
        read: elements that products with the blocks' weights read, of all layers.
        made: elements that they make.
        model_flops: as the MFU counts them: nothing twice, causal attention, no gradients of frozen matrices.
        stream: bytes of the residual stream between two layers.
        kept: bytes of activations kept for the backward pass, of all layers.
        working: bytes of activations in use during one layer's backward pass.
        loss: bytes while the loss is computed.
        head: bytes of the unembedding's gradient, or kept for it, during the backward pass of the blocks; 0
            if it is frozen.
        tables: bytes of the gradients of tables at the end, where they are added: the embedding's in fp32; of
            those that are trained.
        exchanged: bytes that a device sends to others of its node, of tokens whose experts are there.
        heads: bytes that a device sends to others of its node that share its rows, for attention.
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
        """FLOPs executed in both passes."""
        return self.forward + self.backward


def flash_attention(config: GPTConfig, dtype: str) -> bool:
    """Whether attention runs as cuDNN's kernel or FlashAttention-4 on a GPU, which keep no scores."""
    takes = dtype == "bfloat16" and has_flash(config.head_dim, config.value_dim, since_hopper=True)
    if config.attention == "auto":
        return takes and config.attention_softcap is None
    return config.attention != "xla"


def backward_workspace(heads: int, kv_heads: int, head_dim: int) -> int:
    """Bytes a token that the backward pass of cuDNN's attention takes besides its operands and results.

    cudnn-frontend sums gradients of queries in fp32, and has one fp32 number a head. With grouped heads it
    makes gradients of keys and values for each query head, in bf16 as the operands, and sums over groups
    afterwards (``CompositeSDPABackwardNode``: dQ_accum, softmax_sum, dK_fullhead, dV_fullhead). Programs
    compiled with this for 32 heads over 8 take the temporaries that XLA reported on an H100, within 3%
    (docs/long-context.md). Without groups it is not measured, and the last two are not in that graph.
    """
    of_groups = 2 * 2 * head_dim if kv_heads < heads else 0
    return heads * (4 * head_dim + 4 + of_groups)


def _kernel_workspace(c: GPTConfig, heads: int, kv_heads: int) -> int:
    """That of ``c.attention``; FlashAttention-4 has two fp32 numbers a head, and sums over groups in fp32."""
    if c.attention != "flash_attention_4":
        return backward_workspace(heads, kv_heads, c.head_dim)
    of_groups = 2 * 4 * kv_heads * c.head_dim if kv_heads < heads else 0
    return heads * (4 * c.head_dim + 8) + of_groups


def sequences_of(rows: int, devices: int, zero: ZeroConfig) -> int:
    """Sequences of a micro-batch on one device, or on those that share them; at least one."""
    return max(1, rows * zero.sequence_parallel // (devices * zero.accumulate))


def work_of(spec: TrainSpec, config: GPTConfig, *, sequences: int, length: int) -> Work:
    """The work of a decoder of shape ``config`` under the options of its train spec; see ``decoder_work``.

    ``sequences`` are those of the devices that share them, if they do.
    """
    zero, dtype = spec.zero, str(spec.zero.compute_dtype)
    work = decoder_work(
        config,
        remat=zero.remat,
        dtype=dtype,
        sequences=sequences,
        length=length,
        frozen=spec.frozen,
        sharing=zero.sequence_parallel,
    )
    spread = any(leaf.parts > 1 for group in spec.unit_groups for leaf in group.every)
    others = spec.world.local - 1 if spread else 0
    layers = config.layers - len(config.dense_layers)
    return replace(
        work,
        exchanged=others * work.tokens * layers * _exchanged_bytes(config, zero.remat, dtype),
        # The gradients of frozen matrices take no FLOPs.
        model_flops=work.model_flops - share_of(spec, lambda leaf: leaf.frozen) * work.weights_forward,
    )


def share_of(spec: TrainSpec, some: Callable[[ParamLayout], bool]) -> float:
    """The part that some matrices are of all those of units."""
    matrices = [leaf for group in spec.unit_groups for leaf in group.every if len(leaf.shape) > 1]
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
) -> Work:
    """The work of a decoder.

    Args:
        config: its shape.
        remat: what its blocks recompute.
        dtype: of compute, "bfloat16" or "float32".
        sequences: on one device, or on those that share them, in one micro-batch.
        length: tokens of a sequence.
        head: whether there are embedding, unembedding and loss, unlike in a bare stack of blocks.
        frozen: the parameters of ``zerojax.models.GPT`` that are not trained (``TrainSpec.frozen``). The
            bytes and the head's FLOPs depend on them; the blocks' FLOPs are those of training all.
        sharing: how many devices share a sequence (``ZeroConfig.sequence_parallel``).

    Raises:
        ConfigurationError: the sequence is longer than the model takes.
    """
    c, tokens, flash = config, sequences * length // sharing, flash_attention(config, dtype)
    model_flops = tokens * flops_per_token(c, length)
    unembedding = 6 * c.output_rows * c.d_model * tokens
    per_pair = pair_flops(c) * tokens
    matrices = model_flops - unembedding - per_pair * attended_tokens(c, length)
    modules = {leaf.path[0] for leaf in frozen}
    spared = unembedding / 3 if _unembedding(c) in modules else 0  # its gradient
    attention = per_pair * c.layers * (_computed_tokens(c, length) if flash else length)
    spread = spread_of(c.heads, c.key_value_heads, sharing)
    attention *= spread.heads / c.heads
    # The backward pass begins with a stack's last layer, which has just been computed; tiles are again.
    all_but_last = 1 - len(c.runs) / c.layers if c.scan else 1.0
    matrices_again = 0.0 if remat == "none" else matrices / 3
    matrices_again *= 1.0 if _in_tiles(c, remat, tokens) else all_but_last
    scores = c.head_dim / (c.head_dim + c.value_dim) * attention / 3
    attention_again = (all_but_last * attention / 3 if remat == "full" else 0) + (scores if flash else 0)
    again = matrices_again + attention_again
    cudnn = flash and c.attention != "flash_attention_4"
    item = ITEM[dtype]
    fp32 = 4 * c.layers * _kept_fp32(c, remat, length, flash=flash)
    kept = tokens * (item * _over_layers(c, lambda kind: _kept_width(kind, remat)) + fp32)
    back = spread.heads * c.value_dim
    there = (spread.heads + spread.copies) * c.head_dim + spread.copies * c.value_dim
    sent = tokens * item * (there + back) if sharing > 1 else 0
    working = item * max(_working(kind, remat, tokens) for kind, _ in c.kinds)
    # In tiles the heads are there instead of the device's own, except for outputs, which are there as both.
    working += min(sent, tokens * item * back) if _in_tiles(c, remat, tokens) else sent
    if sent and remat == "none":
        kept += tokens * c.layers * item * (there - c.qkv_width + back)
    if flash:
        read = {"full": there + back, "attention": there, "none": 0}[remat]
        workspace = _kernel_workspace(c, spread.heads, spread.copies)
        working = max(working, tokens * (item * (read + there + back + c.d_model) + workspace))
    else:
        working += tokens * (2.7 * 4 * c.heads * length + 3 * item * c.qkv_width)
    distance = {"loss": tokens * c.d_model * (4 + item), "head": 0, "tables": 0}  # a bare stack's loss, fp32
    at_loss = _head_bytes(c, tokens, item, modules) if head else distance
    if not _in_tiles(c, remat, tokens):
        kind = c.kinds[-1][0]
        at_loss["loss"] += tokens * item * (_kept_width(kind, "none") - _kept_width(kind, remat))
    return Work(
        tokens=tokens,
        forward=(matrices + attention) / 3 + (unembedding - spared if head else 0),
        backward=2 * (matrices + attention) / 3 + again,
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
        heads=sent * (sharing - 1) // sharing * c.layers * (2 if remat == "none" else 3),
        **at_loss,
    )


def _over_layers(c: GPTConfig, width: Callable[[GPTConfig], int]) -> int:
    """The sum over all layers of what a layer's config says."""
    return sum(count * width(kind) for kind, count in c.kinds)


def _read_width(c: GPTConfig) -> int:
    """Elements per token that products with a layer's weights read."""
    ranks = (c.latent_rank or 0) + (c.latent_query_rank or 0)
    return (1 + c.mlps_per_token) * c.d_model + ranks + c.attention_width + c.active_ffn_width


def _made_width(c: GPTConfig) -> int:
    """Elements per token that they make."""
    return (1 + c.mlps_per_token) * c.d_model + c.qkv_width + _latent_width(c) + _mlp_width(c)


def _exchanged_bytes(c: GPTConfig, remat: Remat, dtype: str) -> int:
    """Bytes of a token and its gradients that go to another device and come back, in one layer.

    There it goes with a weight and a number for each of its experts, once more if the layer is recomputed;
    back come the sums of what experts add. Gradients take the same ways.
    """
    token, weights = ITEM[dtype] * c.d_model, 4 * c.experts_per_token
    there = token + 2 * weights
    return there * (1 if remat == "none" else 2) + token + token + (token + weights)


def _computed_tokens(c: GPTConfig, length: int) -> float:
    """Tokens that a flash kernel reads for a position, on average over positions and layers.

    It skips what lies outside a window. In a scan the window of some layers is data, and a mask to cuDNN.
    """
    if c.attention == "cudnn" and c.scan and len(set(c.windowed)) > 1:
        return length / 2
    return attended_tokens(c, length) / c.layers


def _latent_width(c: GPTConfig) -> int:
    """Elements per token that keys, values and queries are made of."""
    return 0 if c.latent_rank is None else c.latent_rank + c.rope_width + (c.latent_query_rank or 0)


def _mlp_width(c: GPTConfig) -> int:
    return c.active_ffn_width * (2 if c.gated else 1)


def _kept_width(c: GPTConfig, remat: Remat) -> int:
    """Elements per token and layer, in the compute dtype."""
    if remat == "full":
        return c.d_model
    if remat == "attention":
        return c.d_model + c.attention_width
    return 2 * c.d_model + _latent_width(c) + c.qkv_width + c.attention_width + _mlp_width(c)


def _kept_fp32(c: GPTConfig, remat: Remat, length: int, *, flash: bool) -> int:
    """fp32 numbers per token and layer: log-sum-exps, or scores."""
    if remat == "full":
        return 0
    if flash:
        return c.heads
    return c.heads * length if remat == "none" else 0


def _working(c: GPTConfig, remat: Remat, tokens: int) -> float:
    """Elements in use during a layer's backward pass, in the compute dtype, outside of attention's kernel."""
    rows = 4 * c.experts_per_token * c.d_model if c.experts else 0
    if remat == "none":
        return tokens * (rows + 1.5 * c.d_model + c.qkv_width + 2 * c.active_ffn_width)
    whole = tokens * (rows + 9 * c.d_model + 2 * c.qkv_width + (3 if c.gated else 2) * c.active_ffn_width)
    if not _in_tiles(c, remat, tokens):
        return whole
    in_attention = c.qkv_width + (2 if remat == "full" else 1) * c.attention_width + c.d_model
    in_tile = 4 * c.d_model + (6.5 if c.gated else 4) * c.ffn_width
    return tokens * in_attention + tokens_of_tile(tokens, c.token_tile) * in_tile


def _in_tiles(c: GPTConfig, remat: Remat, tokens: int) -> bool:
    """Whether a layer is computed again in tiles of tokens."""
    return remat != "none" and not c.experts and tokens > c.token_tile


def _unembedding(c: GPTConfig) -> str:
    """The module that makes logits or scores."""
    return "embed" if c.tied and c.outputs is None else "head"


def _head_bytes(c: GPTConfig, tokens: int, item: int, frozen: set[str]) -> dict[str, int]:
    """Bytes of the loss and of the tables' gradients; ``frozen`` names the modules of the GPT that are."""
    chunks = -(-tokens // c.loss_chunk)
    embedding, unembedding = "embed" not in frozen, _unembedding(c) not in frozen
    if c.outputs is not None:  # all at once, and of the embedding's size no gradient but its own
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
    return {
        "loss": logits * (4 + item) + sums + 6 * tokens * c.d_model * item,
        "head": unembedding * item * (table if chunks > 1 else logits),
        # Of a tied table both are added at the end; else that of the unembedding is done long before.
        "tables": (4 * embedding + item * (unembedding and _unembedding(c) == "embed")) * table,
    }
