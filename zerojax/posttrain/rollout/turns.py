"""Rows of a rollout while they grow: the model's turns, and an environment's observations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerojax.errors import ConfigurationError
from zerojax.posttrain.data.prompts import Prompt
from zerojax.posttrain.reward.pool import RewardPool
from zerojax.posttrain.reward.process import LostReward, RefusedReward
from zerojax.run.data.chat_template import ChatTemplate
from zerojax.run.data.examples import checked_messages
from zerojax.run.data.formats import DataError, encode_text
from zerojax.run.data.responses import ResponseEnd
from zerojax.run.data.tokenizer import Tokenizer


@dataclass
class Row:
    """A prompt with the model's turns so far. The four lists have one entry per token.

    Attributes:
        prompt: the prompt.
        tokens: tokens of the prompt, the model's turns and the observations between them.
        mask: 1 for the model's tokens, 0 for the others.
        log_probs: the generator's log-probabilities; 0 for tokens that are not the model's.
        earned: each turn's reward at its last token; 0 elsewhere.
        last_turn: the last turn's text, without its end marker.
        turns: number of turns so far.
        over: whether there are no further turns.
        ended: whether the model, or the environment, has ended the row.
        lost: why the row has no reward, or "".
        state: the environment's state.
    """

    prompt: Prompt
    tokens: list[int] = field(default_factory=list, init=False)
    mask: list[float] = field(default_factory=list, init=False)
    log_probs: list[float] = field(default_factory=list, init=False)
    earned: list[float] = field(default_factory=list, init=False)
    last_turn: str = ""
    turns: int = 0
    over: bool = False
    ended: bool = False
    lost: str = ""
    state: Any = None

    def __post_init__(self) -> None:
        self.add_context(self.prompt.tokens.tolist())

    def add_context(self, tokens: list[int]) -> None:
        """Add tokens that are not the model's: the prompt, or an observation."""
        self._add(tokens, 0.0, [0.0] * len(tokens))

    def add_turn(
        self, tokens: list[int], log_probs: list[float], tokenizer: Tokenizer, end: ResponseEnd
    ) -> None:
        """Add a turn of the model: its tokens, and the log-probability of each."""
        self._add(tokens, 1.0, log_probs)
        self.last_turn, self.ended = end.read(tokenizer, tokens)
        self.turns += 1

    def mark_lost(self, why: LostReward | DataError) -> None:
        """End the row without a reward."""
        self.over, self.ended, self.lost = True, False, str(why)

    def _add(self, tokens: list[int], mask: float, log_probs: list[float]) -> None:
        self.tokens += tokens
        self.mask += [mask] * len(tokens)
        self.log_probs += log_probs
        self.earned += [0.0] * len(tokens)


@dataclass(frozen=True)
class Episodes:
    """A user's environment, and the conversion of its observations to tokens.

    Attributes:
        pool: the processes in which it runs.
        tokenizer: of the model.
        template: for conversations, or None.
        end: the end of a turn.
        longest: the most tokens of a row.
    """

    pool: RewardPool
    tokenizer: Tokenizer
    template: ChatTemplate | None
    end: ResponseEnd
    longest: int

    def check(self, prompt: Prompt) -> None:
        """Try the environment: begin an episode and take an empty turn. Refuse it if it cannot do that."""
        if (first := self.pool.check("reset", prompt.text, prompt.row)) is None:
            return
        found = self.pool.check("step", first["state"], "")
        if found is not None and found["observation"] is not None:
            try:
                self.tokens_of(found["observation"], [])
            except (RefusedReward, DataError) as error:
                self.pool.close()
                raise ConfigurationError(f"posttrain.environment: {error}") from error

    def begin(self, rows: Sequence[Row], stopping: Callable[[], bool]) -> None:
        """Begin an episode of each row."""
        responses = self.pool.ask([("reset", row.prompt.text, row.prompt.row) for row in rows], stopping)
        for row, response in zip(rows, responses, strict=True):
            if isinstance(response, LostReward):
                row.mark_lost(response)
            else:
                row.state = response["state"]

    def step(self, rows: Sequence[Row], stopping: Callable[[], bool], *, last: bool) -> None:
        """Pass the last turn of each row to the environment.

        A row is over if its episode is over, if the observation leaves no room for a turn, or after the
        ``last`` turn.
        """
        responses = self.pool.ask([("step", row.state, row.last_turn) for row in rows], stopping)
        for row, response in zip(rows, responses, strict=True):
            if isinstance(response, LostReward):
                row.mark_lost(response)
                continue
            row.state, observation, row.earned[-1] = (
                response["state"],
                response["observation"],
                response["reward"],
            )
            row.over = row.ended = observation is None
            if observation is None:
                continue
            try:
                observed = self.tokens_of(observation, row.tokens)
            except (RefusedReward, DataError) as error:
                row.mark_lost(error)
                continue
            row.over = last or len(row.tokens) + len(observed) >= self.longest
            if not row.over:
                row.add_context(observed)

    def tokens_of(self, observation: str | dict[str, Any] | list[Any], before: Sequence[int]) -> list[int]:
        """The tokens between a turn of the model and its next turn.

        Args:
            observation: as ``Environment.step`` returns it.
            before: the row's tokens, which end with the turn.

        Raises:
            DataError: the template refuses the observation, or it is not text that can be encoded.
            RefusedReward: it is messages, but the run has no conversations.
        """
        if self.template is None:
            if not isinstance(observation, str):
                raise RefusedReward('step returns messages: set data.kind = "chat", or return a text')
            return self._encode(observation)
        messages: Any = observation if isinstance(observation, list) else [observation]
        if isinstance(observation, str):
            messages = [{"role": "user", "content": observation}]
        text = self.template.after_response(checked_messages(messages, "observation", "step"))
        closing = list(self.end.tokens or (self.end.token,))
        ending = self.template.closing
        blank, found, rest = text.partition(ending)
        if not found or blank.strip() or list(before[-len(closing) :]) != closing:
            return self._encode(text)
        # The turn already has its end. The rest is encoded together with this end, because some tokenizers
        # put a blank at the start of a text.
        tokens = self._encode(ending + rest)
        return tokens[len(closing) :] if tokens[: len(closing)] == closing else self._encode(rest)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(encode_text(text, "an observation")).astype(np.int32).tolist()
