"""The scores of a model with one output, such as a reward model or a critic."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zerojax.adapters.loss import devices_a_row
from zerojax.errors import ConfigurationError
from zerojax.models.gpt import GPT, logits
from zerojax.models.shared_rows import whole_rows


def scores(model: GPT, tokens: Int[Array, "rows time"]) -> Float[Array, "rows time"]:
    """The score of the text up to each position, fp32.

    With ``ZeroConfig(sequence_parallel=k)`` the result covers this device's tokens (``zerojax.own_tokens``).

    Args:
        model: with config.outputs = 1, whole or as a loss function gets it. Its logit_softcap does not apply.
        tokens: a text per row, int32; anything may follow the text.

    Raises:
        ConfigurationError: the model has another number of outputs.
    """
    if model.config.outputs != 1:
        raise ConfigurationError(
            f"[model] outputs = {model.config.outputs}: scores need a model with outputs = 1"
        )
    return logits(model.hidden(tokens), model.unembedding)[..., 0]


def last_scores(
    model: GPT, tokens: Int[Array, "rows time"], mask: Float[Array, "rows mask"]
) -> Float[Array, " rows"]:
    """The score of each text at its last token that counts, on all devices that share its row.

    Column i of the mask belongs to tokens[:, i + 1], and is 1 where that token counts.
    """
    last = mask.shape[1] - jnp.argmax(mask[:, ::-1], axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % devices_a_row())))
    return jnp.take_along_axis(whole_rows(scores(model, tokens)), last[:, None], axis=1)[:, 0]
