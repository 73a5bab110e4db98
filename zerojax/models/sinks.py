"""Attention sinks (Xiao et al., 2023): a learned score in each head's softmax, without a value (gpt-oss).

Flash attention needs no kernel of its own for them. With a sink the log-sum-exp of the scores grows, and the
output shrinks by the same factor as all probabilities. Backward kernels read these two alone: probabilities
are exp(score - log-sum-exp), and the gradient of a score is its probability times what its value adds to
sum(gradient x output).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Sinks = Float[Array, " heads"]


def with_sinks(
    out: Float[Array, "*tokens heads dim"], lse: Float[Array, "*tokens heads"], sinks: Sinks
) -> tuple[Float[Array, "*tokens heads dim"], Float[Array, "*tokens heads"]]:
    """The output and log-sum-exp of attention with one more score in the softmax of each head."""
    sinks = sinks.astype(jnp.float32)
    kept = jax.nn.sigmoid(lse - sinks)[..., None]
    return (out * kept).astype(out.dtype), jnp.logaddexp(lse, sinks)


def gradient_of_sinks(
    out: Float[Array, "*tokens heads dim"],
    lse: Float[Array, "*tokens heads"],
    sinks: Sinks,
    gradient: Float[Array, "*tokens heads dim"],
) -> Sinks:
    """The gradient of sinks, from what ``with_sinks`` returned and the gradient of that output."""
    taken = jnp.exp(sinks.astype(jnp.float32) - lse)
    towards = (out.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1)
    return -(taken * towards).reshape(-1, sinks.shape[0]).sum(0).astype(sinks.dtype)
