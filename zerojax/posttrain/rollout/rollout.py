"""A rollout: completions of prompts as rows of a batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32

from zerojax.posttrain.data.prompts import Prompt
from zerojax.posttrain.processes import Rows
from zerojax.posttrain.rollout.turns import Row
from zerojax.run.data.split import evenly_spread
from zerojax.run.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rollout:
    """Completions of prompts. The completions of one prompt are next to each other.

    Attributes:
        prompts: one per row.
        texts: the completions; in an environment all turns with the observations between them.
        tokens: prompt and completion, then zeros.
        mask: 1 where tokens[:, 1:] are the model's, including the end of a completion.
        log_probs: the generator's log-probabilities of tokens[:, 1:].
        ended: whether the model, or the environment, has ended the row.
        earned: in an environment, the reward of each turn at its last token; NaN in a row without a reward.
        turns: in an environment, the number of the model's turns.
        lost: in an environment, why a row has no reward; "" if none was lost.
        version: the optimizer step whose weights made it, if engines did.
    """

    prompts: Sequence[Prompt]
    texts: Sequence[str]
    tokens: Int32[np.ndarray, "rows time+1"]
    mask: Float32[np.ndarray, "rows time"]
    log_probs: Float32[np.ndarray, "rows time"]
    ended: Bool[np.ndarray, " rows"]
    earned: Float32[np.ndarray, "rows time"] | None = None
    turns: Int32[np.ndarray, " rows"] | None = None
    lost: str = ""
    version: int | None = None

    @classmethod
    def of(cls, rows: Sequence[Row], tokenizer: Tokenizer, time: int, *, in_environment: bool) -> "Rollout":
        """Lay out finished rows in ``time`` columns, without the first token."""
        tokens = np.zeros((len(rows), time + 1), np.int32)
        mask, log_probs, earned = np.zeros((3, len(rows), time), np.float32)
        for number, row in enumerate(rows):
            length = len(row.tokens)
            tokens[number, :length] = row.tokens
            for whole, own in ((mask, row.mask), (log_probs, row.log_probs), (earned, row.earned)):
                whole[number, : length - 1] = own[1:]
            if row.lost:
                earned[number] = np.nan
        ended = np.asarray([row.ended for row in rows], bool)
        prompts, texts = [row.prompt for row in rows], [row.last_turn for row in rows]
        if not in_environment:
            return cls(prompts, texts, tokens, mask, log_probs, ended)
        texts = [tokenizer.decode(row.tokens[len(row.prompt.tokens) :]) for row in rows]
        turns = np.asarray([row.turns for row in rows], np.int32)
        lost = next((row.lost for row in reversed(rows) if row.lost), "")
        return cls(prompts, texts, tokens, mask, log_probs, ended, earned, turns, lost)

    def rewards_per_token(self, rewards: Float32[np.ndarray, " rows"]) -> Float32[np.ndarray, "rows time"]:
        """The reward of each row at its last token, or in an environment at the last token of each turn.

        A row with a reward of NaN gets 0.
        """
        if self.earned is not None:
            return np.nan_to_num(self.earned)
        found = np.zeros_like(self.mask)
        counted = np.flatnonzero(self.mask.any(axis=1) & np.isfinite(rewards))
        last = self.mask.shape[1] - 1 - np.argmax(self.mask[:, ::-1], axis=1)
        found[counted, last[counted]] = rewards[counted]
        return found

    @property
    def lengths(self) -> Float32[np.ndarray, " rows"]:
        """Tokens of the model in each row."""
        return self.mask.sum(axis=1)


def minibatches(rows: Rows, size: int, epochs: int, seed: Sequence[int]) -> Iterator[Rows]:
    """Batches of ``size`` rows. Each epoch has all rows once, in an order that depends on the seed."""
    total = len(rows["tokens"])
    for epoch in range(epochs):
        order = np.random.default_rng((*seed, epoch)).permutation(total)
        for first in range(0, total, size):
            yield {name: x[order[first : first + size]] for name, x in rows.items()}


def samples_of(rollout: Rollout, rewards: np.ndarray, count: int) -> Iterator[dict[str, Any]]:
    """At most ``count`` completions, spread evenly over the rows, as values for JSON. One reward per row."""
    for row in evenly_spread(count, len(rewards)):
        yield {
            "prompt": rollout.prompts[row].text,
            "completion": rollout.texts[row],
            "reward": float(rewards[row]),
            "tokens": int(rollout.lengths[row]),
            **({} if rollout.version is None else {"version": rollout.version}),
        }
