"""The gated delta rule and Mamba-2's, chunk by chunk, and the short convolution before them.

A head keeps a state of fixed size in place of keys and values (``pallas_kernels.delta_rule_reference`` has
the rule, token by token). The chunked form computes ``CHUNK`` tokens together by matrix products (Yang and
others, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024). A triangular
system for each chunk tells what its tokens write into the state. Then a scan over chunks carries the state.

States, decays and the triangular systems are fp32; other products have operands of the values' dtype and fp32
sums. The backward pass computes the chunks again: besides its arguments it keeps one state for each chunk, so
that memory grows linearly with the sequence.

In packed rows a document's state begins at zero, and the convolution sees zeros before its first token. Masks
choose between values, so that exactly nothing crosses from one document to the next, in values and gradients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Float32, Int

import pallas_kernels
from pallas_kernels.delta_chunks_reference import product
from zerojax.models.flash_attention import ATTENTION_NAME, Segments

CHUNK = 64
"""Tokens whose triangular system is solved at once."""
State = Float32[Array, "batch heads dim value_dim"]


class _Chunk(NamedTuple):
    """What a chunk of tokens does to the state, and reads of it; each for [batch, heads].

    Attributes:
        query: [token, dim], which reads the state before the chunk, decayed.
        scores: [token, token], by which a token reads what earlier ones write.
        written: [token, value_dim], what tokens write if the state before the chunk is zero.
        removed: [token, dim], by which that state changes what they write.
        key: [token, dim], under which it is written, decayed to the end of the chunk.
        decay: of the state, a number.
    """

    query: Array
    scores: Array
    written: Array
    removed: Array
    key: Array
    decay: Array


def gated_delta_rule(
    query: Float[Array, "batch time key_heads dim"],
    key: Float[Array, "batch time key_heads dim"],
    value: Float[Array, "batch time heads value_dim"],
    log_decay: Float32[Array, "batch time heads"],
    beta: Float32[Array, "batch time heads"] | None,
    documents: Segments | None = None,
    state: State | None = None,
) -> tuple[Float[Array, "batch time heads value_dim"], State]:
    """Apply the rule to whole rows.

    Each query and key head serves as many neighbouring heads of values. The output has the checkpoint name
    "attention": under a remat policy that saves it the forward pass runs once.

    Args:
        query: scaled as the output is to be.
        key: of norm 1, if there is a beta.
        value: decides the dtype of products.
        log_decay: at most 0.
        beta: from 0 to 2. None means Mamba-2's rule, in which tokens remove nothing from the state.
        documents: the number of each token's document, for rows that hold several.
        state: from before the row; None is zero.

    Returns:
        The outputs, in the values' dtype, and the state after the row.
    """
    batch, _, heads, width = value.shape
    before = jnp.zeros((batch, heads, key.shape[3], width), jnp.float32) if state is None else state
    numbers = jnp.zeros(value.shape[:2], jnp.int32) if documents is None else documents
    if value.shape[1] == 1:
        return _one_token(query, key, value, log_decay, beta, before)
    # Nothing is kept of the chunks: their backward pass computes them again.
    out, after = jax.checkpoint(_by_chunks)(query, key, value, log_decay, beta, numbers, before)
    return checkpoint_name(out, ATTENTION_NAME), after


def _one_token(
    query: Array, key: Array, value: Array, log_decay: Array, beta: Array | None, state: State
) -> tuple[Array, State]:
    """The rule for the one token that generation has at a time."""
    repeats = value.shape[2] // key.shape[2]
    q, k = (jnp.repeat(x[:, 0], repeats, axis=1).astype(jnp.float32) for x in (query, key))
    state = state * jnp.exp(log_decay[:, 0, :, None, None])
    change = value[:, 0].astype(jnp.float32)
    if beta is not None:
        change = beta[:, 0, :, None] * (change - jnp.einsum("bhd,bhde->bhe", k, state))
    state = state + jnp.einsum("bhd,bhe->bhde", k, change)
    return jnp.einsum("bhd,bhde->bhe", q, state)[:, None].astype(value.dtype), state


def _by_chunks(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    beta: Array | None,
    numbers: Array,
    state: State,
) -> tuple[Array, State]:
    batch, time, heads, width = value.shape

    def cut(x: Array) -> Array:
        """[chunk, batch, heads, token, ...]: tokens of zeros behind a row change nothing."""
        x = jnp.pad(x, ((0, 0), (0, -time % CHUNK), *((0, 0) for _ in x.shape[2:])))
        x = x.reshape(batch, -1, CHUNK, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    numbers = jnp.pad(numbers, ((0, 0), (0, -time % CHUNK)), mode="edge")
    numbers = jnp.moveaxis(numbers.reshape(batch, -1, CHUNK), 1, 0)[:, :, None]
    before = jnp.concatenate([numbers[:1, :, :, :1], numbers[:-1, :, :, -1:]])
    of_beta = None if beta is None else cut(beta)
    chunks = _within_chunks(
        *(cut(query), cut(key), cut(value), cut(log_decay), of_beta), numbers=numbers, before=before
    )
    # The kernels know rows and heads as one axis.
    flat = [x.reshape(len(x), batch * heads, *x.shape[3:]) for x in chunks]
    out, last = pallas_kernels.scan_chunks(*flat, state.reshape(-1, *state.shape[2:]))
    out = out.reshape(-1, batch, heads, CHUNK, width)
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(batch, -1, heads, width)[:, :time]
    return out, last.reshape(state.shape)


def _within_chunks(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    beta: Array | None,
    *,
    numbers: Array,
    before: Array,
) -> _Chunk:
    """All that needs no state, for all chunks at once; arguments are [chunk, batch, heads, token, ...].

    ``before`` is the document before each chunk.
    """
    repeats = value.shape[2] // key.shape[2]
    # Heads that share queries and keys also share their products.
    scores, of_keys = (jnp.repeat(product(x, key.mT), repeats, axis=2) for x in (query, key))
    query, key = (jnp.repeat(x, repeats, axis=2) for x in (query, key))
    earlier = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    seen = earlier & (numbers[..., :, None] == numbers[..., None, :])
    # Of each document alone: with one sum for all, rounding would carry gradients from one to the other.
    total = jnp.sum(jnp.where(seen, log_decay[..., None, :], 0), axis=-1)
    pairs = jnp.where(seen, jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], 0)), 0)
    last = numbers[..., -1:]
    from_before = jnp.where(numbers == before, jnp.exp(total), 0)[..., None]
    # Other documents' sums differ by any amount: its exponential would be infinite, and a gradient NaN.
    own = numbers == last
    to_end = jnp.where(own, jnp.exp(jnp.where(own, total[..., -1:] - total, 0)), 0)[..., None]
    decay = jnp.where(last == before, jnp.exp(total[..., -1:]), 0)[..., 0]
    low = value.dtype
    read = (query * from_before).astype(low), (pairs * scores).astype(low)
    last_key = (key * to_end).astype(low)
    if beta is None:
        return _Chunk(*read, value.astype(jnp.float32), jnp.zeros_like(last_key), last_key, decay)
    # (I + system) [written | removed] = beta [value | decayed key]; the solver takes the diagonal as ones.
    system = beta[..., None] * pairs * of_keys
    wanted = jnp.concatenate([value.astype(jnp.float32), key * from_before], axis=-1) * beta[..., None]
    solved = pallas_kernels.solve_unit_lower(system, wanted)
    written, removed = jnp.split(solved, [value.shape[-1]], axis=-1)
    return _Chunk(*read, written, removed.astype(low), last_key, decay)


def short_convolution(
    x: Float[Array, "batch time width"],
    kernel: Float[Array, "taps width"],
    documents: Segments | None = None,
    before: Float[Array, "batch taps_less_one width"] | None = None,
) -> Float[Array, "batch time width"]:
    """Each element's weighted sum over its last tokens, the token itself included, fp32.

    ``before`` are the inputs before the row, by default zeros.
    """
    taps, time = kernel.shape[0], x.shape[1]
    if before is None:
        before = jnp.zeros((x.shape[0], taps - 1, x.shape[2]), x.dtype)
    every = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(taps):
        shifted = lax.slice_in_dim(every, tap, tap + time, axis=1).astype(jnp.float32)
        if documents is not None and tap < taps - 1:
            numbers = jnp.pad(documents, ((0, 0), (taps - 1 - tap, 0)), mode="edge")[:, :time]
            shifted = jnp.where((numbers == documents)[..., None], shifted, 0)
        total += kernel[tap].astype(jnp.float32) * shifted
    return total


def last_inputs(
    x: Float[Array, "batch time width"], before: Float[Array, "batch kept width"], count: Int[Array, " batch"]
) -> Float[Array, "batch kept width"]:
    """The last inputs of a convolution, after ``count`` tokens of each row of ``x``."""
    every = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    places = count[:, None] + jnp.arange(before.shape[1])
    return jnp.take_along_axis(every, places[..., None], axis=1)
