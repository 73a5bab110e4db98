"""PPO's critic: a second train state, saved in the policy's checkpoints."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Float32

from zerojax.errors import ConfigurationError
from zerojax.models import describe_parameters
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.posttrain.loss.objectives import value_loss, values_of
from zerojax.posttrain.processes import Rows, predict_rows
from zerojax.posttrain.roles.saved_runs import check_tokenizer, saved_settings
from zerojax.posttrain.settings import abstract_columns
from zerojax.run.build import RunSetup, Trained
from zerojax.run.checkpoints import Beside, read_manifest, restore
from zerojax.run.config import RunConfig, saved_config, spelled_out, with_settings
from zerojax.run.data.dataset import open_tokenizer
from zerojax.run.evaluation import for_several_passes
from zerojax.run.run_dir import RunFolder, sharding_changes
from zerojax.run.weights import Start, WeightReader, base_of, first_weights, keep_for, with_base
from zerojax.train.state import TrainState
from zerojax.train.step import Metrics, predict_step, train_step

NAME = "critic"
"""The name of the critic's state in a checkpoint."""

COLUMNS = ("tokens", "mask", "old_values", "returns")
"""The columns of a batch of ``value_loss``."""


@dataclass
class Critic:
    """The critic of a run.

    Attributes:
        config: the run's settings, with the critic's model, sharding and optimizer.
        state: the critic's weights and optimizer.
        base: the origin of its frozen weights (``Record.base``); "" if it has none.
    """

    config: RunConfig
    state: TrainState
    base: str

    @classmethod
    def open(
        cls, config: RunConfig, folder: RunFolder, start: Start, reader: WeightReader
    ) -> tuple[Self, list[str]]:
        """Open the critic of a new or resumed run. Returns it with lines about it for the user.

        Raises:
            ConfigurationError: as for ``begin`` and ``resume``.
        """
        if start.source is None:
            critic, notes = cls.resume(config, folder, start.step, reader)
        else:
            critic, notes = cls.begin(config, folder, start.source, reader)
        parameters, zero = describe_parameters(critic.config.model), critic.state.spec.zero
        about = f"critic: {parameters}, {critic.config.zero.base} of stage {zero.stage}"
        return critic, [*notes, about]

    @classmethod
    def begin(
        cls, config: RunConfig, folder: RunFolder, first: Path, reader: WeightReader
    ) -> tuple[Self, list[str]]:
        """Make the critic of a new run. Returns it with lines about it for the user.

        ``first`` is the path of the policy's first weights.

        Raises:
            ConfigurationError: its first weights cannot be read, or have a different model or tokenizer.
        """
        own, named = critic_config(config), named_run(config)
        if config.critic.init_from:
            check_tokenizer(
                config.critic.init_from, "critic.init_from", open_tokenizer(config.data, folder.data)
            )
        source = first if named is None else Path(run_on_process_zero(lambda: str(reader.find(Path(named)))))
        state, notes = first_weights(RunSetup(own, loss_fn=value_loss(own.posttrain)), source, reader)
        base = ""
        if state.spec.frozen:
            base, notes = base_of(folder, source), notes + keep_for(folder, source)
        return cls(own, state, base), [f"critic: {note}" for note in notes]

    @classmethod
    def resume(
        cls, config: RunConfig, folder: RunFolder, step: int, reader: WeightReader
    ) -> tuple[Self, list[str]]:
        """Restore the critic from the checkpoint of a step. Returns it with lines about it for the user.

        Raises:
            ConfigurationError: the checkpoint has no critic.
        """
        path = folder.checkpoints / str(step)
        if (record := read_manifest(path).record.beside.get(NAME)) is None:
            raise ConfigurationError(f"{path} has no critic: start a new run in another --run-dir")
        before = saved_config(record.config)
        own = critic_config(config, before)
        setup = RunSetup(own, loss_fn=value_loss(own.posttrain))
        state = with_base(setup.abstract_state, folder, record.base, own, reader)
        critic = cls(own, restore(path, state, name=NAME), record.base)
        changes = sharding_changes(before, own)
        notes = ["; ".join([f"resuming from step {step}", *changes])]
        notes += keep_for(folder, folder.path / record.base)
        return critic, [f"critic: {note}" for note in notes]

    @property
    def trained(self) -> Trained:
        """The critic's ``Trained``, for steps that train policy and critic."""
        return Trained(self.config.model, self.state, abstract_columns(self.config, COLUMNS))

    def values(self, rows: Rows) -> Float32[np.ndarray, "rows time"]:
        """The value of the text before each token of a completion, for this process's rows."""
        state = for_several_passes(self.state)
        return predict_rows(self.config, rows, partial(predict_step, state, fn=values_of))

    def take_step(self, rows: Rows) -> Metrics:
        """Dispatch a training step, and return its metrics."""
        self.state, metrics = train_step(self.state, {name: rows[name] for name in COLUMNS})
        return metrics

    def record(self) -> Beside:
        """The record that is saved with the critic's state."""
        return Beside(spelled_out(self.config), self.base)


def named_run(config: RunConfig) -> str | None:
    """The run with a new critic's first weights; None if these are the policy's weights."""
    return config.critic.init_from or config.posttrain.reward_model or None


def critic_config(config: RunConfig, saved: RunConfig | None = None) -> RunConfig:
    """The settings of a run with the critic's model, sharding and optimizer.

    ``saved`` are the settings in the critic's checkpoint. None takes the settings of its first weights.
    """
    settings, named = config.critic, named_run(config)
    if saved is None and named is not None:
        key = "critic.init_from" if settings.init_from else "posttrain.reward_model"
        saved = saved_settings(named, key)
        if saved.zero.frozen:
            raise ConfigurationError(
                f"the critic cannot start with {key} {named}, which only saved adapters or parts of a model. "
                "Name a run that trained all weights in critic.init_from"
            )
    model = config.model if saved is None else saved.model
    if model.max_seq_len < config.train.sequence_length:
        raise ConfigurationError(
            f"the critic reads at most {model.max_seq_len} tokens (max_seq_len of {named}), but "
            f"train.sequence_length is {config.train.sequence_length}: lower it, or name another run in "
            "critic.init_from"
        )
    zero, rate = with_settings(config, {"zero": settings.zero}).zero, settings.learning_rate
    if zero.frozen:
        zero = zero.replace(frozen=(*zero.frozen, "!head/*"))
    return replace(
        config,
        model=replace(model, outputs=1, tied=False, dropout=0.0),
        zero=zero,
        optimizer=config.optimizer if rate is None else replace(config.optimizer, learning_rate=rate),
    )
