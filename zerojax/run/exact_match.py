"""Exact match: the fraction of held-out prompts that the model answers with their very completion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from zerojax import gather_model
from zerojax.errors import ConfigurationError
from zerojax.models import GPT, Sampling, generate
from zerojax.run.config import RunConfig
from zerojax.run.data import Dataset, Shares, Tokenizer, open_template
from zerojax.run.data.answers import AnswerEnd, Item, held_out_items
from zerojax.train.state import TrainState

_ROWS = 64


@dataclass(frozen=True)
class ExactMatch:
    """Held-out prompts with their completions.

    Attributes:
        items: of each source, with what ends their answers.
        tokenizer: that made their tokens.
    """

    items: Sequence[tuple[AnswerEnd, Sequence[Item]]]
    tokenizer: Tokenizer

    @classmethod
    def of(cls, config: RunConfig, data: Dataset, tokens: Path) -> "ExactMatch | None":
        """The items of a run's evaluations; None if train.eval_exact_match is 0.

        They are spread evenly over the validation splits, and over the sources by their weights. Documents
        that are longer than a row are left out.

        Args:
            config: of the run.
            data: of the run.
            tokens: folder of the run's tokens.

        Raises:
            ConfigurationError: every document is too long.
        """
        count = config.train.eval_exact_match
        if not count:
            return None
        sources = zip(config.data.sources, data.parts, strict=True)
        asked = [(one, part) for one, part in sources if one.kind != "text"]
        found = []
        shares = Shares([part.weight for _, part in asked]).taken(count)
        for (one, part), share in zip(asked, shares, strict=True):
            template = open_template(config.data, tokens) if one.kind == "chat" else None
            items = held_out_items(part.validation, share, config.train.sequence_length + 1)
            found.append((AnswerEnd.of(data.tokenizer, template), items))
        if not any(items for _, items in found):
            raise ConfigurationError(
                f"train.eval_exact_match: no held-out document fits into {config.train.sequence_length + 1} "
                "tokens: raise train.sequence_length, or leave it out"
            )
        return cls(found, data.tokenizer)

    def __len__(self) -> int:
        return sum(len(items) for _, items in self.items)

    def measure(self, state: TrainState) -> float:
        """The fraction of the items that greedy decoding with a state's weights answers right.

        Answers are compared as text, without blanks at their ends. All processes must call it; each gathers
        the whole model and decodes by itself.
        """
        model: GPT = gather_model(state)
        right = sum(self._right(model, end, items) for end, items in self.items)
        return right / len(self)

    def _right(self, model: GPT, end: AnswerEnd, items: Sequence[Item]) -> int:
        """The number of items that are answered right."""
        # Prompts of similar length together, so that few columns are padding.
        ordered = sorted(items, key=lambda item: len(item.prompt))
        right = 0
        for first in range(0, len(ordered), _ROWS):
            some = ordered[first : first + _ROWS]
            # As many rows in every batch, so that one compiled program serves all.
            rows = [item.prompt for item in some] + [some[0].prompt] * (min(len(ordered), _ROWS) - len(some))
            longest = max(len(item.completion) for item in ordered)
            answers = generate(
                model, rows, longest, key=jax.random.key(0), how=Sampling(temperature=0), stop=end.token
            )
            for item, answer in zip(some, answers.tolist(), strict=False):
                given, wanted = (self._text(end, tokens) for tokens in (answer, item.completion.tolist()))
                right += given == wanted
        return right

    def _text(self, end: AnswerEnd, tokens: Sequence[int]) -> str:
        return end.read(self.tokenizer, tokens)[0].strip()


def describe_matches(measured: Mapping[str, float], items: ExactMatch | None) -> str:
    """The end of a line about an evaluation: its "exact_match", or nothing if there are no items."""
    if items is None:
        return ""
    return f"; exact match {measured['exact_match']:.1%} of {len(items)} held-out prompts"
