"""Causal attention: packed documents, sliding windows, and the choice of the kernel."""

from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from zerojax.errors import ConfigurationError
from zerojax.formatting import size
from zerojax.log import warn
from zerojax.models import flash_attention
from zerojax.models.flash_attention import (
    ATTENTION_NAME,
    Documents,
    Options,
    Segments,
    Sinks,
    begins,
    gradient_of_sinks,
    with_sinks,
)
from zerojax.models.options import AttentionKernel

AMPERE, HOPPER = 8, 9
"""Major compute capabilities, for ``has_flash``."""
FLASH_MAX_HEAD_DIM = 128
"""The widest head that cuDNN's flash attention and FlashAttention-4 support on every GPU since Ampere."""
FLASH_WIDE_HEADS = (192, 256)
"""Wider heads that both kernels support on Hopper. FlashAttention-4 does not compile for 136 or 160.

JAX's check accepts 256 on Blackwell, too. But FlashAttention-4 has no such kernel there, and cuDNN has no
gradients before version 9.23.
"""
FLASH_LATENT_WIDTHS = (192, 128)
"""The widest queries and narrower values that both kernels support on every GPU since Hopper."""


def segment_positions(segments: Segments) -> Int[Array, "batch time"]:
    """Each token's position within its segment, int32, counted from 0."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    return index - jax.lax.cummax(jnp.where(begins(segments), index, 0), axis=1)


def segment_lengths(segments: Segments) -> Int[Array, "batch time"]:
    """The length of the segment of each token, int32."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    last = jnp.pad(begins(segments)[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    end = jax.lax.cummin(jnp.where(last, index, segments.shape[1]), axis=1, reverse=True)
    return segment_positions(segments) + end - index + 1


Windowed = bool | Bool[Array, ""]
"""Whether a layer has the sliding window. A scanned stack passes it as data; otherwise it is static."""


def causal_attention(
    query: Float[Array, "batch time heads dim"],
    key: Float[Array, "batch time kv_heads dim"],
    value: Float[Array, "batch time kv_heads value_dim"],
    kernel: AttentionKernel = "auto",
    documents: Documents | None = None,
    *,
    window: int | None = None,
    windowed: Windowed = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Sinks | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """Scaled dot-product attention of each position to itself and earlier ones.

    Arguments are as for ``zerojax.attention``, but values may be narrower than keys, and
    ``documents`` are the documents of packed rows. Scores and softmax are fp32 for any dtype. The kernels:

    - cuDNN skips all pairs outside a window that every layer has. For documents, or for a window that is
      data, it needs a bias of 2 x batch x time^2 bytes, and computes all pairs. Each pass of each layer
      writes and reads the bias; nothing keeps it. cuDNN has gradients for even lengths only: odd ones are
      padded by a position.
    - FlashAttention-4 skips all pairs that do not attend, also for documents and windows that are data.
    - XLA computes all pairs.
    - "auto" is FlashAttention-4 for documents and for a window that is data, and cuDNN otherwise. Where
      neither can do this it is XLA. On a GPU it logs why FlashAttention-4 is not used.

    The output has the checkpoint name "attention", and so does the log-sum-exp that the backward kernel of
    cuDNN or FlashAttention-4 reads. Under a remat policy that saves this name, the forward kernel runs once
    per step, not twice.
    """
    batch, length = query.shape[:2]
    reach, by_layer = None, None
    if window is not None and window < length and windowed is not False:
        reach, by_layer = window - 1, None if windowed is True else windowed
    if kernel == "auto":
        kernel = fastest(query, value, softcap, masked=documents is not None or by_layer is not None)
    if kernel != "xla" and softcap is not None:
        raise ConfigurationError(
            f'softcap = {softcap}: the kernel "{kernel}" has no softcap. Use kernel="xla", or leave it out.'
        )
    if kernel == "flash_attention_4":
        if documents is None:
            documents = flash_attention.one_document_a_row(batch, length)
        return flash_attention.attend(Options(reach, scale), query, key, value, documents, by_layer, sinks)
    mask = None if documents is None else _within(documents)
    if reach is not None and not (mask is None and by_layer is None):
        near = _distances(length) <= reach  # cuDNN takes a window or a bias, not both
        near = near if by_layer is None else near | jnp.logical_not(by_layer)
        mask, reach = near if mask is None else mask & near, None
    if kernel == "cudnn":
        if length % 2:
            query, key, value, mask = _with_a_later_position(query, key, value, mask)
        attended: Array = _cudnn_attention(Options(reach, scale), query, key, value, mask, sinks)
        return attended[:, :length]
    if softcap is None and sinks is None:
        out = _attend("xla", query, key, value, scale=scale, mask=mask, causal=True, reach=reach)
    else:
        distances = _distances(length)
        seen = (distances >= 0) & (distances < (length if reach is None else reach + 1))
        mask = seen if mask is None else mask & seen
        out = masked_attention(query, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)
    return checkpoint_name(out, ATTENTION_NAME)


def full_attention(
    query: Float[Array, "batch time heads dim"],
    key: Float[Array, "batch time kv_heads dim"],
    value: Float[Array, "batch time kv_heads value_dim"],
    kernel: AttentionKernel = "auto",
    documents: Documents | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """Attention of each position to all positions of its document; see ``causal_attention``.

    "auto" selects cuDNN for even lengths, with a mask if there are documents, and XLA otherwise. The reason
    is that cuDNN has gradients for even lengths only, and that nothing pads odd ones here.
    """
    if kernel == "auto":
        kernel = fastest(query, value, softcap, masked=documents is not None, causal=False)
    if kernel == "flash_attention_4" or (kernel == "cudnn" and softcap is not None):
        raise ConfigurationError(
            f'the kernel "{kernel}" cannot do this: FlashAttention-4 is causal here, and cuDNN has no '
            'softcap. Leave kernel out, or use kernel="xla".'
        )
    mask = None if documents is None else _within(documents)
    if softcap is None:
        out = _attend("cudnn" if kernel == "cudnn" else "xla", query, key, value, mask=mask, scale=scale)
    else:
        seen = jnp.ones((1, 1, query.shape[1], key.shape[1]), bool) if mask is None else mask
        out = masked_attention(query, key, value, seen, scale=scale, softcap=softcap)
    return checkpoint_name(out, ATTENTION_NAME)


def attention_and_lse(
    query: Float[Array, "batch time heads dim"],
    key: Float[Array, "batch length kv_heads dim"],
    value: Float[Array, "batch length kv_heads value_dim"],
    kernel: Literal["cudnn", "xla"],
    *,
    scale: float | None = None,
    causal: bool = False,
    lengths: Int[Array, " batch"] | None = None,
) -> tuple[Float[Array, "batch time heads value_dim"], Float[Array, "batch time heads"]]:
    """Attention to some of a softmax's keys, forward only, and the log-sum-exp (fp32) that ``joined`` needs.

    ``lengths`` is the number of keys of each row; a row without keys has lse -inf. "cudnn" needs bf16 or
    fp16.
    """
    there = None if lengths is None else jnp.maximum(lengths, 1)  # a softmax of nothing would be NaN

    run = partial(_attend, kernel, scale=scale, causal=causal, lengths=there)
    if kernel == "cudnn":
        # JAX would return the log-sum-exp in the output's dtype.
        out, pullback = jax.vjp(run, query, key, value)
        lse = _lse_of(pullback).swapaxes(1, 2)
    else:
        out, lse = run(query, key, value, return_residual=True)
    lse = lse.astype(jnp.float32)
    return out, lse if lengths is None else jnp.where(lengths[:, None, None] > 0, lse, -jnp.inf)


def joined(
    out: Float[Array, "*tokens heads dim"],
    lse: Float[Array, "*tokens heads"],
    more: Float[Array, "*tokens heads dim"],
    lse_of_more: Float[Array, "*tokens heads"],
) -> tuple[Float[Array, "*tokens heads dim"], Float[Array, "*tokens heads"]]:
    """Attention to two sets of keys, from the attention to each. ``lse`` must be finite; all are fp32."""
    total = jnp.logaddexp(lse, lse_of_more)
    first, second = jnp.exp(lse - total)[..., None], jnp.exp(lse_of_more - total)[..., None]
    return out * first + more * second, total


def _lse_of(pullback: Any) -> Array:
    """The log-sum-exp [batch, heads, time] of cuDNN's attention: the only residual with three axes."""
    (lse,) = (residual for residual in jax.tree.leaves(pullback) if residual.ndim == 3)
    return lse


def _within(documents: Documents) -> Bool[Array, "batch 1 time time"]:
    """Whether the query and the key belong to the same document, for every pair of positions."""
    numbers = documents.numbers
    assert numbers is not None
    return (numbers[:, :, None] == numbers[:, None, :])[:, None]


def masked_attention(
    query: Float[Array, "batch time heads dim"],
    key: Float[Array, "batch length kv_heads dim"],
    value: Float[Array, "batch length kv_heads value_dim"],
    mask: Bool[Array, "#batch 1 time length"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Sinks | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """Attention of each query to the keys for which ``mask`` is True, by XLA. Scores are fp32.

    The other arguments, and the result's dtype, are as in ``causal_attention``.
    """
    batch, time, heads, dim = query.shape
    grouped = query.reshape(batch, time, key.shape[2], -1, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=jnp.float32)
    scores = scores * (dim**-0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, :, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        own = sinks.astype(jnp.float32).reshape(*scores.shape[1:3], 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(own, (*scores.shape[:4], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]].astype(value.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(batch, time, heads, -1)


def _distances(length: int) -> Int[Array, "1 1 time time"]:
    """How many positions before each query each key lies."""
    index = jnp.arange(length)
    return (index[:, None] - index)[None, None]


def has_flash(width: int, value_width: int, *, generation: int) -> bool:
    """Whether cuDNN's flash attention and FlashAttention-4 compute gradients of heads of these widths.

    ``generation`` is the GPU's major compute capability.
    """
    if generation < AMPERE or width % 8 or value_width % 8:
        return False
    if width == value_width:
        return width <= FLASH_MAX_HEAD_DIM or (generation == HOPPER and width in FLASH_WIDE_HEADS)
    most, most_of_values = FLASH_LATENT_WIDTHS
    return generation >= HOPPER and value_width < width <= most and value_width <= most_of_values


def fastest(
    query: Array, value: Array, softcap: float | None, *, masked: bool, causal: bool = True
) -> AttentionKernel:
    """The kernel that "auto" selects for ``[batch, time, heads, dim]``.

    ``masked`` says whether cuDNN would need a mask. A warning says why, if the fastest kernels cannot be
    used.
    """
    if jax.default_backend() != "gpu":
        return "xla"
    batch, length, heads, width = query.shape
    if softcap is not None:
        why = "attention_softcap"
    elif query.dtype not in (jnp.bfloat16, jnp.float16):
        why = f"{query.dtype} in place of bf16"
    elif not has_flash(width, value.shape[-1], generation=flash_attention.generation()):
        why = f"heads of {width}, which flash attention does not support on this GPU"
    elif not causal and (length % 2 or value.shape[1] % 2):
        why = "an odd length"
    else:
        if not masked:
            return "cudnn"
        lacking = flash_attention.missing()
        if causal and lacking is None:
            return "flash_attention_4"
        bias = size(2 * batch * length**2)
        _warn(
            f"cuDNN reads a mask of {bias} in each pass of each layer and computes all pairs of positions. "
            "FlashAttention-4 needs no mask, but "
            + (f"this process lacks {lacking}" if causal else "is used for causal attention only")
        )
        return "cudnn"
    if masked:
        scores = size(4 * batch * heads * length**2)
        _warn(f"XLA computes all pairs of positions, {scores} of fp32 scores a layer, because of {why}")
    return "xla"


@cache
def _warn(text: str) -> None:
    """Log, once in a process, what masked attention costs without FlashAttention-4."""
    warn(f"attention within documents, or a window of some layers: {text}")


def _with_a_later_position(
    query: Array, key: Array, value: Array, mask: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    """The arguments with one more position.

    No earlier position sees it, and it sees all: its softmax is finite.
    """
    query, key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (query, key, value))
    if mask is not None:
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=True)
    return query, key, value, mask


def _attend(
    kernel: Literal["cudnn", "xla"],
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float | None,
    mask: Array | None = None,
    causal: bool = False,
    reach: int | None = None,
    lengths: Array | None = None,
    return_residual: bool = False,
) -> Any:
    """``jax.nn.dot_product_attention``, also for values narrower than keys, which JAX's function refuses.

    cuDNN's kernel takes them on Hopper and newer (multi-head latent attention), through the function that
    JAX's calls. Padding values of 128 to 192 would cost 1.2 times the FLOPs. XLA's attention pads: its fp32
    scores dominate.
    """
    missing = query.shape[-1] - value.shape[-1]
    if missing and kernel == "cudnn":
        from jax._src.cudnn import fused_attention_stablehlo as cudnn  # not public

        of_queries = None if lengths is None else jnp.full(len(query), query.shape[1], jnp.int32)
        kinds = cudnn.MaskType
        plain, padded = (kinds.CAUSAL, kinds.PADDING_CAUSAL) if causal else (kinds.NO_MASK, kinds.PADDING)
        return cudnn.dot_product_attention(
            *(query, key, value, None, mask, of_queries, lengths),
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            mask_type=plain if lengths is None else padded,
            sliding_window_length=None if reach is None else reach + 1,
        )
    found: Any = jax.nn.dot_product_attention(  # pyrefly: ignore[no-matching-overload]  (too many unions)
        query,
        key,
        jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else value,
        mask=mask,
        scale=scale,
        is_causal=causal,
        key_value_seq_lengths=lengths,
        local_window_size=None if reach is None else (reach, 0),
        implementation=kernel,
        return_residual=return_residual,
    )
    if not missing:
        return found
    return (found[0][..., :-missing], found[1]) if return_residual else found[..., :-missing]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cudnn_attention(
    options: Options, query: Array, key: Array, value: Array, mask: Array | None, sinks: Sinks | None
) -> Array:
    if sinks is not None:
        return _cudnn_forward(options, query, key, value, mask, sinks)[0]
    out = _attend("cudnn", query, key, value, mask=mask, causal=True, **options._asdict())
    return checkpoint_name(out, ATTENTION_NAME)


def _cudnn_forward(
    options: Options, query: Array, key: Array, value: Array, mask: Array | None, sinks: Sinks | None
) -> tuple[Array, tuple]:
    # A name on the output of JAX's function would name a copy of it. JAX's rule would keep unnamed residuals,
    # and remat would run the forward kernel again for them. This rule names the residuals themselves.
    flash = partial(_attend, "cudnn", mask=mask, causal=True, **options._asdict())
    out, pullback = jax.vjp(flash, query, key, value)
    lse = _lse_of(pullback)  # a mask's bias stays unnamed: recomputing it is cheaper than keeping it
    results = out, lse
    if sinks is not None:
        joined, by_token = with_sinks(out, lse.swapaxes(1, 2), sinks)
        results = joined, by_token.swapaxes(1, 2)
    named = tuple(checkpoint_name(x, ATTENTION_NAME) for x in results)
    kept = dict(zip((id(out), id(lse)), named, strict=True))
    pullback = jax.tree.map(lambda residual: kept.get(id(residual), residual), pullback)
    return named[0], (pullback, sinks, named)


def _cudnn_backward(
    options: Options, residuals: tuple, gradient: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    del options
    pullback, sinks, (out, lse) = residuals
    of_sinks = None if sinks is None else gradient_of_sinks(out, lse.swapaxes(1, 2), sinks, gradient)
    return *pullback(gradient), None, of_sinks


_cudnn_attention.defvjp(_cudnn_forward, _cudnn_backward)
