"""The specification of ``pallas_kernels.delta_chunks``."""

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64
"""Tokens whose triangular system is solved at once."""
BLOCK = 16
"""Tokens of a chunk whose products are summed channel by channel, if channels decay at different rates."""

Chunks = tuple[jax.Array, ...]
"""What each chunk of tokens does to the state S, and reads of it; each ``[chunk, batch, heads, ...]``.

- query ``[token, dim]``, which reads the state before the chunk, decayed;
- scores ``[token, token]``, by which a token reads what earlier ones write;
- written ``[token, value_dim]``, what tokens write if S is zero;
- removed ``[token, dim]``: they write ``written - removed S``;
- key ``[token, dim]``, under which it is written, decayed to the end of the chunk;
- decay ``[1 or dim]`` of the state, a number or one for each channel of the keys.
"""


def delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    documents: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.delta_chunks.delta_rule``; rows are whole chunks.

    Returns:
        The outputs; the state before each chunk [chunks, batch * heads, dim, value_dim], in the dtype of
        ``value``; and the last state.
    """
    batch, _, heads, width = value.shape

    def cut(x: jax.Array) -> jax.Array:
        """[chunk, batch, heads, token, ...]"""
        return jnp.moveaxis(x.reshape(batch, -1, CHUNK, *x.shape[2:]), (1, 3), (0, 2))

    numbers = jnp.moveaxis(documents.reshape(batch, -1, CHUNK), 1, 0)[:, :, None]
    before = jnp.concatenate([numbers[:1, :, :, :1], numbers[:-1, :, :, -1:]])
    of_beta = None if beta is None else cut(beta)
    decays = cut(log_decay if log_decay.ndim == 4 else log_decay[..., None])
    chunks = _within_chunks(cut(query), cut(key), cut(value), decays, of_beta, numbers, before)
    last, (out, states) = lax.scan(_over_chunk, state, chunks)
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(batch, -1, heads, width)
    return out, states.reshape(-1, batch * heads, *state.shape[2:]), last


def delta_rule_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    documents: jax.Array,
    state: jax.Array,
    before: jax.Array,
    of_out: jax.Array,
    of_last: jax.Array,
) -> tuple[jax.Array | None, ...]:
    """The cotangents of the arguments of ``delta_rule``, except ``documents``, in their order and shapes."""
    del before  # computed again

    def forward(
        query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array, beta: jax.Array | None,
        state: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        out, _, last = delta_rule(query, key, value, log_decay, beta, documents, state)
        return out, last

    return jax.vjp(forward, query, key, value, log_decay, beta, state)[1]((of_out, of_last))


def _over_chunk(state: jax.Array, chunk: Chunks) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    query, scores, written, removed, key, decay = chunk
    before = state.astype(query.dtype)
    written = (written - _product(removed, before)).astype(query.dtype)
    out = _product(query, before) + _product(scores, written)
    state = state * decay[..., None] + _product(key.mT, written)
    return state, (out.astype(query.dtype), before)


def _within_chunks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    numbers: jax.Array,
    before: jax.Array,
) -> Chunks:
    """All that needs no state, for all chunks at once; arguments are [chunk, batch, heads, token, ...].

    ``log_decay`` has an axis for the channels of the keys, or for one number. ``numbers`` are the documents,
    and ``before`` the document before each chunk.
    """
    repeats = value.shape[2] // key.shape[2]
    seen = _seen(numbers)[..., None]
    # Of each document alone: with one sum for all, rounding would carry gradients from one to the other.
    total = jnp.sum(jnp.where(seen, log_decay[..., None, :, :], 0), axis=-2)
    scores, of_keys = _decayed_products(query, key, total, numbers, repeats)
    query, key = (jnp.repeat(x, repeats, axis=2) for x in (query, key))
    last = numbers[..., -1:]
    from_before = jnp.where((numbers == before)[..., None], jnp.exp(total), 0)
    to_end = _decay(total[..., -1:, :] - total, (numbers == last)[..., None])
    decay = jnp.where(last == before, jnp.exp(total[..., -1, :]), 0)
    low = value.dtype
    read = (query * from_before).astype(low), scores.astype(low)
    last_key = (key * to_end).astype(low)
    if beta is None:
        return *read, value.astype(jnp.float32), jnp.zeros_like(last_key), last_key, decay
    # (I + system) [written | removed] = beta [value | decayed key]; the solver takes the diagonal as ones.
    system = beta[..., None] * of_keys
    wanted = jnp.concatenate([value.astype(jnp.float32), key * from_before], axis=-1) * beta[..., None]
    solved = lax.linalg.triangular_solve(system, wanted, left_side=True, lower=True, unit_diagonal=True)
    written, removed = jnp.split(solved, [value.shape[-1]], axis=-1)
    return *read, written, removed.astype(low), last_key, decay


def _decay(log_decay: jax.Array, own: jax.Array) -> jax.Array:
    """The decay from one token to another of its document, and exactly zero for others.

    Other documents' sums differ by any amount: its exponential would be infinite, and a gradient NaN.
    """
    return jnp.where(own, jnp.exp(jnp.where(own, log_decay, 0)), 0)


def _decayed_products(
    query: jax.Array, key: jax.Array, total: jax.Array, numbers: jax.Array, repeats: int
) -> tuple[jax.Array, jax.Array]:
    """Products of queries and of keys with earlier tokens' keys, which decay in between, ``[token, token]``.

    ``total`` sums the decays since the chunk or the document began, ``[token, 1 or dim]``.
    """
    if total.shape[-1] == 1:
        # Heads that share queries and keys also share their products.
        pairs = _decay(total - total.mT, _seen(numbers))
        scores, of_keys = (pairs * jnp.repeat(_product(x, key.mT), repeats, axis=2) for x in (query, key))
    else:
        query, key = (jnp.repeat(x, repeats, axis=2) for x in (query, key))
        scores, of_keys = (_by_channel(x, key, total, numbers) for x in (query, key))
    return scores, of_keys


def _seen(numbers: jax.Array) -> jax.Array:
    """Whether a token reads another one: it belongs to the same document and is not later."""
    earlier = jnp.tril(jnp.ones((numbers.shape[-1],) * 2, bool))
    return earlier & (numbers[..., :, None] == numbers[..., None, :])


def _by_channel(x: jax.Array, key: jax.Array, total: jax.Array, numbers: jax.Array) -> jax.Array:
    """``_decayed_products`` of ``x``, if each channel decays at its own rate.

    The decay between two blocks is a product of two factors: to the end of the block before the later one,
    and from there. Neither exceeds one. Within a block the decays of all pairs are computed.
    """
    low, rows = x.dtype, []
    for first in range(0, CHUNK, BLOCK):
        own, earlier = slice(first, first + BLOCK), slice(0, first)
        seen = _seen(numbers[..., own])[..., None]
        decays = _decay(total[..., own, None, :] - total[..., None, own, :], seen)
        pairs = x[..., own, None, :].astype(jnp.float32) * key[..., None, own, :] * decays
        parts = [jnp.sum(pairs, axis=-1)]
        if first:
            end, document = total[..., first - 1 : first, :], numbers[..., first - 1 : first]
            since = _decay(total[..., own, :] - end, (numbers[..., own] == document)[..., None])
            until = _decay(end - total[..., earlier, :], (numbers[..., earlier] == document)[..., None])
            left, right = (x[..., own, :] * since).astype(low), (key[..., earlier, :] * until).astype(low)
            parts.insert(0, _product(left, right.mT))
        missing = jnp.zeros((*parts[0].shape[:-1], CHUNK - first - BLOCK))
        rows.append(jnp.concatenate([*parts, missing], axis=-1))
    return jnp.concatenate(rows, axis=-2)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """A matrix product with an fp32 sum."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)
