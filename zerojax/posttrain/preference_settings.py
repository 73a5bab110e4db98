"""What follows from the settings of a run that learns from preferences, and which do not fit each other."""

import jax
import jax.numpy as jnp

from zerojax.errors import ConfigurationError
from zerojax.posttrain.methods import check_method
from zerojax.posttrain.settings import refuse_dropout
from zerojax.run.config import RunConfig


def longest_answer(config: RunConfig) -> int:
    """Tokens of the longest prompt with its answer."""
    return config.train.sequence_length + 1


def check_preferences(config: RunConfig) -> None:
    """Refuse settings that do not fit each other.

    Raises:
        ConfigurationError: names the setting and a value that works.
    """
    check_method(config.posttrain)
    refuse_dropout(config)
    if config.train.eval_exact_match:
        raise ConfigurationError(
            "train.eval_exact_match is for zerojax train, whose data say what is right: set it to 0"
        )


def abstract_pairs(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a global batch of ``preference_loss``."""
    pairs, time = config.train.batch_size, config.train.sequence_length
    batch: dict[str, jax.ShapeDtypeStruct] = {}
    for name in ("chosen", "rejected"):
        batch[name] = jax.ShapeDtypeStruct((pairs, time + 1), jnp.int32)
        batch[f"{name}_mask"] = jax.ShapeDtypeStruct((pairs, time), jnp.float32)
        batch[f"reference_{name}"] = jax.ShapeDtypeStruct((pairs,), jnp.float32)
    return batch
