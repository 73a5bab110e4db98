"""The key-value cache of a GPT, and attention to what it holds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from zerojax.models.attention import Windowed, masked_attention
from zerojax.models.config import GPTConfig

Positions = Int[Array, "batch time"]


class KVCache(NamedTuple):
    """Keys and values of all layers; the token at position p of a row is in column p."""

    keys: Float[Array, "layers batch length kv_heads dim"]
    values: Float[Array, "layers batch length kv_heads dim"]

    @staticmethod
    def empty(config: GPTConfig, batch: int, length: int, dtype: DTypeLike) -> "KVCache":
        """Zeros, for so many rows and columns."""
        shape = (config.layers, batch, length, config.key_value_heads, config.head_dim)
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def attend_cached(
    config: GPTConfig,
    qkv: tuple[Array, Array, Array],
    positions: Positions,
    cache: KVCache,
    layer: int | Int[Array, ""],
    windowed: Windowed,
) -> tuple[Float[Array, "batch time heads dim"], KVCache]:
    """Write keys and values of new tokens into the cache, and let their queries attend to all columns so far.

    Args:
        config: of the model.
        qkv: queries (batch, time, heads, dim), keys and values (batch, time, kv_heads, dim).
        positions: of the new tokens; what lies beyond the cache's length is not written.
        cache: of all layers.
        layer: the layer's index.
        windowed: whether the sliding window, if the model has one, is this layer's.
    """
    query, *new = qkv
    rows = jnp.arange(query.shape[0])[:, None]
    cache = KVCache(
        *(
            whole.at[layer, rows, positions].set(part.astype(whole.dtype), mode="drop", unique_indices=True)
            for whole, part in zip(cache, new, strict=True)
        )
    )
    keys, values = (jax.lax.dynamic_index_in_dim(whole, layer, keepdims=False) for whole in cache)
    distance = positions[:, None, :, None] - jnp.arange(keys.shape[1])
    seen = distance >= 0
    if config.sliding_window is not None:
        seen &= (distance < config.sliding_window) | jnp.logical_not(windowed)
    attended = masked_attention(
        query, keys, values, seen, scale=config.attention_scale, softcap=config.attention_softcap
    )
    return attended, cache
