"""Samples text from a GPT with a key-value cache: all tokens in one compiled program, or one by one."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from zerojax.adapters.stack import Stack
from zerojax.errors import ConfigurationError
from zerojax.models.attention import Windowed, masked_attention
from zerojax.models.config import GPTConfig
from zerojax.models.gpt import GPT, Block, logits
from zerojax.models.rope import RopeTable
from zerojax.models.sampling import Sampling, sample


class Cache(NamedTuple):
    """Keys and values of all blocks, for positions up to a fixed length."""

    keys: Float[Array, "layers batch length kv_heads dim"]
    values: Float[Array, "layers batch length kv_heads dim"]


class _Reach(NamedTuple):
    """Which cached columns the tokens of a call may see.

    Attributes:
        distance: how far each lies back from a token.
        there: which are no padding.
    """

    distance: Int[Array, "1 1 time length"]
    there: Bool[Array, "batch 1 1 length"]


def generate(
    model: GPT,
    prompt: Int[Array | np.ndarray, "batch prompt"] | Sequence[Int[np.ndarray, " prompt"]],
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
        prompt: int32 ids, as an array or as rows of different lengths, each of which is continued as it would
            be alone; of a prompt longer than max_seq_len only the last max_seq_len / 2 are used.
        new_tokens: number of tokens to add.
        key: random key; the same key gives the same text.
        how: temperature, top-k and top-p; None is ``Sampling()``.
        stop: a token that ends its row, such as the end of a text; it fills the rest of the row.

    Returns:
        int32 new tokens, without the prompt.

    Raises:
        ConfigurationError: if a row of the prompt is empty or not a vector, there is none, new_tokens is
            below 1, or rows differ in length in a model whose rotary positions depend on it.
    """
    windows = [_window(model, row) for row in _checked_rows(prompt, new_tokens)]
    dynamic = model.config.rope_scaling == "dynamic"
    if dynamic and len({*map(len, windows)}) > 1:
        raise ConfigurationError(
            'rotary positions of rope_scaling = "dynamic" depend on the length of a text: give prompts of '
            "one length, or one at a time"
        )
    graph, weights = nnx.split(model)
    new = np.zeros((len(windows), 0), np.int32)
    done = np.zeros(len(windows), bool)
    while new.shape[1] < new_tokens:
        padded, padding, length, count, capacity = _fit(model, windows, new_tokens - new.shape[1])
        key, draw = jax.random.split(key)
        more = _continue(
            graph,
            weights,
            padded,
            padding,
            length,
            count,
            done,
            draw,
            capacity=capacity,
            how=how or Sampling(),
            stop=stop,
        )
        added = np.asarray(more)[:, :count]
        new = np.concatenate([new, added], axis=1)
        windows = [_window(model, np.concatenate(pair)) for pair in zip(windows, added, strict=True)]
        if stop is not None:
            done = np.any(new == stop, axis=1)
            if not dynamic:  # a row that is done needs no context
                windows = [row[-1:] if ended else row for row, ended in zip(windows, done, strict=True)]
            if done.all():
                rest = new_tokens - new.shape[1]
                new = np.pad(new, ((0, 0), (0, rest)), constant_values=stop)
    return jnp.asarray(new)


def stream(
    model: GPT,
    prompt: Int[np.ndarray, " prompt"],
    new_tokens: int,
    *,
    key: Key[Array, ""],
    how: Sampling | None = None,
    stop: int | None = None,
) -> Iterator[int]:
    """The tokens of ``generate`` for one prompt, one by one as they are drawn, up to ``stop``.

    Arguments and errors are those of ``generate``. ``stop`` itself is not among the tokens.
    """
    [text] = _checked_rows([prompt], new_tokens)
    how = how or Sampling()
    graph, weights = nnx.split(model)
    left = new_tokens
    while left:
        padded, _, length, count, capacity = _fit(model, [_window(model, text)], left)
        key, draw = jax.random.split(key)
        token, cache = _first(graph, weights, padded, length, draw, capacity=capacity, how=how)
        for step in range(1, count + 1):
            drawn = int(token[0])
            if drawn == stop:
                return
            yield drawn
            text, left = np.append(text, np.int32(drawn)), left - 1
            if step < count:
                token, cache = _next(graph, weights, token, length, step, draw, cache, how=how)


def _checked_rows(prompt: Any, new_tokens: int) -> list[np.ndarray]:
    """The rows of a prompt, int32."""
    rows = [np.asarray(row, np.int32) for row in (np.asarray(prompt) if hasattr(prompt, "ndim") else prompt)]
    if not rows or any(row.ndim != 1 or not row.size for row in rows):
        shapes = sorted({row.shape for row in rows})
        raise ConfigurationError(
            f"prompt has shape {shapes} in {len(rows)} rows: each row is a vector of at least one token"
        )
    if new_tokens < 1:
        raise ConfigurationError(f"new_tokens = {new_tokens}: at least 1")
    return rows


def _window(model: GPT, text: np.ndarray) -> np.ndarray:
    """What the model sees of a text: all, or half a context if it is longer than one."""
    context = model.config.max_seq_len
    return text if len(text) <= context else text[-max(1, context // 2) :]


def _fit(
    model: GPT, windows: list[np.ndarray], wanted: int
) -> tuple[Int[np.ndarray, "batch padded"], Int[np.ndarray, " batch"], int, int, int]:
    """Rows padded on the left to one length, and all on the right to one that is often used.

    Returns:
        The rows; how much each is padded on the left; their length without what is on the right; how many
        tokens can be added before the context is full; and the length of the cache.
    """
    context = model.config.max_seq_len
    length = max(map(len, windows))
    # The last new token is never an input, so it needs no room in the context.
    count = min(wanted, context - length + 1)
    padding = np.asarray([length - len(window) for window in windows], np.int32)
    padded = np.zeros((len(windows), min(_round_up(length), context)), np.int32)
    for row, window, start in zip(padded, windows, padding, strict=True):
        row[start:length] = window
    return padded, padding, length, count, min(_round_up(length + count), context)


def _round_up(length: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (length - 1).bit_length())


@partial(jax.jit, static_argnames=("graph", "capacity", "how", "stop"))
def _continue(
    graph: nnx.GraphDef[GPT],
    weights: nnx.State,
    prompt: Int[Array, "batch padded"],
    padding: Int[Array, " batch"],
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

    The prompt of each row begins after its ``padding``.

    Rows that are done from the start get ``stop`` only.
    """
    model = nnx.merge(graph, weights)
    batch = prompt.shape[0]
    last, cache = _read(model, prompt, padding, length, capacity)

    def draw(hidden: Array, step: Array, done: Array) -> tuple[Array, Array]:
        token = _draw(model, hidden, key, step, how)
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
        hidden, cache = _extend(model, token[:, None], length + step - 1, cache, padding, length + step)
        token, done = draw(hidden, step, done)
        return step + 1, token, done, text.at[:, step].set(token), cache

    token, done = draw(last, jnp.int32(0), done)
    text = jnp.full((batch, capacity + 1), 0 if stop is None else stop, jnp.int32).at[:, 0].set(token)
    return jax.lax.while_loop(unfinished, advance, (jnp.int32(1), token, done, text, cache))[3]


@partial(jax.jit, static_argnames=("graph", "capacity", "how"))
def _first(
    graph: nnx.GraphDef[GPT],
    weights: nnx.State,
    prompt: Int[Array, "1 padded"],
    length: Int[Array, ""],
    key: Key[Array, ""],
    *,
    capacity: int,
    how: Sampling,
) -> tuple[Int[Array, " 1"], Cache]:
    """The token after the first ``length`` of the prompt, and the cache of these."""
    model = nnx.merge(graph, weights)
    hidden, cache = _read(model, prompt, jnp.zeros(1, jnp.int32), length, capacity)
    return _draw(model, hidden, key, jnp.int32(0), how), cache


@partial(jax.jit, static_argnames=("graph", "how"), donate_argnames=("cache",))
def _next(
    graph: nnx.GraphDef[GPT],
    weights: nnx.State,
    token: Int[Array, " 1"],
    length: Int[Array, ""],
    step: Int[Array, ""],
    key: Key[Array, ""],
    cache: Cache,
    *,
    how: Sampling,
) -> tuple[Int[Array, " 1"], Cache]:
    """The token ``step`` tokens after the first new one, which follows ``token``."""
    model = nnx.merge(graph, weights)
    none = jnp.zeros(1, jnp.int32)
    hidden, cache = _extend(model, token[:, None], length + step - 1, cache, none, length + step)
    return _draw(model, hidden, key, step, how), cache


def _read(
    model: GPT,
    prompt: Int[Array, "batch padded"],
    padding: Int[Array, " batch"],
    length: Int[Array, ""],
    capacity: int,
) -> tuple[Float[Array, "batch 1 d_model"], Cache]:
    """The output after the first ``length`` of the prompt, and the cache.

    Cache entries of what is on their right lie ahead of every query until tokens overwrite them.
    """
    empty = _empty_cache(model, prompt.shape[0], capacity)
    hidden, cache = _extend(model, prompt, jnp.int32(0), empty, padding, length)
    return jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1), cache


def _draw(model: GPT, hidden: Array, key: Array, step: Array, how: Sampling) -> Int[Array, " batch"]:
    scores = logits(hidden[:, 0], model.unembedding, model.config.logit_softcap)
    return sample(scores, jax.random.fold_in(key, step), how)


def _empty_cache(model: GPT, batch: int, length: int) -> Cache:
    c: GPTConfig = model.config
    shape = (c.layers, batch, length, c.key_value_heads, c.head_dim)
    dtype = model.embed.embedding[...].dtype
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def _extend(
    model: GPT,
    tokens: Int[Array, "batch time"],
    start: Int[Array, ""],
    cache: Cache,
    padding: Int[Array, " batch"],
    end: Int[Array, ""],
) -> tuple[Float[Array, "batch time d_model"], Cache]:
    """``GPT.hidden`` of tokens in columns start, start + 1, ..., reading and filling the cache.

    The first ``padding`` columns of a row are nothing: the next one has position 0. The text ends at ``end``:
    columns from there on are padding. With rope_scaling = "dynamic", the cached keys stay as they were
    rotated at the length of their time, as in transformers.
    """
    columns = start + jnp.arange(tokens.shape[1])
    x, rope = model.embed_tokens(tokens, jnp.maximum(columns - padding[:, None], 0), end)
    cached = jnp.arange(cache.keys.shape[2])
    reach = _Reach((columns[:, None] - cached)[None, None], (cached >= padding[:, None])[:, None, None])
    windows = model.config.windowed
    if not isinstance(model.blocks, Stack):
        for index, (block, windowed) in enumerate(zip(model.blocks, windows, strict=True)):
            x, cache = _extend_block(block, index, windowed, x, rope, reach, start, cache)
        return model.norm(x), cache
    graph, stacked = nnx.split(model.blocks.block)

    def layer(
        carry: tuple[Array, Cache], item: tuple[nnx.State, Array, Array]
    ) -> tuple[tuple[Array, Cache], None]:
        weights, index, windowed = item
        x, cache = carry
        block = cast(Block, nnx.merge(graph, weights))
        return _extend_block(block, index, windowed, x, rope, reach, start, cache), None

    layers = jnp.arange(model.config.layers)
    (x, cache), _ = jax.lax.scan(layer, (x, cache), (stacked, layers, jnp.array(windows)))
    return model.norm(x), cache


def _extend_block(
    block: Block,
    index: int | Array,
    windowed: Windowed,
    x: Float[Array, "batch time d_model"],
    rope: RopeTable | None,
    reach: _Reach,
    start: Int[Array, ""],
    cache: Cache,
) -> tuple[Float[Array, "batch time d_model"], Cache]:
    """``Block.__call__`` with attention to the cached columns in reach of each token."""
    c = block.attention.config
    query, key, value = block.attention.project(block.norm_attention(x), rope, windowed)
    cache = Cache(
        *(
            jax.lax.dynamic_update_slice(whole, part[None], (index, 0, start, 0, 0))
            for whole, part in zip(cache, (key, value), strict=True)
        )
    )
    keys, values = (jax.lax.dynamic_index_in_dim(whole, index, keepdims=False) for whole in cache)
    seen = reach.there & (reach.distance >= 0)
    if c.sliding_window is not None:
        seen &= (reach.distance < c.sliding_window) | jnp.logical_not(windowed)
    attended = masked_attention(
        query, keys, values, seen, scale=c.attention_scale, softcap=c.attention_softcap
    )
    return block.finish(x, block.attention.join(attended)), cache
