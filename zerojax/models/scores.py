"""The scores of a model with one output, such as a reward model or a critic."""

from jaxtyping import Array, Float, Int

from zerojax.errors import ConfigurationError
from zerojax.models.gpt import GPT, logits


def scores(model: GPT, tokens: Int[Array, "rows time"]) -> Float[Array, "rows time"]:
    """What a model of scores says at each position of the text up to there, fp32.

    Args:
        model: with config.outputs = 1, whole or as a loss function gets it. A softcap of the logits does not
            apply.
        tokens: a text per row, int32; what follows it may be anything.

    Raises:
        ConfigurationError: the model is of another number of outputs.
    """
    if model.config.outputs != 1:
        raise ConfigurationError(
            f"[model] outputs = {model.config.outputs}: scores are of a model with outputs = 1"
        )
    return logits(model.hidden(tokens), model.unembedding)[..., 0]
