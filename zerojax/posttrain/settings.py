"""The settings that each method reads, the sizes that follow from them, and checks of both."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp

from zerojax.errors import ConfigurationError
from zerojax.posttrain.roles.saved_runs import check_reward_model
from zerojax.run.checkpoints import Manifest
from zerojax.run.config import CriticSection, PosttrainSection, RunConfig
from zerojax.train.batch import processes_a_row
from zerojax.validation.untrusted import short

REFERENCED = ("dpo", "ipo")
"""The methods that compare the model with its first weights on pairs of responses."""

PREFERENCES = (*REFERENCED, "reward")
"""The methods that train on pairs of responses."""

WITH_ROLLOUTS = ("grpo", "ppo")
"""The methods that generate completions."""

_OF_ENGINES = (
    *("engine_seconds", "engine_folder", "engine_receivers", "engine_weights"),
    *("rollouts_ahead", "importance_cap"),
)
_ROLLOUT = (
    *("engines", *_OF_ENGINES),
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
    """The most tokens of a prompt that leaves room for a completion."""
    return longest_row(config) - config.posttrain.max_new_tokens


def longest_row(config: RunConfig) -> int:
    """The most tokens of a prompt with its completion, limited by the row and by the model's context."""
    return min(config.train.sequence_length + 1, config.model.max_seq_len)


def longest_response(config: RunConfig) -> int:
    """The most tokens of a prompt with its response.

    A reward model has one token less, because it reads the last token to score it.
    """
    return config.train.sequence_length + (config.posttrain.method in REFERENCED)


def check_settings(config: RunConfig, processes: int) -> None:
    """Refuse settings of a run with rollouts that contradict each other or ``processes``."""
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
        raise ConfigurationError(
            "posttrain.max_turns is only read with posttrain.environment: leave it out, or set an environment"
        )
    for name, every in {
        "zero": config.zero.every,
        "critic": config.critic.zero.get("preset") == "local",
    }.items():
        if every:
            raise ConfigurationError(
                f"[{name}] asks for local updates, in which each node trains its own weights, but rollouts "
                f"use the outer weights. Set {name}.preset to another, such as delta"
            )
    sharing = config.zero.sequence_parallel
    if processes_a_row(sharing) > 1:
        raise ConfigurationError(
            f"zero.sequence_parallel = {sharing} shares rows among several processes of "
            f"{jax.local_device_count()} devices, but each process makes its own completions. Start one "
            "process on each node, or lower zero.sequence_parallel"
        )
    if settings.reward_model:
        check_reward_model(config)
    _check_engines(settings)
    if rows % train.batch_size:
        raise ConfigurationError(
            f"posttrain.rollout_rows = {rows} is not a multiple of train.batch_size = {train.batch_size}: "
            f"set it to {-(-rows // train.batch_size) * train.batch_size}, for example"
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
            f"train.steps = {train.steps} ends within a rollout of {steps} steps: set it to "
            f"{-(-train.steps // steps) * steps}, for example"
        )
    if settings.max_new_tokens >= train.sequence_length:
        raise ConfigurationError(
            f"posttrain.max_new_tokens = {settings.max_new_tokens} leaves no room for prompts in "
            f"train.sequence_length = {train.sequence_length}: lower the former, or raise the latter"
        )
    idle = {
        "train.eval_exact_match": train.eval_exact_match,
        "checkpoint.keep_best": config.checkpoint.keep_best,
    }
    for name, value in idle.items():
        if value:
            raise ConfigurationError(
                f"{name} needs a validation loss, which runs with rollouts do not have: set it to 0"
            )
    _refuse_dropout(config)


def _check_engines(settings: PosttrainSection) -> None:
    for url in settings.engines:
        where = urlsplit(url)
        if where.scheme not in ("http", "https") or not where.hostname or where.path or where.query:
            raise ConfigurationError(
                f"posttrain.engines has {short(url)}, which is not the address of an engine: write it as "
                "http://host:port"
            )
    if settings.engine_receivers and len(settings.engine_receivers) != len(settings.engines):
        raise ConfigurationError(
            f"posttrain.engine_receivers names {len(settings.engine_receivers)} receivers for "
            f"{len(settings.engines)} engines: name the receiver beside each engine"
        )
    if settings.engine_receivers and not settings.engine_folder:
        raise ConfigurationError("posttrain.engine_folder is empty: name the mirror of the receivers")
    if len({*settings.engines}) < len(settings.engines):
        raise ConfigurationError(f"posttrain.engines names an engine twice: {', '.join(settings.engines)}")
    for name in _OF_ENGINES:
        if not settings.engines and getattr(settings, name) != getattr(type(settings), name):
            raise ConfigurationError(
                f"posttrain.{name} is only read with posttrain.engines: leave it out, or name engines"
            )


def check_preferences(config: RunConfig) -> None:
    """Refuse settings of a run on preferences that contradict each other."""
    method = config.posttrain.method
    check_method(config)
    _refuse_dropout(config)
    if method in REFERENCED:
        config.model.check_language_model(f'posttrain.method = "{method}"')
    elif config.model.outputs != 1:
        raise ConfigurationError(
            f'posttrain.method = "{method}" trains a reward model, but model.outputs is '
            f"{config.model.outputs}: set model.outputs = 1 and model.tied = false"
        )
    elif config.train.eval_exact_match:
        raise ConfigurationError(
            f"train.eval_exact_match = {config.train.eval_exact_match} needs responses, but a reward model "
            "generates none: set it to 0"
        )


def _refuse_dropout(config: RunConfig) -> None:
    for name, rate in (
        ("model.dropout", config.model.dropout),
        ("lora.dropout", config.lora.dropout if config.lora else 0.0),
    ):
        if rate:
            raise ConfigurationError(
                f"{name} = {rate} makes comparisons of two probabilities, or of two scores, noise: set it to "
                "0 in zerojax posttrain"
            )


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a global batch of ``policy_loss``."""
    in_loss = config.posttrain.kl and config.posttrain.method == "grpo"
    names = ("tokens", "mask", "advantages", "old_log_probs")
    return abstract_columns(config, (*names, "reference_log_probs") if in_loss else names)


def abstract_columns(config: RunConfig, names: Sequence[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a global batch: int32 "tokens" [rows, time + 1], fp32 ``names`` [rows, time]."""
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
    """Refuse a run without a method, and keys of [posttrain] and [critic] that the method does not read."""
    settings, method = config.posttrain, config.posttrain.method
    if method == "none":
        raise ConfigurationError(
            f'posttrain.method is "none": set it to one of {", ".join(READS)}, or use zerojax train'
        )
    if config.train.eval_samples:
        raise ConfigurationError(
            f"train.eval_samples = {config.train.eval_samples} is for zerojax train: set it to 0. "
            "posttrain.samples sets how many completions of a rollout are written"
        )
    for field in dataclasses.fields(settings):
        if field.name == "method" or field.name in READS[method]:
            continue
        if getattr(settings, field.name) != field.default:
            raise ConfigurationError(
                f'posttrain.method = "{method}" does not read posttrain.{field.name}: leave it out'
            )
    if method != "ppo" and config.critic != CriticSection():
        raise ConfigurationError(f'posttrain.method = "{method}" does not read [critic]: leave it out')


def check_first_weights(manifest: Manifest | None, init_from: Path | None) -> None:
    """Refuse to start with random weights: a run needs an imported model or ``--init-from``."""
    if manifest is None and init_from is None:
        raise ConfigurationError(
            "zerojax posttrain starts with a trained model, but there is none: name its run in --init-from, "
            "or import a model into the run's folder (zerojax import)"
        )
