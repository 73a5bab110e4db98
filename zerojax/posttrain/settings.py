"""The methods and the settings that each reads, sizes that follow from them, and what is refused."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from zerojax.errors import ConfigurationError
from zerojax.posttrain.roles.saved_runs import check_reward_model
from zerojax.run.checkpoints import Manifest
from zerojax.run.config import CriticSection, RunConfig
from zerojax.train.shared_rows import processes_a_row

REFERENCED = ("dpo", "ipo")
"""The methods that compare the model with its first weights on pairs of answers."""

PREFERENCES = (*REFERENCED, "reward")
"""The methods that learn from pairs of answers."""

_ROLLOUT = (
    *("reward", "rewards", "reward_model", "reward_workers", "reward_seconds", "reward_variables"),
    *("environment", "max_turns"),
    *("rollout_rows", "group_size", "epochs"),
    *("max_new_tokens", "temperature", "clip_low", "clip_high", "kl", "eval_prompts", "samples"),
)

_REWARDS = ("reward", "rewards", "reward_model", "environment")

READS: dict[str, tuple[str, ...]] = {
    "grpo": (*_ROLLOUT, "scale_advantages", "kl_estimator"),
    "ppo": (*_ROLLOUT, "normalize_advantages", "discount", "gae_lambda", "value_clip"),
    "dpo": ("beta",),
    "ipo": ("beta",),
    "reward": (),
}
"""The keys of [posttrain] that each method reads, besides the method itself."""


def rollout_rows(config: RunConfig) -> int:
    """Completions per rollout, over all processes."""
    return config.posttrain.rollout_rows or config.train.batch_size


def steps_per_rollout(config: RunConfig) -> int:
    """Optimizer steps on the completions of one rollout."""
    return config.posttrain.epochs * rollout_rows(config) // config.train.batch_size


def longest_prompt(config: RunConfig) -> int:
    """Tokens of a prompt that leaves room for a completion."""
    return longest_row(config) - config.posttrain.max_new_tokens


def longest_row(config: RunConfig) -> int:
    """Tokens of a prompt with all that follows it, in a row and in the model's context."""
    return min(config.train.sequence_length + 1, config.model.max_seq_len)


def longest_answer(config: RunConfig) -> int:
    """The most tokens of a prompt with its answer.

    One less for a model of scores: it also reads the last token, whose score counts.
    """
    return config.train.sequence_length + (config.posttrain.method in REFERENCED)


def check_settings(config: RunConfig, processes: int) -> None:
    """Refuse settings of a run with rollouts that do not fit each other.

    Raises:
        ConfigurationError: names the setting and a value that works.
    """
    train, settings, rows = config.train, config.posttrain, rollout_rows(config)
    check_method(config)
    config.model.check_language_model(f'posttrain.method = "{settings.method}"')
    given = [name for name in _REWARDS if getattr(settings, name)]
    if len(given) != 1:
        raise ConfigurationError(
            f"{' and '.join(f'posttrain.{name}' for name in given)} exclude each other: set one"
            if given
            else 'there is no reward: set posttrain.reward to a function, as "path/to/file.py:function", '
            "posttrain.rewards to several, posttrain.reward_model to the run of a reward model, or "
            "posttrain.environment to an environment"
        )
    if settings.max_turns != type(settings).max_turns and not settings.environment:
        raise ConfigurationError("posttrain.max_turns is read with posttrain.environment alone: leave it out")
    for name, every in {
        "zero": config.zero.every,
        "critic": config.critic.zero.get("preset") == "local",
    }.items():
        if every:
            raise ConfigurationError(
                f"[{name}] asks for local updates, with which each node trains weights of its own, while "
                f"rollouts are of the outer ones: set {name}.preset to another, such as delta"
            )
    sharing = config.zero.sequence_parallel
    if processes_a_row(sharing) > 1:
        raise ConfigurationError(
            f"zero.sequence_parallel = {sharing}: rows of a rollout would be shared by devices of several "
            f"processes, which have {jax.local_device_count()} each and make completions of their own: start "
            "one process on each node, or lower it"
        )
    if settings.reward_model:
        check_reward_model(config)
    if rows % train.batch_size:
        raise ConfigurationError(
            f"posttrain.rollout_rows {rows} is not a multiple of train.batch_size {train.batch_size}: "
            f"{-(-rows // train.batch_size) * train.batch_size} would be"
        )
    if rows % (settings.completions * processes):
        raise ConfigurationError(
            f"{rows} completions per rollout do not divide into groups of posttrain.group_size "
            f"{settings.completions} on {processes} processes: set posttrain.rollout_rows to a multiple of "
            f"{math.lcm(settings.completions * processes, train.batch_size)}"
        )
    steps = steps_per_rollout(config)
    if train.steps % steps:
        raise ConfigurationError(
            f"train.steps {train.steps} ends within a rollout, which has {steps} steps: "
            f"{-(-train.steps // steps) * steps} would not"
        )
    if settings.max_new_tokens >= train.sequence_length:
        raise ConfigurationError(
            f"posttrain.max_new_tokens {settings.max_new_tokens} leaves no room for prompts in "
            f"train.sequence_length {train.sequence_length}: lower it, or raise that"
        )
    idle = {
        "train.eval_exact_match": train.eval_exact_match,
        "checkpoint.keep_best": config.checkpoint.keep_best,
    }
    for name, value in idle.items():
        if value:
            raise ConfigurationError(f"{name} is for zerojax train, which has a validation loss: set it to 0")
    _refuse_dropout(config)


def check_preferences(config: RunConfig) -> None:
    """Refuse settings of a run on preferences that do not fit each other.

    Raises:
        ConfigurationError: names the setting and a value that works.
    """
    method = config.posttrain.method
    check_method(config)
    _refuse_dropout(config)
    if method in REFERENCED:
        config.model.check_language_model(f'posttrain.method = "{method}"')
    elif config.model.outputs != 1:
        raise ConfigurationError(
            f'posttrain.method = "{method}" trains a model of scores: set model.outputs = 1 and model.tied = '
            "false"
        )
    elif config.train.eval_exact_match:
        raise ConfigurationError("train.eval_exact_match: a reward model gives no answers: set it to 0")


def _refuse_dropout(config: RunConfig) -> None:
    for name, rate in (
        ("model.dropout", config.model.dropout),
        ("lora.dropout", config.lora.dropout if config.lora else 0.0),
    ):
        if rate:
            raise ConfigurationError(
                f"{name} must be 0 in zerojax posttrain: with it, a comparison of two probabilities, or of "
                "two scores, is noise"
            )


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a global batch of ``policy_loss``."""
    in_loss = config.posttrain.kl and config.posttrain.method == "grpo"
    names = ("tokens", "mask", "advantages", "old_log_probs")
    return abstract_columns(config, (*names, "reference_log_probs") if in_loss else names)


def abstract_columns(config: RunConfig, names: Sequence[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a global batch's "tokens" and, of the tokens from the second on, other columns."""
    rows, time = config.train.batch_size, config.train.sequence_length
    columns = {name: jax.ShapeDtypeStruct((rows, time), jnp.float32) for name in names}
    return columns | {"tokens": jax.ShapeDtypeStruct((rows, time + 1), jnp.int32)}


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
    if config.train.eval_samples:
        raise ConfigurationError(
            "train.eval_samples is for zerojax train: set it to 0; posttrain.samples is the number of "
            "completions of a rollout that are written"
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

    Raises:
        ConfigurationError: the run's folder has no checkpoint, and ``init_from`` names nothing.
    """
    if manifest is None and init_from is None:
        raise ConfigurationError(
            "zerojax posttrain begins with a trained model: name its run in --init-from, or import one into "
            "the run's folder (zerojax import)"
        )
