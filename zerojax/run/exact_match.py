"""Exact match: the fraction of held-out prompts that the model answers with their very completion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from zerojax.errors import ConfigurationError
from zerojax.generation import Sampling
from zerojax.generation.generate import generate_rows
from zerojax.multihost.agreement import gather_from_all
from zerojax.run.config import RunConfig
from zerojax.run.data import Dataset, Shares, Tokenizer, open_template
from zerojax.run.data.answers import AnswerEnd, Item, held_out_items
from zerojax.train.state import TrainState


@dataclass(frozen=True)
class ExactMatch:
    """Held-out prompts with their completions.

    Attributes:
        items: of each source, with what ends their answers.
        tokenizer: that made their tokens.
        longest: tokens of a prompt and its answer together.
    """

    items: Sequence[tuple[AnswerEnd, Sequence[Item]]]
    tokenizer: Tokenizer
    longest: int

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
        return cls(found, data.tokenizer, config.train.sequence_length + 1)

    def __len__(self) -> int:
        return sum(len(items) for _, items in self.items)

    def measure(self, state: TrainState) -> float:
        """The fraction of the items that greedy decoding with a state's weights answers right.

        Answers are compared as text, without blanks at their ends. All processes must call it; each answers
        its share of the prompts, and all get the same result.
        """
        right = sum(self._right(state, end, items) for end, items in self.items if items)
        return sum(gather_from_all(right)) / len(self)

    def _right(self, state: TrainState, end: AnswerEnd, items: Sequence[Item]) -> int:
        """The number of this process's items that are answered right."""
        processes = jax.process_count()
        mine = items[jax.process_index() :: processes]
        # As many prompts in every process.
        rows = [item.prompt for item in mine] + [items[0].prompt] * (-(-len(items) // processes) - len(mine))
        longest = max(len(item.completion) for item in items)
        # Prompt and completion fit into a row of training: what goes beyond the context is wrong anyway.
        limits = [min(longest, self.longest - len(row)) for row in rows]
        answers = generate_rows(state, rows, limits, how=Sampling(temperature=0), stop=end.stop)
        right = 0
        for item, answer, length in zip(mine, answers.tokens, answers.lengths, strict=False):
            given, wanted = (
                self._text(end, tokens.tolist()) for tokens in (answer[:length], item.completion)
            )
            right += given == wanted
        return right

    def _text(self, end: AnswerEnd, tokens: Sequence[int]) -> str:
        return end.read(self.tokenizer, tokens)[0].strip()


def describe_matches(measured: Mapping[str, float], items: ExactMatch | None) -> str:
    """The end of a line about an evaluation: its "exact_match", or nothing if there are no items."""
    if items is None:
        return ""
    return f"; exact match {measured['exact_match']:.1%} of {len(items)} held-out prompts"
