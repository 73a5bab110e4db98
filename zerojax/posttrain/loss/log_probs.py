"""Log-probabilities of tokens under a model."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zerojax.adapters.loss import own_tokens
from zerojax.models import GPT, label_log_probs
from zerojax.models.loss import IGNORE


def token_log_probs(
    model: GPT,
    tokens: Int[Array, "rows time_1"],
    mask: Float[Array, "rows time"],
    *,
    temperature: float = 1.0,
) -> Float[Array, "rows time"]:
    """The log-probability (nats, fp32) of each token except the first, given the tokens before it.

    With ``ZeroConfig(sequence_parallel=k)`` the result covers this device's tokens (``zerojax.own_tokens``).

    Args:
        model: a decoder of zerojax, whole or as a loss function gets it.
        tokens: a text per row, int32. Any tokens may follow the text.
        mask: 1 for the tokens of tokens[:, 1:] to measure. All other tokens get 0.
        temperature: divides the logits.
    """
    labels = own_tokens(jnp.where(mask > 0, tokens[:, 1:], IGNORE))
    hidden = model.hidden(tokens[:, :-1])
    found = label_log_probs(
        hidden.reshape(-1, hidden.shape[-1]),
        model.unembedding,
        labels.reshape(-1),
        chunk=model.config.loss_chunk,
        softcap=model.config.logit_softcap,
        temperature=temperature,
    )
    return found.reshape(labels.shape)
