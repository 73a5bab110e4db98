"""A rollout: completions of prompts as rows of a batch, with their rewards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Int32

from zerojax.generation import Completions
from zerojax.posttrain.prompts import Prompt
from zerojax.posttrain.rewards import LostReward, RewardProcess
from zerojax.run.data import Tokenizer
from zerojax.run.data.answers import AnswerEnd

Rows = dict[str, np.ndarray]


@dataclass(frozen=True)
class Rollout:
    """Completions of prompts; those of one prompt are next to each other.

    Attributes:
        prompts: one per row.
        texts: the completions.
        tokens: prompt and completion, then zeros.
        mask: 1 where tokens[:, 1:] is of the completion, its end included.
        log_probs: those of the generator.
        ended: whether the completion has ended by itself.
    """

    prompts: Sequence[Prompt]
    texts: Sequence[str]
    tokens: Int32[np.ndarray, "rows time+1"]
    mask: Float32[np.ndarray, "rows time"]
    log_probs: Float32[np.ndarray, "rows time"]
    ended: Bool[np.ndarray, " rows"]

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        completions: Completions,
        tokenizer: Tokenizer,
        end: AnswerEnd,
        time: int,
    ) -> "Rollout":
        """Lay out completions.

        Args:
            prompts: one per row.
            completions: as ``zerojax.generate`` returns them.
            tokenizer: of the model.
            end: of an answer.
            time: columns of the rows, but for the first token.
        """
        rows = len(prompts)
        tokens = np.zeros((rows, time + 1), np.int32)
        mask, log_probs = np.zeros((2, rows, time), np.float32)
        texts, ended = [], np.zeros(rows, bool)
        for row, (prompt, length) in enumerate(zip(prompts, completions.lengths, strict=True)):
            start, new = len(prompt.tokens), completions.tokens[row, :length]
            tokens[row, :start], tokens[row, start : start + length] = prompt.tokens, new
            own = slice(start - 1, start - 1 + length)
            mask[row, own], log_probs[row, own] = 1, completions.log_probs[row, :length]
            text, ended[row] = end.read(tokenizer, new.tolist())
            texts.append(text)
        return cls(prompts, texts, tokens, mask, log_probs, ended)

    @property
    def lengths(self) -> Float32[np.ndarray, " rows"]:
        """Tokens of the completions."""
        return self.mask.sum(axis=1)


def score(rollout: Rollout, rewards: RewardProcess) -> tuple[Float32[np.ndarray, " rows"], str]:
    """The rewards of completions, NaN for those that are lost; and why one was lost, or ""."""
    found, why = np.full(len(rollout.texts), np.nan, np.float32), ""
    for row, (prompt, text) in enumerate(zip(rollout.prompts, rollout.texts, strict=True)):
        try:
            found[row] = rewards.score(prompt.text, text, prompt.row)
        except LostReward as error:
            why = str(error)
    return found, why


def minibatches(rows: Rows, size: int, epochs: int, seed: Sequence[int]) -> Iterator[Rows]:
    """Batches of ``size`` rows: all rows once per epoch, in an order that depends on the seed."""
    total = len(rows["tokens"])
    for epoch in range(epochs):
        order = np.random.default_rng((*seed, epoch)).permutation(total)
        for first in range(0, total, size):
            yield {name: x[order[first : first + size]] for name, x in rows.items()}
