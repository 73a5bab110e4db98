"""The key-value cache of a GPT, and attention to what it holds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from pallas_kernels import attend_cache
from zerojax.models.attention import Windowed, causal_attention, masked_attention
from zerojax.models.config import GPTConfig
from zerojax.models.sinks import Sinks

Positions = Int[Array, "batch time"]


class KVCache(NamedTuple):
    """Keys and values of all layers; the token at position p of a row is in column p.

    The heads come before the columns, which is how attention multiplies them: XLA would otherwise transpose
    the whole cache for every token.
    """

    keys: Float[Array, "layers batch kv_heads length dim"]
    values: Float[Array, "layers batch kv_heads length dim"]

    @staticmethod
    def empty(config: GPTConfig, batch: int, length: int, dtype: DTypeLike) -> "KVCache":
        """Zeros, for ``batch`` rows of ``length`` tokens."""
        shape = (config.layers, batch, config.key_value_heads, length, config.head_dim)
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def attend_cached(
    config: GPTConfig,
    qkv: tuple[Array, Array, Array],
    positions: Positions,
    cache: KVCache,
    layer: int | Int[Array, ""],
    windowed: Windowed,
    sinks: Sinks | None = None,
) -> tuple[Float[Array, "batch time heads dim"], KVCache]:
    """Write keys and values of new tokens into the cache, and let their queries attend to all columns so far.

    Args:
        config: of the model.
        qkv: queries (batch, time, heads, dim), keys and values (batch, time, kv_heads, dim).
        positions: of the new tokens; what lies beyond the cache's length is not written.
        cache: of all layers.
        layer: the layer's index.
        windowed: whether the sliding window, if the model has one, is this layer's.
        sinks: the layer's, if the model has some.
    """
    query, key, value = qkv
    rows, heads = jnp.arange(query.shape[0])[:, None, None], jnp.arange(config.key_value_heads)[:, None]
    cache = KVCache(
        *(
            whole.at[layer, rows, heads, positions[:, None]].set(
                part.swapaxes(1, 2).astype(whole.dtype), mode="drop", unique_indices=True
            )
            for whole, part in zip(cache, (key, value), strict=True)
        )
    )
    if query.shape[1] == cache.keys.shape[3]:
        # The new tokens fill the cache, so it was empty: they see each other alone.
        attended = causal_attention(
            query,
            key,
            value,
            config.attention,
            window=config.sliding_window,
            windowed=windowed,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            sinks=sinks,
        )
        return attended, cache
    if query.shape[1] == 1:
        stop = jnp.minimum(positions[:, 0] + 1, cache.keys.shape[3])
        start = jnp.zeros_like(stop)
        if config.sliding_window is not None:
            start = jnp.where(windowed, jnp.maximum(stop - config.sliding_window, 0), 0)
        query = query[:, 0].astype(cache.keys.dtype)
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        softcap = config.attention_softcap
        attended = attend_cache(query, *cache, layer, start, stop, sinks, scale=scale, softcap=softcap)
        return attended[:, None], cache
    distance = positions[:, None, :, None] - jnp.arange(cache.keys.shape[3])
    seen = distance >= 0
    if config.sliding_window is not None:
        seen &= (distance < config.sliding_window) | jnp.logical_not(windowed)
    attended = masked_attention(
        query.astype(cache.keys.dtype),
        *(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False).swapaxes(1, 2) for x in cache),
        mask=seen,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
        sinks=sinks,
    )
    return attended, cache
