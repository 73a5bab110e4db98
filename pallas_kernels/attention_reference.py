"""The specification of ``pallas_kernels.attend_cache``."""

import jax
import jax.numpy as jnp
from jax import lax

MIN_SCORE = float(jnp.finfo(jnp.float32).min)
"""The score of a column outside [start, stop)."""


def attend_cache(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """See ``pallas_kernels.attend_cache``."""
    rows, heads, dim = query.shape
    keys, values = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (keys, values))
    grouped = query.reshape(rows, keys.shape[1], -1, dim)
    scores = scale * jnp.einsum("bkgd,bksd->bkgs", grouped, keys, preferred_element_type=jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    column = jnp.arange(keys.shape[2])
    seen = (start[:, None] <= column) & (column < stop[:, None])
    scores = jnp.where(seen[:, None, None], scores, MIN_SCORE)
    if sinks is not None:
        own = jnp.broadcast_to(
            sinks.astype(scores.dtype).reshape(*scores.shape[1:3], 1), (*scores.shape[:3], 1)
        )
        scores = jnp.concatenate([scores, own], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : keys.shape[2]]
    return jnp.einsum("bkgs,bksd->bkgd", weights.astype(values.dtype), values).reshape(rows, heads, dim)
