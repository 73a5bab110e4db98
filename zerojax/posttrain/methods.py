"""The methods of post-training, and which settings each reads."""

import dataclasses
from pathlib import Path

from zerojax.errors import ConfigurationError
from zerojax.run.checkpoints import Manifest
from zerojax.run.config import CriticSection, RunConfig

REFERENCED = ("dpo", "ipo")
"""The methods that compare the model with its first weights on pairs of answers."""

PREFERENCES = (*REFERENCED, "reward")
"""The methods that learn from pairs of answers."""

_ROLLOUT = (
    *("reward", "rewards", "reward_model", "reward_workers", "reward_seconds", "reward_variables"),
    *("rollout_rows", "group_size", "epochs"),
    *("max_new_tokens", "temperature", "clip_low", "clip_high", "kl", "eval_prompts", "samples"),
)

READS: dict[str, tuple[str, ...]] = {
    "grpo": (*_ROLLOUT, "scale_advantages", "kl_estimator"),
    "ppo": (*_ROLLOUT, "normalize_advantages", "discount", "gae_lambda", "value_clip"),
    "dpo": ("beta",),
    "ipo": ("beta",),
    "reward": (),
}
"""The keys of [posttrain] that each method reads, beside the method itself."""


def check_method(config: RunConfig) -> None:
    """Refuse to run without a method, and keys of [posttrain] and [critic] that the method does not read.

    Raises:
        ConfigurationError: names the key.
    """
    settings, method = config.posttrain, config.posttrain.method
    if method == "none":
        raise ConfigurationError(
            f'posttrain.method is "none": set it to one of {", ".join(READS)}, or use zerojax train'
        )
    for field in dataclasses.fields(settings):
        if field.name == "method" or field.name in READS[method]:
            continue
        if getattr(settings, field.name) != field.default:
            raise ConfigurationError(
                f'posttrain.{field.name} is not read by posttrain.method = "{method}": leave it out'
            )
    if method != "ppo" and config.critic != CriticSection():
        raise ConfigurationError(f'[critic] is not read by posttrain.method = "{method}": leave it out')


def check_first_weights(manifest: Manifest | None, init_from: Path | None) -> None:
    """Refuse to begin with random weights.

    Args:
        manifest: of the checkpoint in the run's folder, if there is one.
        init_from: what gives a new run its first weights.

    Raises:
        ConfigurationError: neither is there.
    """
    if manifest is None and init_from is None:
        raise ConfigurationError(
            "zerojax posttrain begins with a trained model: name its run in --init-from, or import one into "
            "the run's folder (zerojax import)"
        )
