"""Samples text from a GPT with a key-value cache, in one compiled program for all tokens."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from zerojax.adapters.stack import Stack
from zerojax.errors import ConfigurationError
from zerojax.models.attention import Windowed, masked_attention
from zerojax.models.config import GPTConfig
from zerojax.models.gpt import GPT, Block, logits
from zerojax.models.rope import RopeTable


class Cache(NamedTuple):
    """Keys and values of all blocks, for positions up to a fixed length."""

    keys: Float[Array, "layers batch length kv_heads dim"]
    values: Float[Array, "layers batch length kv_heads dim"]


@dataclass(frozen=True)
class Sampling:
    """How to draw the next token from the logits.

    Attributes:
        temperature: Divisor of the logits; 0 takes the likeliest token.
        top_k: Draw only from this many likeliest tokens.
        top_p: Draw only from the fewest likeliest tokens whose probabilities (after temperature and
            top_k) sum to at least this (Holtzman et al., 2020).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigurationError(f"temperature = {self.temperature}: 0 (greedy) or above")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigurationError(f"top_k = {self.top_k}: at least 1, or left out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p = {self.top_p}: above 0 and at most 1, or left out")


def sample(scores: Float[Array, "batch vocab"], key: Key[Array, ""], how: Sampling) -> Int[Array, " batch"]:
    """Draw one token per row of logits, int32."""
    if how.temperature == 0:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    scores = scores.astype(jnp.float32) / how.temperature
    if how.top_k is not None and how.top_k < scores.shape[-1]:
        least = jax.lax.top_k(scores, how.top_k)[0][:, -1:]
        scores = jnp.where(scores < least, -jnp.inf, scores)
    if how.top_p is not None and how.top_p < 1:
        descending = jnp.sort(scores, axis=-1, descending=True)
        probabilities = jax.nn.softmax(descending, axis=-1)
        # A token is kept if the likelier ones sum to less than top_p; the likeliest always is.
        kept = jnp.cumsum(probabilities, axis=-1) - probabilities < how.top_p
        least = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        scores = jnp.where(scores < least, -jnp.inf, scores)
    return jax.random.categorical(key, scores).astype(jnp.int32)


def generate(
    model: GPT,
    prompt: Int[Array, "batch prompt"],
    new_tokens: int,
    *,
    key: Key[Array, ""],
    how: Sampling | None = None,
    stop: int | None = None,
) -> Int[Array, "batch new"]:
    """Continue each row of a prompt.

    Lengths are rounded up to powers of two, so that a few compiled programs serve all prompts. When the
    context is full, generation continues from the last max_seq_len / 2 tokens.

    Args:
        model: an unsharded model, such as ``zerojax.gather_model(state)``.
        prompt: int32 ids; of a prompt longer than max_seq_len only the last max_seq_len / 2 are used.
        new_tokens: number of tokens to add.
        key: random key; the same key gives the same text.
        how: temperature, top-k and top-p; None is ``Sampling()``.
        stop: a token that ends its row, such as the end of a text; it fills the rest of the row.

    Returns:
        int32 new tokens, without the prompt.

    Raises:
        ConfigurationError: if the prompt is empty or not a matrix, or new_tokens is below 1.
    """
    text = jnp.asarray(prompt, jnp.int32)
    if text.ndim != 2 or 0 in text.shape:
        raise ConfigurationError(
            f"prompt has shape {text.shape}: (batch, prompt) with at least one token each"
        )
    if new_tokens < 1:
        raise ConfigurationError(f"new_tokens = {new_tokens}: at least 1")
    context = model.config.max_seq_len
    graph, weights = nnx.split(model)
    end = text.shape[1] + new_tokens
    while text.shape[1] < end:
        window = text if text.shape[1] <= context else text[:, -max(1, context // 2) :]
        length = window.shape[1]
        # The last new token is never an input, so it needs no room in the context.
        count = min(end - text.shape[1], context - length + 1)
        padded = jnp.pad(window, ((0, 0), (0, min(_round_up(length), context) - length)))
        capacity = min(_round_up(length + count), context)
        done = jnp.any(text[:, end - new_tokens :] == (-1 if stop is None else stop), axis=1)
        key, draw = jax.random.split(key)
        new = _continue(
            graph,
            weights,
            padded,
            length,
            count,
            done,
            draw,
            capacity=capacity,
            how=how or Sampling(),
            stop=stop,
        )
        text = jnp.concatenate([text, new[:, :count]], axis=1)
        if stop is not None and bool(jnp.all(text[:, -1] == stop)):
            text = jnp.pad(text, ((0, 0), (0, end - text.shape[1])), constant_values=stop)
    return text[:, end - new_tokens :]


def _round_up(length: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (length - 1).bit_length())


@partial(jax.jit, static_argnames=("graph", "capacity", "how", "stop"))
def _continue(
    graph: nnx.GraphDef[GPT],
    weights: nnx.State,
    prompt: Int[Array, "batch padded"],
    length: Int[Array, ""],
    count: Int[Array, ""],
    done: Bool[Array, " batch"],
    key: Key[Array, ""],
    *,
    capacity: int,
    how: Sampling,
    stop: int | None,
) -> Int[Array, "batch capacity"]:
    """Up to ``count`` tokens after the first ``length`` of the prompt, padded with ``stop`` or 0.

    Rows that are done from the start get ``stop`` only.
    """
    model = nnx.merge(graph, weights)
    batch = prompt.shape[0]
    # The padding's cache entries lie ahead of every query until tokens overwrite them.
    hidden, cache = _extend(model, prompt, jnp.int32(0), _empty_cache(model, batch, capacity), length)
    last = jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1)

    def draw(hidden: Array, step: Array, done: Array) -> tuple[Array, Array]:
        scores = logits(hidden[:, 0], model.unembedding, model.config.logit_softcap)
        token = sample(scores, jax.random.fold_in(key, step), how)
        if stop is None:
            return token, done
        token = jnp.where(done, stop, token)
        return token, token == stop

    def unfinished(state: tuple[Array, Array, Array, Array, Cache]) -> Array:
        step, _, done, _, _ = state
        return (step < count) & ~jnp.all(done)

    def advance(
        state: tuple[Array, Array, Array, Array, Cache],
    ) -> tuple[Array, Array, Array, Array, Cache]:
        step, token, done, text, cache = state
        hidden, cache = _extend(model, token[:, None], length + step - 1, cache, length + step)
        token, done = draw(hidden, step, done)
        return step + 1, token, done, text.at[:, step].set(token), cache

    token, done = draw(last, jnp.int32(0), done)
    text = jnp.full((batch, capacity + 1), 0 if stop is None else stop, jnp.int32).at[:, 0].set(token)
    return jax.lax.while_loop(unfinished, advance, (jnp.int32(1), token, done, text, cache))[3]


def _empty_cache(model: GPT, batch: int, length: int) -> Cache:
    c: GPTConfig = model.config
    shape = (c.layers, batch, length, c.key_value_heads, c.head_dim)
    dtype = model.embed.embedding[...].dtype
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def _extend(
    model: GPT, tokens: Int[Array, "batch time"], start: Int[Array, ""], cache: Cache, end: Int[Array, ""]
) -> tuple[Float[Array, "batch time d_model"], Cache]:
    """``GPT.hidden`` of tokens at positions start, start + 1, ..., reading and filling the cache.

    The sequence ends at ``end``: tokens from there on are padding. With rope_scaling = "dynamic", the cached
    keys stay as they were rotated at the length of their time, as in transformers.
    """
    positions = start + jnp.arange(tokens.shape[1])
    x, rope = model.embed_tokens(tokens, positions, end)
    distance = (positions[:, None] - jnp.arange(cache.keys.shape[2]))[None, None]
    windows = model.config.windowed
    if not isinstance(model.blocks, Stack):
        for index, (block, windowed) in enumerate(zip(model.blocks, windows, strict=True)):
            x, cache = _extend_block(block, index, windowed, x, rope, distance, start, cache)
        return model.norm(x), cache
    graph, stacked = nnx.split(model.blocks.block)

    def layer(
        carry: tuple[Array, Cache], item: tuple[nnx.State, Array, Array]
    ) -> tuple[tuple[Array, Cache], None]:
        weights, index, windowed = item
        x, cache = carry
        block = cast(Block, nnx.merge(graph, weights))
        return _extend_block(block, index, windowed, x, rope, distance, start, cache), None

    layers = jnp.arange(model.config.layers)
    (x, cache), _ = jax.lax.scan(layer, (x, cache), (stacked, layers, jnp.array(windows)))
    return model.norm(x), cache


def _extend_block(
    block: Block,
    index: int | Array,
    windowed: Windowed,
    x: Float[Array, "batch time d_model"],
    rope: RopeTable | None,
    distance: Int[Array, "1 1 time length"],
    start: Int[Array, ""],
    cache: Cache,
) -> tuple[Float[Array, "batch time d_model"], Cache]:
    """``Block.__call__`` with attention to the cached positions, each at a ``distance`` back from a token."""
    c = block.attention.config
    query, key, value = block.attention.project(block.norm_attention(x), rope, windowed)
    cache = Cache(
        *(
            jax.lax.dynamic_update_slice(whole, part[None], (index, 0, start, 0, 0))
            for whole, part in zip(cache, (key, value), strict=True)
        )
    )
    keys, values = (jax.lax.dynamic_index_in_dim(whole, index, keepdims=False) for whole in cache)
    seen = distance >= 0
    if c.sliding_window is not None:
        seen &= (distance < c.sliding_window) | jnp.logical_not(windowed)
    attended = masked_attention(
        query, keys, values, seen, scale=c.attention_scale, softcap=c.attention_softcap
    )
    return block.finish(x, block.attention.join(attended)), cache
