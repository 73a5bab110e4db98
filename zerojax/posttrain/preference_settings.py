"""Sizes that follow from the settings of a run on preferences, and the combinations that are refused."""

import jax
import jax.numpy as jnp

from zerojax.errors import ConfigurationError
from zerojax.posttrain.methods import REFERENCED, check_method
from zerojax.posttrain.settings import refuse_dropout
from zerojax.run.config import RunConfig


def longest_answer(config: RunConfig) -> int:
    """The most tokens of a prompt with its answer.

    One less for a model of scores: it also reads the last token, whose score counts.
    """
    return config.train.sequence_length + (config.posttrain.method in REFERENCED)


def check_preferences(config: RunConfig) -> None:
    """Refuse settings that do not fit each other.

    Raises:
        ConfigurationError: names the setting and a value that works.
    """
    method = config.posttrain.method
    check_method(config)
    refuse_dropout(config)
    if method in REFERENCED:
        config.model.check_language_model(f'posttrain.method = "{method}"')
    elif config.model.outputs != 1:
        raise ConfigurationError(
            f'posttrain.method = "{method}" trains a model of scores: set model.outputs = 1 and model.tied = '
            "false"
        )
    elif config.train.eval_exact_match:
        raise ConfigurationError("train.eval_exact_match: a reward model gives no answers: set it to 0")


def abstract_pairs(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a global batch of ``preference_loss``."""
    pairs, time = config.train.batch_size, config.train.sequence_length
    batch: dict[str, jax.ShapeDtypeStruct] = {}
    for name in ("chosen", "rejected"):
        batch[name] = jax.ShapeDtypeStruct((pairs, time + 1), jnp.int32)
        batch[f"{name}_mask"] = jax.ShapeDtypeStruct((pairs, time), jnp.float32)
        if config.posttrain.method in REFERENCED:
            batch[f"reference_{name}"] = jax.ShapeDtypeStruct((pairs,), jnp.float32)
    return batch
