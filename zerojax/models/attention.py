"""Causal attention: packed documents, sliding windows, and the choice of the kernel."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from zerojax.models.config import AttentionKernel

ATTENTION_NAME = "attention"
"""The ``checkpoint_name`` of attention's output, and of what its backward pass needs beside q, k and v."""

CUDNN_MAX_HEAD_DIM = 128
"""The widest head that cuDNN's flash attention supports on every GPU since Ampere."""

Segments = Int[Array, "batch time"]
"""The document of each position, for rows that hold several."""


def segment_positions(segments: Segments) -> Int[Array, "batch time"]:
    """Positions that start again at 0 with each segment, int32."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


def causal_attention(
    query: Float[Array, "batch time heads dim"],
    key: Float[Array, "batch time kv_heads dim"],
    value: Float[Array, "batch time kv_heads dim"],
    kernel: AttentionKernel = "auto",
    segments: Segments | None = None,
    window: int | None = None,
) -> Float[Array, "batch time heads dim"]:
    """Scaled dot-product attention of each position to itself and earlier ones.

    With a window, a position attends to so many positions at most, itself included; cuDNN skips the rest.
    Positions of different segments do not attend to each other. With cuDNN this needs an even time and a
    bias of 2 x batch x time^2 bytes, written and read in each pass of each layer and never kept.

    Scores and softmax are fp32 for any dtype. The output has the checkpoint name "attention", and with cuDNN
    so does the log-sum-exp that the backward kernel reads: under a remat policy that saves this name, the
    forward kernel runs once per step, not twice.
    """
    if kernel == "auto":
        kernel = "cudnn" if _cudnn_takes(query, segments) else "xla"
    same = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
    reach = None if window is None or window >= query.shape[1] else window - 1
    if kernel == "cudnn":
        return _cudnn_attention(reach, query, key, value, same)
    out = jax.nn.dot_product_attention(
        query, key, value, mask=same, is_causal=True, local_window_size=_left(reach), implementation="xla"
    )
    return checkpoint_name(out, ATTENTION_NAME)


def _cudnn_takes(query: Array, segments: Array | None) -> bool:
    head_dim = query.shape[-1]
    return (
        jax.default_backend() == "gpu"
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim <= CUDNN_MAX_HEAD_DIM
        and head_dim % 8 == 0
        and (segments is None or query.shape[1] % 2 == 0)
    )


def _left(reach: int | None) -> tuple[int, int] | None:
    """JAX's ``local_window_size`` for a reach of so many earlier positions."""
    return None if reach is None else (reach, 0)


def _flash(reach: int | None, query: Array, key: Array, value: Array, *, mask: Array | None) -> Array:
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=True, local_window_size=_left(reach), implementation="cudnn"
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cudnn_attention(reach: int | None, query: Array, key: Array, value: Array, mask: Array | None) -> Array:
    return checkpoint_name(_flash(reach, query, key, value, mask=mask), ATTENTION_NAME)


def _cudnn_forward(
    reach: int | None, query: Array, key: Array, value: Array, mask: Array | None
) -> tuple[Array, Callable]:
    # Naming the output outside of JAX's own rule would name a copy, leave the rule's residuals unnamed, and
    # make remat run the forward kernel again for them. Hence this rule, which names them.
    out, pullback = jax.vjp(partial(_flash, reach, mask=mask), query, key, value)
    named_out = checkpoint_name(out, ATTENTION_NAME)

    def name(residual: Array) -> Array:
        if residual is out:
            return named_out
        # Only the log-sum-exp has three axes; a mask's bias is cheaper to recompute than to keep.
        return checkpoint_name(residual, ATTENTION_NAME) if residual.ndim == 3 else residual

    return named_out, jax.tree.map(name, pullback)


def _cudnn_backward(
    reach: int | None, pullback: Callable, gradient: Array
) -> tuple[Array, Array, Array, None]:
    del reach
    return *pullback(gradient), None


_cudnn_attention.defvjp(_cudnn_forward, _cudnn_backward)
