"""Scorers of completions: a user's functions, an environment, or a reward model."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import override

import numpy as np
from jaxtyping import Float32

from zerojax.log import logger
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.posttrain.data.prompts import Prompt
from zerojax.posttrain.loss.objectives import completion_scores
from zerojax.posttrain.processes import predict_rows
from zerojax.posttrain.reward.pool import RewardPool
from zerojax.posttrain.reward.process import LostReward
from zerojax.posttrain.roles.reference import frozen_setup
from zerojax.posttrain.roles.saved_runs import check_tokenizer, saved_settings
from zerojax.posttrain.rollout.rollout import Rollout
from zerojax.run import checkpoints
from zerojax.run.build import RunSetup
from zerojax.run.config import PosttrainSection, RunConfig, saved_config
from zerojax.run.data.tokenizer import Tokenizer
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import WeightReader, with_base
from zerojax.train.step import predict_step

Scores = tuple[Float32[np.ndarray, " rows"], str]


class Scorer(ABC):
    """Scores completions.

    Attributes:
        parts: the last rewards by name, whose weighted sum is the score; empty if there is only one.
    """

    parts: Mapping[str, Float32[np.ndarray, " rows"]] = MappingProxyType({})

    @abstractmethod
    def score(self, rollout: Rollout, stopping: Callable[[], bool] = lambda: False) -> Scores:
        """The score of each completion (NaN if lost), and why one was lost, or "".

        Once ``stopping`` returns True, all scores may be lost.
        """

    def close(self) -> None:
        """End the scorer's processes, also in the middle of a rollout."""
        return


class FunctionScorer(Scorer):
    """Scores by the weighted sum of the functions that the settings name.

    Raises:
        ConfigurationError: a function does not exist.
    """

    def __init__(self, settings: PosttrainSection) -> None:
        self._rewards = settings.functions
        self._pool = RewardPool(settings, [one.function for one in self._rewards], "rewards")
        self.close = self._pool.close

    def check(self, prompt: Prompt) -> None:
        """Try the functions on an empty completion of a prompt.

        Raises:
            ConfigurationError: a function takes different arguments, or returns no number.
        """
        self._pool.check("score", prompt.text, "", prompt.row)

    @override
    def score(self, rollout: Rollout, stopping: Callable[[], bool] = lambda: False) -> Scores:
        texts = zip(rollout.prompts, rollout.texts, strict=True)
        responses = self._pool.ask([("score", one.text, text, one.row) for one, text in texts], stopping)
        lost = [str(one) for one in responses if isinstance(one, LostReward)]
        none = [math.nan] * len(self._rewards)
        found = [none if isinstance(one, LostReward) else one["rewards"] for one in responses]
        each = np.asarray(found, np.float32)
        names = [one.name for one in self._rewards]
        self.parts = dict(zip(names, each.T, strict=True)) if len(names) > 1 else {}
        weights = np.asarray([one.weight for one in self._rewards], np.float32)
        return (weights * each).sum(axis=1), lost[-1] if lost else ""


class EpisodeScorer(Scorer):
    """Scores by the rewards that an environment, run by ``pool``, returned during the rollout."""

    def __init__(self, pool: RewardPool) -> None:
        self.close = pool.close

    @override
    def score(self, rollout: Rollout, stopping: Callable[[], bool] = lambda: False) -> Scores:
        del stopping
        assert rollout.earned is not None
        return rollout.earned.sum(axis=1), rollout.lost


class ModelScorer(Scorer):
    """Scores by the model of ``posttrain.reward_model``, at the last token, on the run's mesh.

    A model trained with all its weights is stored like a reference. A model trained by adapters is stored as
    in its own run.

    Raises:
        ConfigurationError: its checkpoint, or its base, is gone.
    """

    def __init__(self, config: RunConfig, reader: WeightReader) -> None:
        self._config = config
        path = Path(run_on_process_zero(lambda: str(checkpoints.find(Path(config.posttrain.reward_model)))))
        record = checkpoints.read_manifest(path).record
        setup, saved = reward_setup(config), saved_config(record.config)
        if setup.config.lora is None and not saved.zero.frozen:
            self.state = reader.weights(path, setup.initial_state(base=False))
        else:
            folder = RunFolder(path.parent.parent)
            abstract = with_base(setup.abstract_state, folder, record.base, saved, reader)
            self.state = checkpoints.restore(path, abstract)

    @override
    def score(self, rollout: Rollout, stopping: Callable[[], bool] = lambda: False) -> Scores:
        del stopping
        rows = {"tokens": rollout.tokens, "mask": rollout.mask}
        found = predict_rows(self._config, rows, partial(predict_step, self.state, fn=completion_scores))
        lost = ~np.isfinite(found)
        if not lost.any():
            return found, ""
        path = self._config.posttrain.reward_model
        why = (
            f"{int(lost.sum())} of {len(found)} scores by posttrain.reward_model {path} are not finite, "
            "because its weights, or its activations in zero.compute_dtype, are not. Take another of its "
            "checkpoints"
        )
        logger.warning(why)
        return np.where(lost, np.float32(np.nan), found), why


def open_scorer(config: RunConfig, tokenizer: Tokenizer, reader: WeightReader) -> Scorer:
    """Open the scorer named by ``posttrain.reward``, ``rewards`` or ``reward_model``.

    Raises:
        ConfigurationError: the function or model does not exist, or the model has a different tokenizer.
    """
    settings = config.posttrain
    if not settings.reward_model:
        return FunctionScorer(settings)
    check_tokenizer(settings.reward_model, "posttrain.reward_model", tokenizer)
    return ModelScorer(config, reader)


def reward_setup(config: RunConfig) -> RunSetup:
    """The setup of the reward model's state."""
    saved = saved_settings(config.posttrain.reward_model, "posttrain.reward_model")
    if saved.zero.frozen:
        zero = saved.zero.replace(weights_delta=False, error_feedback=False)
        return RunSetup(replace(config, model=saved.model, lora=saved.lora, zero=zero), trains=False)
    return frozen_setup(replace(config, model=saved.model, lora=None))
