"""The key-value cache of a GPT, and attention to it."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from pallas_kernels import attend_cache
from zerojax.models.attention import Windowed, attention_and_lse, causal_attention, fastest, joined
from zerojax.models.config import GPTConfig
from zerojax.models.flash_attention import Sinks, with_sinks
from zerojax.models.latent import LatentHeads

Positions = Int[Array, "batch time"]
_BLOCK = 512
"""Columns of the cache whose scores exist at a time while several new tokens attend to them."""
_FLASH_BLOCK = 8192
"""Columns of the cache that flash attention reads in one call; it stores no scores."""


class Recurrence(NamedTuple):
    """The recurrent layers' memory of a row, whose size does not grow with the row.

    Attributes:
        inputs: the last inputs of their convolutions.
        states: of the gated delta rule or Mamba-2, fp32; None for convolutions alone.
    """

    inputs: Float[Array, "layers batch kept channels"]
    states: Float[Array, "layers batch heads dim value_dim"] | None


class KVCache(NamedTuple):
    """Keys and values of layers with attention; the token at position p of a row is in column p.

    Heads come before columns, in the order in which attention multiplies them. In another order XLA would
    transpose the whole cache for every token. A model with latents stores them in ``keys`` as one head, and
    has no ``values`` (``zerojax.models.latent``).
    """

    keys: Float[Array, "layers batch kv_heads length dim"]
    values: Float[Array, "layers batch kv_heads length dim"] | None


Cache = KVCache | Recurrence | None
"""The cache of the layers of one kind; None for MLPs alone, and for layers with earlier layers' keys."""
Caches = tuple[Cache, ...]
"""The cache of a model: one for the layers of each of ``GPTConfig.kinds``."""


def empty_caches(config: GPTConfig, batch: int, length: int, dtype: DTypeLike) -> Caches:
    """Zeros, for ``batch`` rows of ``length`` tokens."""
    return tuple(_empty(kind, count, batch, length, dtype) for kind, count in config.kinds)


def _empty(c: GPTConfig, layers: int, batch: int, length: int, dtype: DTypeLike) -> Cache:
    """The cache of the layers of one kind."""
    if not c.has_mixer or c.shares_keys:
        return None
    if c.all_recurrent:
        inputs = jnp.zeros((layers, batch, c.conv_width - 1, c.conv_channels), dtype)
        state = (layers, batch, c.value_heads, c.recurrent_key_width, c.recurrent_width)
        return Recurrence(inputs, None if c.recurrent == "short_conv" else jnp.zeros(state, jnp.float32))
    if c.latent_rank is not None:
        return KVCache(jnp.zeros((layers, batch, 1, length, c.latent_rank + c.rope_width), dtype), None)
    shape = (layers, batch, c.key_value_heads, length, c.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def attend_cached(
    config: GPTConfig,
    qkv: tuple[Array, Array, Array | None],
    positions: Positions,
    cache: KVCache,
    layer: int | Int[Array, ""],
    windowed: Windowed,
    sinks: Sinks | None = None,
    latent: LatentHeads | None = None,
) -> tuple[Float[Array, "batch time heads value_dim"], KVCache]:
    """Write new tokens into the cache, and compute their attention to all columns so far.

    Args:
        config: the config of the layer's kind.
        qkv: queries (batch, time, heads, dim), keys and values (batch, time, kv_heads, dim). With latents:
            queries, latents and None.
        positions: positions of the new tokens; tokens beyond the cache's length are not written.
        cache: the cache of the layers of this kind.
        layer: the layer's index in the cache.
        windowed: whether this layer has the model's sliding window.
        sinks: the layer's attention sinks, if it has some.
        latent: expands the layer's latents to keys and values, if it has latents.
    """
    query, key, value = qkv
    rows, heads = jnp.arange(query.shape[0])[:, None, None], jnp.arange(key.shape[2])[:, None]

    def written(whole: Array, part: Array) -> Array:
        return whole.at[layer, rows, heads, positions[:, None]].set(
            part.swapaxes(1, 2).astype(whole.dtype), mode="drop", unique_indices=True
        )

    cache = jax.tree.map(written, cache, KVCache(key, value))

    def read(keys: Array, values: Array | None) -> tuple[Array, Array]:
        if latent is not None:
            return latent.expanded(keys)
        assert values is not None
        return keys, values

    if query.shape[1] == cache.keys.shape[3]:
        # The new tokens fill the cache, so it was empty: they see only each other.
        attended = causal_attention(
            query,
            *read(key, value),
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
        query = query if latent is None else latent.absorbed(query)
        values = cache.keys if cache.values is None else cache.values
        attended = attend_cache(
            query, cache.keys, values, layer, start, stop, sinks, scale=scale, softcap=softcap
        )
        attended = attended if latent is None else latent.values(attended)
        return attended[:, None], cache
    query = query.astype(cache.keys.dtype)
    by_blocks = partial(_attend_blocks, config, query, positions, cache, layer, read)
    new_keys, new_values = (x.astype(query.dtype) for x in read(key, value))
    kernel = _flash_kernel(config, query, new_values)
    if kernel is None or (config.sliding_window is not None and windowed is True):
        return by_blocks(windowed, sinks), cache

    def by_flash() -> Array:
        qkv = query, new_keys, new_values
        return _attend_flash(config, kernel, qkv, positions[:, 0], cache, layer, read, sinks)

    if config.sliding_window is None or windowed is False:
        return by_flash(), cache
    return jax.lax.cond(windowed, lambda: by_blocks(True, sinks), by_flash), cache


Read = Callable[[Array, Array | None], tuple[Array, Array]]
"""Expands cache entries to keys and values (batch, time, kv_heads, ...)."""


def _flash_kernel(config: GPTConfig, query: Array, value: Array) -> Literal["cudnn", "xla"] | None:
    """The kernel for ``_attend_flash``; None if attention must go block by block."""
    if (
        config.attention in ("auto", "cudnn")
        and fastest(query, value, config.attention_softcap, masked=False) == "cudnn"
    ):
        return "cudnn"
    return None


def _attend_flash(
    config: GPTConfig,
    kernel: Literal["cudnn", "xla"],
    qkv: tuple[Array, Array, Array],
    before: Int[Array, " batch"],
    cache: KVCache,
    layer: int | Int[Array, ""],
    read: Read,
    sinks: Sinks | None,
) -> Float[Array, "batch time heads value_dim"]:
    """Attention of new tokens to each other and to the ``before`` tokens in the cache."""
    query, scale = qkv[0], config.attention_scale
    block = min(_FLASH_BLOCK, cache.keys.shape[3])

    def add(number: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        first = number * block
        cached = jax.tree.map(lambda x: _columns(x, layer, first, block).swapaxes(1, 2), cache)
        keys, values = read(*cached)
        there = jnp.clip(before - first, 0, block)
        more = attention_and_lse(query, keys, values, kernel, scale=scale, lengths=there)
        return joined(*so_far, *more)

    out, lse = attention_and_lse(*qkv, kernel, scale=scale, causal=True)
    blocks = -(-jnp.max(before) // block)
    out, lse = jax.lax.fori_loop(0, blocks, add, (out.astype(jnp.float32), lse))
    out = out if sinks is None else with_sinks(out, lse, sinks)[0]
    return out.astype(query.dtype)


def _columns(whole: Array, layer: int | Int[Array, ""], first: Array, count: int) -> Array:
    """``count`` columns of one layer's cache from ``first`` on. Columns beyond its end are arbitrary."""
    start = jnp.minimum(first, whole.shape[3] - count)
    found = jnp.roll(_slice(whole, layer, start, count), start - first, axis=2)
    # Without this XLA copies the whole cache into the layout that flash attention reads.
    return with_layout_constraint(found, Layout((0, 1, 2, 3)))


def _slice(whole: Array, layer: int | Int[Array, ""], start: Array, count: int) -> Array:
    """``count`` columns of one layer's cache from ``start`` on; all must exist."""
    shape = (1, *whole.shape[1:3], count, whole.shape[4])
    return jax.lax.dynamic_slice(whole, (layer, 0, 0, start, 0), shape)[0]


def _attend_blocks(
    config: GPTConfig,
    query: Float[Array, "batch time heads dim"],
    positions: Positions,
    cache: KVCache,
    layer: int | Int[Array, ""],
    read: Read,
    windowed: Windowed,
    sinks: Sinks | None,
) -> Float[Array, "batch time heads value_dim"]:
    """Attention of new tokens to a cache that already has them, one block of columns at a time.

    Only the scores of one block exist (Rabe and Staats, 2021, "Self-attention Does Not Need O(n^2) Memory").
    """
    batch, time, _, dim = query.shape
    length, window = cache.keys.shape[3], config.sliding_window
    block = min(_BLOCK, length)
    grouped = query.reshape(batch, time, config.key_value_heads, -1, dim)
    scale = dim**-0.5 if config.attention_scale is None else config.attention_scale

    def add(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, sums = carry
        first = jnp.minimum(number * block, length - block)
        columns = first + jnp.arange(block)
        cached = jax.tree.map(lambda x: _slice(x, layer, first, block).swapaxes(1, 2), cache)
        keys, values = read(*cached)
        scores = jnp.einsum("btkgd,bskd->bkgts", grouped, keys, preferred_element_type=jnp.float32) * scale
        if config.attention_softcap is not None:
            scores = config.attention_softcap * jnp.tanh(scores / config.attention_softcap)
        distance = positions[..., None] - columns
        seen = (distance >= 0) & (columns >= number * block)  # the last block overlaps the one before
        if window is not None:
            seen &= (distance < window) | jnp.logical_not(windowed)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        now = jnp.maximum(largest, scores.max(axis=-1))
        weights, kept = jnp.exp(scores - now[..., None]), jnp.exp(largest - now)
        more = jnp.einsum(
            "bkgts,bskd->bkgtd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return now, total * kept + weights.sum(axis=-1), sums * kept[..., None] + more

    rows = (batch, *grouped.shape[2:4], time)
    if sinks is None:
        largest, total = jnp.full(rows, jnp.finfo(jnp.float32).min), jnp.zeros(rows)
    else:
        own = sinks.astype(jnp.float32).reshape(1, *rows[1:3], 1)
        largest, total = jnp.broadcast_to(own, rows), jnp.ones(rows)
    start = 0
    if window is not None:
        nearest = jnp.maximum(jnp.min(positions) - window + 1, 0) // block
        start = jnp.where(windowed, nearest, 0)
    stop = -(-jnp.minimum(jnp.max(positions) + 1, length) // block)
    sums = jnp.zeros((*rows, config.value_dim))
    _, total, sums = jax.lax.fori_loop(start, stop, add, (largest, total, sums))
    # Padding behind a row may see no column.
    out = sums / jnp.where(total > 0, total, 1)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(*query.shape[:3], -1).astype(query.dtype)
