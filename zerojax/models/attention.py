"""Causal attention: packed documents, sliding windows, and the choice of the kernel."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from zerojax.errors import ConfigurationError
from zerojax.models.config import AttentionKernel

ATTENTION_NAME = "attention"
"""The ``checkpoint_name`` of attention's output, and of what its backward pass needs besides q, k and v."""

CUDNN_MAX_HEAD_DIM = 128
"""The widest head that cuDNN's flash attention supports on every GPU since Ampere."""

Segments = Int[Array, "batch time"]
"""The document of each position, for rows that hold several."""


def segment_positions(segments: Segments) -> Int[Array, "batch time"]:
    """Positions that start again at 0 with each segment, int32."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


Windowed = bool | Bool[Array, ""]
"""Whether a layer has the window: in a scanned stack it is data, else static."""


def causal_attention(
    query: Float[Array, "batch time heads dim"],
    key: Float[Array, "batch time kv_heads dim"],
    value: Float[Array, "batch time kv_heads dim"],
    kernel: AttentionKernel = "auto",
    segments: Segments | None = None,
    *,
    window: int | None = None,
    windowed: Windowed = True,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "batch time heads dim"]:
    """Scaled dot-product attention of each position to itself and earlier ones.

    With a window, a position attends to at most that many positions, itself included; cuDNN skips the rest.
    Positions of different segments do not attend to each other. With cuDNN this needs a bias of
    2 x batch x time^2 bytes, written and read in each pass of each layer and never kept. A window in addition
    to segments, or one that is data, becomes a part of that bias. cuDNN has gradients for even lengths only:
    an odd one is padded by a position.

    Scores and softmax are fp32 for any dtype. The output has the checkpoint name "attention", and with cuDNN
    so does the log-sum-exp that the backward kernel reads: under a remat policy that saves this name, the
    forward kernel runs once per step, not twice.

    Args:
        query: queries.
        key: keys.
        value: values.
        kernel: "auto" is cuDNN's where it can do this.
        segments: the document of each position.
        window: positions that one attends to, itself included.
        windowed: whether the window applies.
        scale: of the scores; None is 1 / sqrt(dim).
        softcap: the scores become softcap x tanh(scores / softcap).

    Raises:
        ConfigurationError: a softcap with cuDNN, which has none.
    """
    length = query.shape[1]
    mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
    reach = None
    if window is not None and window < length and windowed is not False:
        if windowed is True and mask is None:
            reach = window - 1
        else:  # cuDNN takes a window or a bias, not both
            near = (_distances(length) < window) | jnp.logical_not(windowed)
            mask = near if mask is None else mask & near
    if kernel == "auto":
        kernel = "cudnn" if softcap is None and _cudnn_takes(query) else "xla"
    if kernel == "cudnn":
        if softcap is not None:
            raise ConfigurationError(f'softcap = {softcap}: the kernel "cudnn" has none, only "xla"')
        if length % 2:
            query, key, value, mask = _with_a_later_position(query, key, value, mask)
        attended: Array = _cudnn_attention(_Options(reach, scale), query, key, value, mask)
        return attended[:, :length]
    if softcap is None:
        out = _dot_product_attention(_Options(reach, scale), query, key, value, mask, "xla")
    else:
        distances = _distances(length)
        seen = (distances >= 0) & (distances < (length if reach is None else reach + 1))
        mask = seen if mask is None else mask & seen
        out = masked_attention(query, key, value, mask, scale=scale, softcap=softcap)
    return checkpoint_name(out, ATTENTION_NAME)


def masked_attention(
    query: Float[Array, "batch time heads dim"],
    key: Float[Array, "batch length kv_heads dim"],
    value: Float[Array, "batch length kv_heads dim"],
    mask: Bool[Array, "#batch 1 time length"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "batch time heads dim"]:
    """Attention of each query to the keys in the mask, by XLA; see ``causal_attention``."""
    if softcap is None:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, implementation="xla")
    batch, time, heads, dim = query.shape
    grouped = query.reshape(batch, time, key.shape[2], -1, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=jnp.float32)
    scores = softcap * jnp.tanh(scores * ((dim**-0.5 if scale is None else scale) / softcap))
    scores = jnp.where(mask[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(batch, time, heads, dim)


def _distances(length: int) -> Int[Array, "1 1 time time"]:
    """How far back each key lies from each query."""
    index = jnp.arange(length)
    return (index[:, None] - index)[None, None]


def _cudnn_takes(query: Array) -> bool:
    head_dim = query.shape[-1]
    return (
        jax.default_backend() == "gpu"
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim <= CUDNN_MAX_HEAD_DIM
        and head_dim % 8 == 0
    )


def _with_a_later_position(
    query: Array, key: Array, value: Array, mask: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    """The arguments with one more position, which no earlier one sees; it sees all, for a finite softmax."""
    query, key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (query, key, value))
    if mask is not None:
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=True)
    return query, key, value, mask


class _Options(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        reach: earlier positions within the window; None for all.
        scale: of the scores.
    """

    reach: int | None
    scale: float | None


def _dot_product_attention(
    options: _Options,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    kernel: Literal["cudnn", "xla"],
) -> Array:
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        scale=options.scale,
        is_causal=True,
        local_window_size=None if options.reach is None else (options.reach, 0),
        implementation=kernel,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cudnn_attention(options: _Options, query: Array, key: Array, value: Array, mask: Array | None) -> Array:
    return checkpoint_name(_dot_product_attention(options, query, key, value, mask, "cudnn"), ATTENTION_NAME)


def _cudnn_forward(
    options: _Options, query: Array, key: Array, value: Array, mask: Array | None
) -> tuple[Array, Callable]:
    # Naming the output outside of JAX's own rule would name a copy, leave the rule's residuals unnamed, and
    # make remat run the forward kernel again for them. Hence this rule, which names them.
    flash = partial(_dot_product_attention, options, mask=mask, kernel="cudnn")
    out, pullback = jax.vjp(flash, query, key, value)
    named_out = checkpoint_name(out, ATTENTION_NAME)

    def name(residual: Array) -> Array:
        if residual is out:
            return named_out
        # Only the log-sum-exp has three axes; a mask's bias is cheaper to recompute than to keep.
        return checkpoint_name(residual, ATTENTION_NAME) if residual.ndim == 3 else residual

    return named_out, jax.tree.map(name, pullback)


def _cudnn_backward(
    options: _Options, pullback: Callable, gradient: Array
) -> tuple[Array, Array, Array, None]:
    del options
    return *pullback(gradient), None


_cudnn_attention.defvjp(_cudnn_forward, _cudnn_backward)
