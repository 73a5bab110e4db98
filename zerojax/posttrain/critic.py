"""PPO's critic: a train state of its own, and its checkpoints beside the policy's."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import jax

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.log import logger
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.posttrain.policy import value_loss, values_of
from zerojax.posttrain.rollout import Rows
from zerojax.posttrain.saved_runs import check_tokenizer, saved_settings
from zerojax.run.build import RunSetup
from zerojax.run.checkpoints import (
    Checkpoints,
    DamagedError,
    Record,
    Retention,
    read_manifest,
    restore,
    step_dirs,
    verify,
)
from zerojax.run.config import RunConfig, ZeroSection, config_from_dict, config_to_dict
from zerojax.run.data import open_tokenizer
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import WeightReader, base_of, first_weights, with_base
from zerojax.train.state import TrainState
from zerojax.train.step import Metrics

COLUMNS = ("tokens", "mask", "old_values", "returns")
"""What a batch of ``value_loss`` has."""


class CriticStart(NamedTuple):
    """What a critic begins with, and lines about it for the user."""

    critic: "Critic"
    notes: list[str]


@dataclass
class Critic:
    """The critic of a run.

    Attributes:
        config: the run's settings, with the critic's model, sharding and optimizer.
        state: its weights and optimizer.
        base: where its frozen weights are from (``Record.base``), if it has adapters.
        checkpoints: in RUN/critic.
    """

    config: RunConfig
    state: TrainState
    base: str
    checkpoints: Checkpoints

    @classmethod
    def begin(cls, config: RunConfig, folder: RunFolder, first: Path, reader: WeightReader) -> CriticStart:
        """The critic of a new run.

        Args:
            config: the settings of the run.
            folder: of the run.
            first: where the policy's first weights are.
            reader: reads the critic's.

        Raises:
            ConfigurationError: its first weights cannot be had, or are of another model or tokenizer.
        """
        own, named = critic_config(config), named_run(config)
        if config.critic.init_from:
            check_tokenizer(
                config.critic.init_from, "critic.init_from", open_tokenizer(config.data, folder.data)
            )
        source = first if named is None else Path(run_on_process_zero(lambda: str(reader.find(Path(named)))))
        state, notes = first_weights(RunSetup.of(own, loss_fn=value_loss(own.posttrain)), source, reader)
        base = base_of(folder, source) if state.spec.frozen else ""
        run_on_process_zero(lambda: _set_aside(folder.critic, -1))
        critic = cls(own, state, base, _checkpoints(own, folder, None))
        return CriticStart(critic, [f"critic: {note}" for note in notes])

    @classmethod
    def resume(cls, config: RunConfig, folder: RunFolder, step: int, reader: WeightReader) -> CriticStart:
        """The critic that was saved with the policy of a step.

        Args:
            config: the settings of the run.
            folder: of the run.
            step: of the policy's checkpoint.
            reader: reads the frozen weights, if there are any.

        Raises:
            ConfigurationError: that of this step is missing or damaged.
        """
        path = folder.critic / str(step)
        run_on_process_zero(lambda: _require(folder, step, checksums=config.checkpoint.verify))
        record = read_manifest(path).record
        own = critic_config(config, config_from_dict(record.config))
        setup = RunSetup.of(own, loss_fn=value_loss(own.posttrain))
        state = restore(path, with_base(setup.abstract_state(), folder, record.base, own, reader))
        run_on_process_zero(lambda: _set_aside(folder.critic, step))
        critic = cls(own, state, record.base, _checkpoints(own, folder, step))
        return CriticStart(critic, [f"critic: resuming from step {step}"])

    def values(self, rows: Rows) -> jax.Array:
        """The value of the state before each token of a completion."""
        return zerojax.predict_step(self.state, rows, values_of)

    def take_step(self, rows: Rows) -> Metrics:
        """Dispatch a step; returns its metrics."""
        self.state, metrics = zerojax.train_step(self.state, {name: rows[name] for name in COLUMNS})
        return metrics

    def save(self, step: int, record: Record) -> None:
        """Save a checkpoint, and wait until it is complete.

        Args:
            step: of the run.
            record: of the policy.

        Raises:
            RunError: it cannot be written.
        """
        own = replace(record, config=config_to_dict(self.config), base=self.base, metrics={})
        self.checkpoints.save(step, self.state, own, despite_skips=True)
        self.checkpoints.wait()


def named_run(config: RunConfig) -> str | None:
    """The run whose weights a new critic begins with; None if they are the policy's."""
    return config.critic.init_from or config.posttrain.reward_model or None


def critic_config(config: RunConfig, saved: RunConfig | None = None) -> RunConfig:
    """The settings of a run with the critic's model, sharding and optimizer.

    Args:
        config: the settings of the run.
        saved: those of the critic's checkpoint; by default those that its first weights have.

    Raises:
        ConfigurationError: its first weights are gone, have adapters alone, or are of a model with a shorter
            context.
    """
    settings, named = config.critic, named_run(config)
    if saved is None and named is not None:
        key = "critic.init_from" if settings.init_from else "posttrain.reward_model"
        saved = saved_settings(named, key)
        if saved.lora.rank or saved.zero.frozen:
            raise ConfigurationError(
                f"the critic cannot begin with {key} {named}, which saved adapters or parts alone: name a "
                "run that trained all weights in critic.init_from"
            )
    model = config.model if saved is None else saved.model
    if model.max_seq_len < config.train.sequence_length:
        raise ConfigurationError(
            f"the critic reads at most {model.max_seq_len} tokens (max_seq_len of {named}), and "
            f"train.sequence_length is {config.train.sequence_length}: lower that, or name another run in "
            "critic.init_from"
        )
    shared = {field.name for field in fields(ZeroSection)} & {field.name for field in fields(settings)}
    given = {name: value for name in shared if (value := getattr(settings, name)) is not None}
    if config.zero.frozen is not None:
        given["frozen"] = (*config.zero.frozen, "!head/*")
    rate = settings.learning_rate
    return replace(
        config,
        model=replace(model, outputs=1, tied=False, dropout=0.0),
        zero=replace(config.zero, **given),
        optimizer=config.optimizer if rate is None else replace(config.optimizer, learning_rate=rate),
    )


def _checkpoints(config: RunConfig, folder: RunFolder, start: int | None) -> Checkpoints:
    saving = config.checkpoint
    retention = Retention(saving.keep, saving.keep_every, saving.keep_best, saving.keep_minutes)
    return Checkpoints(folder.critic, retention, start=start, say=logger.warning)


def _require(folder: RunFolder, step: int, *, checksums: bool) -> None:
    """Refuse to go on with the policy of a step without the critic of that step."""
    try:
        verify(folder.critic / str(step), step, checksums=checksums)
    except DamagedError as error:
        both = sorted({*step_dirs.steps(folder.critic)} & {*step_dirs.steps(folder.checkpoints)} - {step})
        way = (
            f"go back to an earlier step by zerojax checkpoints {folder.path} --rewind STEP; there are both "
            f"of {', '.join(map(str, both))}"
            if both
            else "put it back, or start again in another --run-dir"
        )
        raise ConfigurationError(
            f"the policy of step {step} needs the critic of that step, {folder.critic / str(step)}: {error}; "
            f"{way}"
        ) from error


def _set_aside(folder: Path, step: int) -> None:
    """Rename critics of later steps than the policy's: it was not saved, or the user went back."""
    for later in step_dirs.steps(folder):
        if later > step:
            step_dirs.move_aside(folder, later, "undone")
