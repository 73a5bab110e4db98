"""Drawing tokens from logits."""

from dataclasses import dataclass
from numbers import Integral

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zerojax.errors import ConfigurationError
from zerojax.validation.bounds import MIN_TEMPERATURE


@dataclass(frozen=True)
class Sampling:
    """How to draw the next token from the logits.

    Attributes:
        temperature: Divisor of the logits, from 1e-6; 0 takes the likeliest token.
        top_k: Draw only from this many likeliest tokens.
        top_p: Draw only from the fewest likeliest tokens whose probabilities (after temperature and
            top_k) sum to at least this (Holtzman et al., 2020).

    Among equally likely tokens, lower ids count as likelier, as in greedy decoding.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or self.temperature >= MIN_TEMPERATURE):
            raise ConfigurationError(
                f"temperature = {self.temperature} must be 0 (greedy) or at least {MIN_TEMPERATURE}"
            )
        if self.top_k is not None and not (isinstance(self.top_k, Integral) and self.top_k >= 1):
            raise ConfigurationError(f"top_k = {self.top_k} must be a whole number from 1, or left out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p = {self.top_p} must be above 0 and at most 1, or left out")


def sample(
    scores: Float[Array, "batch vocab"], keys: Key[Array, " batch"], how: Sampling
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """Draw one token per row of logits.

    Returns:
        The tokens, int32, and their log-probabilities under softmax(scores / temperature), fp32. ``top_k``
        and ``top_p`` do not change the log-probabilities, and temperature 0 counts as 1 there.
    """
    scores = scores.astype(jnp.float32) / (how.temperature or 1.0)
    if how.temperature == 0:
        tokens = jnp.argmax(scores, axis=-1)
    else:
        tokens = jax.vmap(jax.random.categorical)(keys, _truncated(scores, how))
    chosen = jnp.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), chosen - jax.nn.logsumexp(scores, axis=-1)


def _truncated(scores: Float[Array, "batch vocab"], how: Sampling) -> Float[Array, "batch vocab"]:
    """The logits, with -inf for tokens that ``top_k`` and ``top_p`` exclude."""
    if how.top_k is not None and how.top_k < scores.shape[-1]:
        least = jax.lax.top_k(scores, how.top_k)[0][:, -1:]
        scores = _likeliest(scores, least, how.top_k)
    if how.top_p is not None and how.top_p < 1:
        descending = jnp.sort(scores, axis=-1, descending=True)
        probabilities = jax.nn.softmax(descending, axis=-1)
        # A token is kept if the likelier ones sum to less than top_p; the likeliest always is.
        kept = jnp.cumsum(probabilities, axis=-1) - probabilities < how.top_p
        least = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        scores = _likeliest(scores, least, kept.sum(axis=-1, keepdims=True))
    return scores


def _likeliest(
    scores: Float[Array, "batch vocab"], least: Float[Array, "batch 1"], count: Int[Array, "batch 1"] | int
) -> Float[Array, "batch vocab"]:
    """The logits, with -inf for all but the ``count`` likeliest; ``least`` is the last of these."""
    tied, above = scores == least, scores > least
    room = count - above.sum(axis=-1, keepdims=True)
    return jnp.where(above | (tied & (jnp.cumsum(tied, axis=-1) <= room)), scores, -jnp.inf)
