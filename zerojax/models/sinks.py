"""Attention sinks (Xiao et al., 2023): a learned score in each head's softmax, without a value (gpt-oss).

No flash attention kernel needs to know them. A sink increases the scores' log-sum-exp, and scales the output
by the same factor as all probabilities. Backward kernels read only these two. They compute probabilities as
exp(score - log-sum-exp), and a score's gradient as its probability times the difference that its value makes
to sum(gradient x output).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Sinks = Float[Array, " heads"]


def with_sinks(
    out: Float[Array, "*tokens heads dim"], lse: Float[Array, "*tokens heads"], sinks: Sinks
) -> tuple[Float[Array, "*tokens heads dim"], Float[Array, "*tokens heads"]]:
    """Attention's output and log-sum-exp after adding one more score to each head's softmax."""
    sinks = sinks.astype(jnp.float32)
    kept = jax.nn.sigmoid(lse - sinks)[..., None]
    return (out * kept).astype(out.dtype), jnp.logaddexp(lse, sinks)


def gradient_of_sinks(
    out: Float[Array, "*tokens heads dim"],
    lse: Float[Array, "*tokens heads"],
    sinks: Sinks,
    gradient: Float[Array, "*tokens heads dim"],
) -> Sinks:
    """The gradient of the sinks, from ``with_sinks``' results and the gradient of its output."""
    taken = jnp.exp(sinks.astype(jnp.float32) - lse)
    towards = (out.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1)
    return -(taken * towards).reshape(-1, sinks.shape[0]).sum(0).astype(sinks.dtype)
