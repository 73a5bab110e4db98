"""The environment of a policy: prompts to complete, and the scorer of the completions."""

from dataclasses import dataclass
from typing import Self

import jax
import numpy as np

from zerojax.generation.generate import generate
from zerojax.posttrain.data.prompts import Prompt, Prompts
from zerojax.posttrain.processes import of_this_process
from zerojax.posttrain.reward.scorers import FunctionScorer, Scorer, open_scorer
from zerojax.posttrain.rollout.rollout import Rollout
from zerojax.posttrain.settings import longest_prompt, rollout_rows
from zerojax.run.checkpoints import Manifest
from zerojax.run.config import RunConfig
from zerojax.run.data import Tokenizer
from zerojax.run.data.answers import AnswerEnd
from zerojax.run.inputs import kept_tokenizer
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import WeightReader
from zerojax.train.state import TrainState


@dataclass
class Environment:
    """The prompts of a run, the end of a completion, and the scorer."""

    config: RunConfig
    prompts: Prompts
    tokenizer: Tokenizer
    end: AnswerEnd
    scorer: Scorer

    @classmethod
    def open(
        cls, config: RunConfig, folder: RunFolder, manifest: Manifest | None, reader: WeightReader
    ) -> Self:
        """Read the prompts, and start the reward's first process or load the reward model.

        Raises:
            ConfigurationError: prompts, tokenizer or reward cannot be used.
        """
        tokenizer, template = kept_tokenizer(config, folder, manifest)
        prompts = Prompts.read(config.data, tokenizer, template, longest_prompt(config))
        scorer = open_scorer(config, tokenizer, reader)
        if isinstance(scorer, FunctionScorer):
            scorer.check(prompts.train[0])
        return cls(config, prompts, tokenizer, AnswerEnd.of(tokenizer, template), scorer)

    def rollout(self, state: TrainState, number: int) -> Rollout:
        """Complete this process's prompts of a rollout, counted from 0."""
        settings, seed = self.config.posttrain, self.config.train.seed
        groups = rollout_rows(self.config) // settings.completions
        prompts = of_this_process(self.prompts.of_rollout(number, groups, seed))
        return self.complete(
            state,
            [prompt for prompt in prompts for _ in range(settings.completions)],
            temperature=settings.temperature,
            seed=int(np.random.SeedSequence((seed, number)).generate_state(1)[0]),
        )

    def answers(self, state: TrainState) -> Rollout | None:
        """Answer this process's held-out prompts of an evaluation greedily; None if there are none."""
        prompts = self.prompts.of_evaluation(self.config.posttrain.eval_prompts)
        prompts = of_this_process(prompts[: len(prompts) // jax.process_count() * jax.process_count()])
        return self.complete(state, prompts, temperature=0.0) if prompts else None

    def complete(
        self, state: TrainState, prompts: list[Prompt], *, temperature: float, seed: int = 0
    ) -> Rollout:
        """Generate a completion of each prompt."""
        completions = generate(
            state,
            [prompt.tokens for prompt in prompts],
            self.config.posttrain.max_new_tokens,
            temperature=temperature,
            stop=self.end.stop,
            seed=seed,
        )
        return Rollout.of(prompts, completions, self.tokenizer, self.end, self.config.train.sequence_length)

    def longest_score(self, completions: int) -> float:
        """Seconds within which a function scores some completions, at ``posttrain.reward_seconds`` each."""
        settings = self.config.posttrain
        if not settings.functions:
            return 0.0
        return settings.reward_seconds * -(-completions // settings.reward_workers)

    def describe(self) -> str:
        """The number of prompts."""
        return f"{len(self.prompts.train):,} prompts and {len(self.prompts.held_out):,} held out"

    def notes(self) -> list[str]:
        """A line about prompts that are not used."""
        left_out = self.prompts.left_out
        return [f"{left_out:,} prompts are too long, and are left out"] if left_out else []
