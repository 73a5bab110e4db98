"""Causal attention: rotary positions, and the choice of the kernel that runs it."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from zerojax.models.config import AttentionKernel, GPTConfig

ATTENTION_NAME = "attention"
"""The `checkpoint_name` of attention's output (and of what its backward needs beside q, k, v)."""

CUDNN_MAX_HEAD_DIM = 128
"""The widest head that cuDNN's flash attention takes on every GPU since Ampere."""

RopeTable = tuple[Float[Array, "*batch time half"], Float[Array, "*batch time half"]]

Segments = Int[Array, "batch time"]
"""Which document of its row each position belongs to, where a row holds several."""


def segment_positions(segments: Segments) -> Int[Array, "batch time"]:
    """Positions that start again at 0 with each segment, int32."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


def rope_frequencies(config: GPTConfig) -> Float[Array, " half"]:
    """By how much each pair of a head turns from one position to the next, in radians, fp32.

    Pair i turns by theta^(-2i/head_dim) (Su et al., 2021, eq. 15). "linear" scaling divides all by
    rope_factor (Chen et al., 2023); "llama3" divides those of wavelengths beyond
    rope_original_len / rope_low_freq_factor, keeps those below rope_original_len /
    rope_high_freq_factor, and mixes in between (as in Meta's release of LLaMA 3.1).
    """
    c = config
    exponents = jnp.arange(0, c.head_dim, 2, dtype=jnp.float32) / c.head_dim
    plain = 1.0 / c.rope_theta**exponents
    if c.rope_scaling == "none":
        return plain
    stretched = plain / c.rope_factor
    if c.rope_scaling == "linear":
        return stretched
    turns = c.rope_original_len * plain / (2 * jnp.pi)  # in the original context
    low, high = c.rope_low_freq_factor, c.rope_high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * stretched + kept * plain


def rope_table(positions: Int[Array, "*batch time"], frequencies: Float[Array, " half"]) -> RopeTable:
    """The cosines and sines by which rotary embedding turns each pair, fp32."""
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "batch time heads dim"], table: RopeTable
) -> Float[Array, "batch time heads dim"]:
    """Turn each pair (x[i], x[i + dim/2]) by its position's angle, in fp32; x's dtype comes back.

    Pairing the halves rather than neighbours is LLaMA's convention in Hugging Face checkpoints.
    """
    # The table depends on no parameter; without this a scanned stack would sum a gradient for it.
    cos, sin = (jax.lax.stop_gradient(t)[..., None, :] for t in table)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(x.dtype)


def causal_attention(
    query: Float[Array, "batch time heads dim"],
    key: Float[Array, "batch time kv_heads dim"],
    value: Float[Array, "batch time kv_heads dim"],
    kernel: AttentionKernel = "auto",
    segments: Segments | None = None,
) -> Float[Array, "batch time heads dim"]:
    """Scaled dot-product attention of each position to itself and those before it.

    Positions of different segments do not see each other. Under cuDNN that takes a bias of 2 x batch x
    time^2 bytes, written and read anew in each pass of each layer and never kept, and an even time.

    Scores and softmax are fp32 whatever the dtype. The output carries the checkpoint name
    "attention", and under cuDNN so does the log-sum-exp that the backward kernel reads: a remat
    policy that saves that name runs the attention kernel once per step, not twice.
    """
    if kernel == "auto":
        kernel = "cudnn" if _cudnn_takes(query, segments) else "xla"
    same = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
    if kernel == "cudnn":
        return _cudnn_attention(query, key, value, same)
    out = jax.nn.dot_product_attention(query, key, value, mask=same, is_causal=True, implementation="xla")
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


_flash = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")


@jax.custom_vjp
def _cudnn_attention(query: Array, key: Array, value: Array, mask: Array | None) -> Array:
    return checkpoint_name(_flash(query, key, value, mask=mask), ATTENTION_NAME)


def _cudnn_forward(query: Array, key: Array, value: Array, mask: Array | None) -> tuple[Array, Callable]:
    # A name put on the output outside of JAX's own rule names a copy: the rule's residuals stay
    # unnamed, so remat would run the forward kernel again for them. Naming them takes this rule.
    out, pullback = jax.vjp(partial(_flash, mask=mask), query, key, value)
    named_out = checkpoint_name(out, ATTENTION_NAME)

    def name(residual: Array) -> Array:
        if residual is out:
            return named_out
        # Of the others only the log-sum-exp has three axes; a mask's bias is cheaper made again than kept.
        return checkpoint_name(residual, ATTENTION_NAME) if residual.ndim == 3 else residual

    return named_out, jax.tree.map(name, pullback)


def _cudnn_backward(pullback: Callable, gradient: Array) -> tuple[Array, Array, Array, None]:
    return *pullback(gradient), None


_cudnn_attention.defvjp(_cudnn_forward, _cudnn_backward)
