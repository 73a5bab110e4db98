"""Cross-entropy with the logits of one chunk of tokens at a time."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from zerojax.adapters.loss import own_tokens, world_sum
from zerojax.errors import ConfigurationError
from zerojax.experts import RouterStats, balance_loss, z_loss
from zerojax.models.gpt import GPT, logits
from zerojax.models.options import VOCABULARY_TILE
from zerojax.schedule.breadth_first import broadcast_unbatched, map_microbatches, with_batching_rule

IGNORE = -1
"""A label that is in neither the loss nor the token count. Any label below 0 is ignored."""

_OF_TOKENS = ("segments", "labels")
"""Optional entries of ``lm_loss``'s batch, in the shape of "tokens"."""


class _Head(NamedTuple):
    """Static options of the output projection and its softmax.

    Attributes:
        vocabulary: tokens, without the unembedding's padding.
        softcap: the logits become softcap x tanh(logits / softcap).
        temperature: divisor of the logits.
    """

    vocabulary: int
    softcap: float | None
    temperature: float = 1.0


def cross_entropy(
    hidden: Float[Array, "tokens d_model"],
    unembedding: Float[Array, "vocab d_model"],
    labels: Int[Array, " tokens"],
    *,
    chunk: int = 2048,
    softcap: float | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean negative log-likelihood (nats per token) of labels under softmax(hidden @ unembedding.T).

    Both matmuls of the gradient run in the forward pass, chunk by chunk, while a chunk's logits exist. No
    array of the logits' size outlives its chunk, and no logit is computed twice. Operands keep their dtype
    (bf16 on tensor cores). Logits, sums and the unembedding's gradient accumulate in fp32. Reverse mode only.

    Args:
        hidden: one row per token.
        unembedding: one row per vocabulary entry.
        labels: the right token for each row. A label below 0 is ignored, such as -1 or PyTorch's -100. One
            beyond the vocabulary makes the loss NaN.
        chunk: most tokens whose logits exist at a time.
        softcap: the logits become softcap x tanh(logits / softcap).

    Returns:
        The mean over counted tokens (0 if there are none) and their number, both fp32.

    Raises:
        ConfigurationError: chunk is below 1, or the shapes do not fit together.
    """
    _check(hidden, unembedding, labels, chunk)
    head = _Head(len(unembedding), softcap)
    unembedding = _padded(unembedding)
    total_loss = with_batching_rule(partial(_in_breadth, head), partial(_total_loss, head))
    total: Array = total_loss(*_in_chunks(hidden, labels, chunk), unembedding)
    count = jnp.sum(labels >= 0, dtype=jnp.float32)
    return total / jnp.maximum(count, 1), count


def label_log_probs(
    hidden: Float[Array, "tokens d_model"],
    unembedding: Float[Array, "vocab d_model"],
    labels: Int[Array, " tokens"],
    *,
    chunk: int = 2048,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Float[Array, " tokens"]:
    """The log-probability (nats, fp32) of each label under softmax(hidden @ unembedding.T / temperature).

    No array of the logits' size outlives its chunk: the backward pass recomputes the logits. Dtypes are as in
    ``cross_entropy``. Reverse mode only.

    Args:
        hidden: one row per token.
        unembedding: one row per vocabulary entry.
        labels: one for each row. A label below 0 has the result 0, one beyond the vocabulary NaN.
        chunk: most tokens whose logits exist at a time.
        softcap: the logits become softcap x tanh(logits / softcap), before the division by ``temperature``.
        temperature: divisor of the logits, above 0.

    Raises:
        ConfigurationError: chunk is below 1, the temperature is not positive, or the shapes do not fit
            together.
    """
    _check(hidden, unembedding, labels, chunk)
    if not temperature > 0:
        raise ConfigurationError(f"temperature = {temperature}: log-probabilities need one above 0")
    head = _Head(len(unembedding), softcap, temperature)
    found: Array = _log_probs(head, *_in_chunks(hidden, labels, chunk), _padded(unembedding))
    return found.reshape(-1)[: len(labels)]


def _check(hidden: Array, unembedding: Array, labels: Array, chunk: int) -> None:
    if chunk < 1:
        raise ConfigurationError(f"chunk = {chunk} must be at least 1 token")
    if hidden.shape[:1] != labels.shape or hidden.shape[1:] != unembedding.shape[1:]:
        raise ConfigurationError(
            f"hidden {hidden.shape}, unembedding {unembedding.shape}, labels {labels.shape}: "
            "expected (tokens, d_model), (vocab, d_model), (tokens,)"
        )


def _padded(unembedding: Array) -> Array:
    # On tensor cores GPT-2's 50257 columns take twice as long as 50304. Padding gets probability 0.
    return jnp.pad(unembedding, ((0, -len(unembedding) % VOCABULARY_TILE), (0, 0)))


def _in_chunks(hidden: Array, labels: Array, chunk: int) -> tuple[Array, Array]:
    """Cut both into equal chunks of at most ``chunk`` rows; ignored rows fill up the last one."""
    tokens = len(labels)
    chunks = max(1, -(-tokens // chunk))
    size = -(-tokens // chunks)
    pad = chunks * size - tokens
    if pad:
        hidden = jnp.pad(hidden, ((0, pad), (0, 0)))
        labels = jnp.pad(labels, (0, pad), constant_values=IGNORE)
    return hidden.reshape(chunks, size, -1), labels.reshape(chunks, size)


def _chunk_losses(
    head: _Head, hidden: Array, labels: Array, unembedding: Array
) -> tuple[Array, Array, Array]:
    """A chunk's losses [rows], logits [rows, vocab] and log-sum-exp [rows]."""
    scores = logits(hidden, unembedding, head.softcap) / head.temperature
    scores = jnp.where(jnp.arange(scores.shape[-1]) < head.vocabulary, scores, -jnp.inf)
    normalizer = jax.nn.logsumexp(scores, axis=-1)
    index = jnp.maximum(labels, 0)[:, None]
    right = jnp.take_along_axis(scores, index, axis=-1, mode="fill")[:, 0]
    right = jnp.where(labels < head.vocabulary, right, jnp.nan)
    return jnp.where(labels >= 0, normalizer - right, 0), scores, normalizer


def _chunk_gradients(
    head: _Head,
    rows: Array,
    right: Array,
    unembedding: Array,
    scores: Array,
    normalizer: Array,
    factors: Array,
) -> tuple[Array, Array]:
    """The gradients of a chunk's losses times ``factors``: of the rows, and of the unembedding in fp32.

    The factors are one for each row, or one for all. The other arguments are arguments and
    results of ``_chunk_losses``.
    """
    # d loss / d logits = softmax - one-hot, zero in ignored rows.
    error = jnp.exp(scores - normalizer[:, None]) - (right[:, None] == jnp.arange(len(unembedding)))
    if head.softcap is not None:
        # The slope of the softcap. Padding columns have scores of -inf and an error of 0.
        slope = 1 - (jnp.maximum(head.temperature * scores, -head.softcap) / head.softcap) ** 2
        error = error * slope
    factors = jnp.broadcast_to(factors / head.temperature, right.shape)[:, None]
    error = jnp.where(right[:, None] >= 0, error * factors, 0).astype(unembedding.dtype)
    row_gradient = jnp.einsum("nv,vd->nd", error, unembedding).astype(rows.dtype)
    return row_gradient, jnp.einsum("nv,nd->vd", error, rows, preferred_element_type=jnp.float32)


def _at(stack: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _losses(
    head: _Head,
    hidden: Float[Array, "chunks size d_model"],
    labels: Int[Array, "chunks size"],
    unembedding: Float[Array, "padded d_model"],
) -> Float[Array, "chunks size"]:
    """Each row's loss; only the first head.vocabulary rows of the unembedding are tokens."""

    def measure(chunk: tuple[Array, Array]) -> Array:
        rows, right = chunk
        return _chunk_losses(head, rows, right, unembedding)[0]

    return jax.lax.map(measure, (hidden, labels))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_probs(head: _Head, hidden: Array, labels: Array, unembedding: Array) -> Array:
    return -_losses(head, hidden, labels, unembedding)


def _log_probs_backward(
    head: _Head, args: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, None, Array]:
    hidden, labels, unembedding = args

    def step(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        weight_gradient, stack = carry
        rows, right, factors = (_at(x, index) for x in (stack, labels, gradient))
        _, scores, normalizer = _chunk_losses(head, rows, right, unembedding)
        row_gradient, more = _chunk_gradients(head, rows, right, unembedding, scores, normalizer, -factors)
        stack = jax.lax.dynamic_update_index_in_dim(stack, row_gradient, index, 0)
        return weight_gradient + more, stack

    start = jnp.zeros(unembedding.shape, jnp.float32), hidden
    weight_gradient, row_gradients = jax.lax.fori_loop(0, len(hidden), step, start)
    return row_gradients, None, weight_gradient.astype(unembedding.dtype)


_log_probs.defvjp(lambda head, *args: (_log_probs(head, *args), args), _log_probs_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total_loss(head: _Head, hidden: Array, labels: Array, unembedding: Array) -> Float[Array, ""]:
    """The loss summed over all chunks, first within each."""
    return jnp.sum(jnp.sum(_losses(head, hidden, labels, unembedding), axis=1))


def _total_loss_forward(
    head: _Head, hidden: Array, labels: Array, unembedding: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    dtype = unembedding.dtype

    def step(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        total, weight_gradient, stack = carry
        rows, right = _at(stack, index), _at(labels, index)
        losses, scores, normalizer = _chunk_losses(head, rows, right, unembedding)
        row_gradient, more = _chunk_gradients(
            head, rows, right, unembedding, scores, normalizer, jnp.float32(1)
        )
        # The gradients overwrite the rows, which nothing reads again.
        stack = jax.lax.dynamic_update_index_in_dim(stack, row_gradient, index, 0)
        return total + jnp.sum(losses), weight_gradient + more, stack

    start = jnp.zeros((), jnp.float32), jnp.zeros(unembedding.shape, jnp.float32), hidden
    total, weight_gradient, row_gradients = jax.lax.fori_loop(0, len(hidden), step, start)
    # The cotangent must have the weight's dtype. An empty array carries that dtype to the backward rule.
    return total, (row_gradients, weight_gradient, jnp.zeros((0,), dtype))


def _total_loss_backward(
    head: _Head, residuals: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, None, Array]:
    del head
    row_gradients, weight_gradient, like = residuals
    return (
        (gradient * row_gradients).astype(row_gradients.dtype),
        None,
        (gradient * weight_gradient).astype(like.dtype),
    )


_total_loss.defvjp(_total_loss_forward, _total_loss_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total_loss_again(head: _Head, hidden: Array, labels: Array, unembedding: Array) -> Array:
    """``_total_loss``, but the backward pass recomputes the logits instead of keeping gradients."""
    return _total_loss(head, hidden, labels, unembedding)


_total_loss_again.defvjp(
    lambda head, *args: (_total_loss(head, *args), args),
    lambda head, args, gradient: _total_loss_backward(head, _total_loss_forward(head, *args)[1], gradient),
)


def _in_breadth(
    head: _Head, size: int, mapped: Any, hidden: Array, labels: Array, unembedding: Array
) -> tuple[Array, bool]:
    """Map micro-batches one after another, which sums the unembedding's gradients instead of stacking them.

    The forward pass cannot sum them, because it does not know the cotangent of each loss.
    """
    *rows_mapped, table_mapped = mapped
    if table_mapped:
        axes = [0 if own else None for own in mapped]
        return jax.vmap(partial(_total_loss, head), in_axes=axes)(hidden, labels, unembedding), True
    rows = broadcast_unbatched(size, rows_mapped, [hidden, labels])

    def loss(unembedding: Array, hidden: Array, labels: Array) -> Array:
        return _total_loss_again(head, hidden, labels, unembedding)

    return map_microbatches(loss, (True, True))(unembedding, *rows), True


def lm_loss(
    model: GPT, batch: dict[str, Array], rngs: nnx.Rngs | None = None
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Next-token loss of a batch {"tokens": int32[batch, time + 1]}, for ``TrainState.create``.

    Positions whose next token is below 0 (padding: -1, or -100) do not count. Two more entries are optional,
    both int32 in the shape of "tokens":

    - "segments": the document of each token. Documents of a row do not attend to each other, and a position
      whose next token starts another document does not count.
    - "labels": the tokens, with -1 or -100 where they do not count.

    In training, a mixture of experts adds its routers' losses times their coefficients, over the whole batch
    on all devices, padding included. In evaluation mode the loss is the language loss alone.

    Returns:
        The mean loss in nats per token, and {"tokens": the number of counted tokens}. In training a mixture
        of experts adds ``router_metrics``.

    Raises:
        ConfigurationError: the batch has no "tokens" of two or more columns, "segments" or "labels" of
            another shape, or any other entry; or the model is a model of scores.
    """
    model.config.check_language_model("a loss of tokens")
    tokens = batch.get("tokens")
    if tokens is None or tokens.ndim != 2 or tokens.shape[1] < 2:
        shapes = {name: np.shape(value) for name, value in batch.items()}
        raise ConfigurationError(f'a batch needs "tokens" of shape (batch, time + 1); this one has {shapes}')
    if unread := sorted(batch.keys() - {"tokens", *_OF_TOKENS}):
        raise ConfigurationError(
            f'lm_loss reads "tokens", "segments" and "labels"; this batch also has {unread}. Give tokens '
            "that do not count the label -1, and leave out other entries"
        )
    for name in _OF_TOKENS:
        if name in batch and batch[name].shape != tokens.shape:
            raise ConfigurationError(
                f'"{name}" has shape {batch[name].shape}, but "tokens" {tokens.shape}: give one shape'
            )
    labels, segments = batch.get("labels", tokens)[:, 1:], batch.get("segments")
    if segments is not None:
        labels = jnp.where(segments[:, 1:] == segments[:, :-1], labels, IGNORE)
        segments = segments[:, :-1]
    routed = model.config.experts > 0 and not model.deterministic
    inputs = jnp.maximum(tokens[:, :-1], 0)
    if routed:
        hidden, stats = model.routed(inputs, segments=segments, rngs=rngs)
    else:
        hidden, stats = model.hidden(inputs, segments=segments, rngs=rngs), None
    loss, count = cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        model.unembedding,
        own_tokens(labels).reshape(-1),
        chunk=model.config.loss_chunk,
        softcap=model.config.logit_softcap,
    )
    aux = {"tokens": count}
    if stats is not None:
        metrics = router_metrics(stats)
        config = model.config
        loss += config.balance_loss * metrics["balance_loss"] + config.z_loss * metrics["z_loss"]
        aux |= metrics
    return loss, aux


def router_metrics(stats: RouterStats) -> dict[str, Float[Array, ""]]:
    """The routers' metrics over the batch of all devices, fp32.

    Args:
        stats: this device's statistics, with a leading axis of layers.

    Returns:
        - "balance_loss" and "z_loss": means over layers without their coefficients; differentiable.
        - "expert_load": the busiest expert's tokens divided by the mean, for the layer where this is largest.
          1 is even.
        - "router_entropy": entropy of a token's probabilities of all experts in nats, averaged over tokens
          and layers. It is at most the logarithm of the number of experts.
    """
    counts, entropy, tokens = world_sum(
        jax.tree.map(jax.lax.stop_gradient, (stats.counts, stats.entropy, stats.tokens))
    )
    return {
        "balance_loss": balance_loss(stats),
        "z_loss": z_loss(stats),
        "expert_load": jnp.max(counts.max(-1) / counts.mean(-1)),
        "router_entropy": jnp.mean(entropy / tokens),
    }
