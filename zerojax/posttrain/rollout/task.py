"""The task of a policy: prompts to complete, and a scorer for the completions."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import jax
import numpy as np

from zerojax.generation import Sampling
from zerojax.posttrain.data.prompts import Prompt, Prompts
from zerojax.posttrain.processes import of_this_process
from zerojax.posttrain.reward.pool import RewardPool
from zerojax.posttrain.reward.scorers import EpisodeScorer, FunctionScorer, Scorer, open_scorer
from zerojax.posttrain.rollout.generator import Generator, Turn
from zerojax.posttrain.rollout.rollout import Rollout
from zerojax.posttrain.rollout.turns import Episodes, Row
from zerojax.posttrain.settings import longest_prompt, longest_row, rollout_rows
from zerojax.run.checkpoints import Manifest
from zerojax.run.config import RunConfig
from zerojax.run.data.responses import ResponseEnd
from zerojax.run.data.tokenizer import Tokenizer
from zerojax.run.inputs import kept_tokenizer
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import WeightReader


@dataclass
class Task:
    """The prompts of a run, the end of a turn, the environment if there is one, and the scorer."""

    config: RunConfig
    prompts: Prompts
    tokenizer: Tokenizer
    end: ResponseEnd
    episodes: Episodes | None
    scorer: Scorer

    @classmethod
    def open(
        cls, config: RunConfig, folder: RunFolder, manifest: Manifest | None, reader: WeightReader
    ) -> Self:
        """Read the prompts, and start the reward's first process or load the reward model.

        Raises:
            ConfigurationError: prompts, tokenizer, reward or environment cannot be used.
        """
        tokenizer, template = kept_tokenizer(config, folder, manifest)
        prompts = Prompts.read(config.data, tokenizer, template, longest_prompt(config))
        end, settings = ResponseEnd.of(tokenizer, template), config.posttrain
        if settings.environment:
            pool = RewardPool(settings, [settings.environment], "environment")
            episodes = Episodes(pool, tokenizer, template, end, longest_row(config))
            episodes.check(prompts.train[0])
            return cls(config, prompts, tokenizer, end, episodes, EpisodeScorer(pool))
        scorer = open_scorer(config, tokenizer, reader)
        if isinstance(scorer, FunctionScorer):
            scorer.check(prompts.train[0])
        return cls(config, prompts, tokenizer, end, None, scorer)

    def rollout(
        self, generator: Generator, number: int, stopping: Callable[[], bool] = lambda: False
    ) -> Rollout:
        """Complete this process's prompts of rollout ``number``, counted from 0.

        Once ``stopping`` returns True, completions may be empty, and all rewards of an environment lost.
        """
        settings, seed = self.config.posttrain, self.config.train.seed
        groups = rollout_rows(self.config) // settings.completions
        prompts = of_this_process(self.prompts.of_rollout(number, groups, seed))
        each = [prompt for prompt in prompts for _ in range(settings.completions)]
        seeds = np.random.SeedSequence((seed, number)).generate_state(self.most_turns)
        return self._complete(generator, each, Sampling(settings.temperature), seeds.tolist(), stopping)

    @functools.cached_property
    def evaluated(self) -> list[Prompt]:
        """This process's held-out prompts of every evaluation."""
        prompts = self.prompts.of_evaluation(self.config.posttrain.eval_prompts)
        return of_this_process(prompts[: len(prompts) // jax.process_count() * jax.process_count()])

    def evaluate(self, generator: Generator) -> Rollout:
        """Complete the prompts of an evaluation greedily."""
        return self._complete(generator, self.evaluated, Sampling(0.0), [0] * self.most_turns)

    @property
    def most_turns(self) -> int:
        """The most turns of a completion."""
        return 1 if self.episodes is None else self.config.posttrain.max_turns

    def _complete(
        self,
        generator: Generator,
        prompts: Sequence[Prompt],
        how: Sampling,
        seeds: Sequence[int],
        stopping: Callable[[], bool] = lambda: False,
    ) -> Rollout:
        """Complete each prompt, in an environment turn by turn, with one seed per turn.

        All rows are in every turn, so that turns share compiled programs. A finished row gets no tokens.
        """
        most, longest = self.config.posttrain.max_new_tokens, longest_row(self.config)
        rows = [Row(prompt) for prompt in prompts]
        if self.episodes is not None:
            self.episodes.begin(rows, stopping)
        for number, seed in enumerate(seeds, 1):
            going = [row for row in rows if not row.over]
            if self.episodes is not None and not generator.any_waits(bool(going)):
                break
            limits = [0 if row.over else min(most, longest - len(row.tokens)) for row in rows]
            turn = Turn([row.tokens for row in rows], limits, how, self.end.stop, seed, most)
            drawn = generator.complete(turn, stopping)
            for row, tokens, length, log_probs in zip(rows, *drawn, strict=True):
                if not row.over:
                    made = tokens[:length].tolist(), log_probs[:length].tolist()
                    row.add_turn(*made, self.tokenizer, self.end)
            if self.episodes is not None:
                self.episodes.step(going, stopping, last=number == len(seeds))
        time, in_environment = self.config.train.sequence_length, self.episodes is not None
        made = Rollout.of(rows, self.tokenizer, time, in_environment=in_environment)
        return replace(made, version=generator.version)

    def longest_rollout(self, completions: int) -> float:
        """Time limit in seconds for all calls of an environment in a rollout; 0 without an environment."""
        return 0.0 if self.episodes is None else (1 + self.most_turns) * self._longest_call(completions)

    def longest_score(self, completions: int) -> float:
        """Time limit in seconds for functions to score some completions; 0 for other scorers."""
        return self._longest_call(completions) if self.config.posttrain.functions else 0.0

    def _longest_call(self, completions: int) -> float:
        settings = self.config.posttrain
        return settings.reward_seconds * -(-completions // settings.reward_workers)

    def describe(self) -> str:
        """A text with the number of prompts."""
        return f"{len(self.prompts.train):,} prompts and {len(self.prompts.held_out):,} held out"

    def notes(self) -> list[str]:
        """A line about skipped prompts, if any."""
        left_out = self.prompts.left_out
        return [f"{left_out:,} prompts are too long and were skipped"] if left_out else []
