"""A rollout: completions of prompts as rows of a batch, with their rewards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32

from zerojax.generation import Completions
from zerojax.posttrain.data.prompts import Prompt
from zerojax.posttrain.processes import mean_over_processes
from zerojax.run.data import Tokenizer, evenly_spread
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
            time: columns of the rows, without the first token.
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


def minibatches(rows: Rows, size: int, epochs: int, seed: Sequence[int]) -> Iterator[Rows]:
    """Batches of ``size`` rows: all rows once per epoch, in an order that depends on the seed."""
    total = len(rows["tokens"])
    for epoch in range(epochs):
        order = np.random.default_rng((*seed, epoch)).permutation(total)
        for first in range(0, total, size):
            yield {name: x[order[first : first + size]] for name, x in rows.items()}


def mixed_groups(rewards: np.ndarray, group_size: int) -> float:
    """The share of the groups of all processes whose completions differ in reward."""
    groups = rewards.reshape(-1, group_size)
    differ = np.nanmax(groups, axis=1, initial=-np.inf) > np.nanmin(groups, axis=1, initial=np.inf)
    share = mean_over_processes({"mixed_groups": (differ, np.ones_like(differ))})["mixed_groups"]
    assert share is not None
    return share


def samples_of(rollout: Rollout, rewards: np.ndarray, count: int) -> Iterator[dict[str, Any]]:
    """At most ``count`` completions, spread evenly over the rows, as values of JSON."""
    for row in evenly_spread(count, len(rewards)):
        yield {
            "prompt": rollout.prompts[row].text,
            "completion": rollout.texts[row],
            "reward": float(rewards[row]),
            "tokens": int(rollout.lengths[row]),
        }
