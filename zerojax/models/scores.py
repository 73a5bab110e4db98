"""The scores of a model with one output, such as a reward model or a critic."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zerojax.errors import ConfigurationError
from zerojax.models.gpt import GPT, logits


def scores(model: GPT, tokens: Int[Array, "rows time"]) -> Float[Array, "rows time"]:
    """The score at each position, of the text up to there, fp32.

    Args:
        model: with config.outputs = 1, whole or as a loss function gets it. A softcap of the logits does not
            apply.
        tokens: a text per row, int32; what follows it may be anything.

    Raises:
        ConfigurationError: the model has another number of outputs.
    """
    if model.config.outputs != 1:
        raise ConfigurationError(
            f"[model] outputs = {model.config.outputs}: scores are of a model with outputs = 1"
        )
    return logits(model.hidden(tokens), model.unembedding)[..., 0]


def last_scores(
    model: GPT, tokens: Int[Array, "rows time"], mask: Float[Array, "rows mask"]
) -> Float[Array, " rows"]:
    """The score of each text at its last token that counts.

    Args:
        model: as for ``scores``.
        tokens: likewise.
        mask: 1 where a token after the first counts, so that column i is of tokens[:, i + 1].
    """
    last = mask.shape[1] - jnp.argmax(mask[:, ::-1], axis=1)
    return jnp.take_along_axis(scores(model, tokens), last[:, None], axis=1)[:, 0]
