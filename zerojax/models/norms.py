"""A decoder's norms. Their statistics are fp32 for inputs of any dtype."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from zerojax.models.config import GPTConfig


class OffsetRMSNorm(nnx.Module):
    """An RMS norm (Zhang and Sennrich, 2019) with the scale ``offset + scale``, computed in fp32.

    Gemma's norms have an offset of 1, so that weight decay pulls the scale to 1, not to 0.
    """

    def __init__(self, width: int, offset: float, epsilon: float):
        self.offset, self.epsilon = offset, epsilon
        self.scale = nnx.Param(jnp.full(width, 1 - offset, jnp.float32))

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Norm the last axis; the result has the input's dtype."""
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        return (normed * (self.offset + self.scale[...].astype(jnp.float32))).astype(x.dtype)


def rms_norm(c: GPTConfig, width: int, rngs: nnx.Rngs) -> OffsetRMSNorm | nnx.RMSNorm:
    """An RMS norm over the last axis."""
    if c.norm_offset:
        return OffsetRMSNorm(width, c.norm_offset, c.norm_eps)
    return nnx.RMSNorm(width, epsilon=c.norm_eps, rngs=rngs)


def residual_norm(c: GPTConfig, rngs: nnx.Rngs) -> OffsetRMSNorm | nnx.RMSNorm | nnx.LayerNorm:
    """The config's kind of norm, for the residual stream."""
    if c.norm == "rms":
        return rms_norm(c, c.d_model, rngs)
    return nnx.LayerNorm(c.d_model, epsilon=c.norm_eps, use_bias=c.biases or c.norm_biases, rngs=rngs)
