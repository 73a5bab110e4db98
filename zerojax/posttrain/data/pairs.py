"""Pairs of a preferred and a rejected response, from tables, as rows of a batch."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from zerojax.posttrain.data.prompts import files_of
from zerojax.run.config import DataSection
from zerojax.run.data.chat_template import ChatTemplate
from zerojax.run.data.examples import TOOLS, Completions, Conversations, Encoded, Examples
from zerojax.run.data.formats import DataError, Document, read_rows, text_of
from zerojax.run.data.responses import Item, ResponseEnd
from zerojax.run.data.split import evenly_spread, hold_out
from zerojax.run.data.tokenizer import Tokenizer

_AT_ONCE = 1024


class Pair(NamedTuple):
    """A better and a worse response to a prompt.

    Each text is the prompt, the response, and the response's end. Its mask selects the response.
    """

    chosen: Encoded
    rejected: Encoded
    prompt: bytes

    @property
    def length(self) -> int:
        """Tokens of the longer text."""
        return max(len(self.chosen.tokens), len(self.rejected.tokens))


@dataclass(frozen=True)
class PairRows:
    """Pairs as a random-access sequence of rows of one shape, as ``TrainBatches`` reads them.

    A row has "chosen" and "rejected", int32 [time + 1], padded with zeros. It also has "chosen_mask" and
    "rejected_mask", fp32 [time], which are 1 where the tokens after the first belong to the response.

    Attributes:
        pairs: of at most time + 1 tokens.
        time: number of columns, without the first token.
    """

    pairs: Sequence[Pair]
    time: int

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, " _"] | Float32[np.ndarray, " _"]]:
        row = {}
        for name, response in zip(("chosen", "rejected"), self.pairs[index][:2], strict=True):
            tokens, mask = np.zeros(self.time + 1, np.int32), np.zeros(self.time + 1, np.float32)
            tokens[: len(response.tokens)], mask[: len(response.mask)] = response
            row |= {name: tokens, f"{name}_mask": mask[1:]}
        return row


@dataclass(frozen=True)
class Pairs:
    """The pairs of a run.

    Attributes:
        train: pairs to train on.
        held_out: pairs for evaluations.
        skipped: how many pairs were skipped, by the reason.
    """

    train: Sequence[Pair]
    held_out: Sequence[Pair]
    skipped: Mapping[str, int]

    @classmethod
    def read(
        cls, data: DataSection, tokenizer: Tokenizer, template: ChatTemplate | None, longest: int
    ) -> "Pairs":
        """Read ``data.source``, and hold out the pairs of a fraction ``data.validation`` of the prompts.

        Args:
            data: the run's settings of its data.
            tokenizer: of the model.
            template: for conversations; None if each row has a prompt.
            longest: the most tokens of a prompt with its response. Longer pairs are skipped.
        """
        read = list(_read(data, tokenizer, template))
        every = [pair for pair in read if pair is not None]
        fitting = [pair for pair in every if pair.length <= longest]
        pairs = [pair for pair in fitting if not np.array_equal(pair.chosen.tokens, pair.rejected.tokens)]
        skipped = {
            f"have more than {longest} tokens": len(every) - len(fitting),
            "have two equal responses": len(fitting) - len(pairs),
            "have an empty response": len(read) - len(every),
        }
        if not pairs:
            why = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
            raise DataError(
                f"data.source {data.source!r}: none of {len(read):,} pairs can be used. {why}. Clean the "
                "data, or raise train.sequence_length"
            )
        return cls(*hold_out(pairs, lambda pair: pair.prompt, data.validation), skipped)

    def notes(self) -> list[str]:
        """Lines about skipped pairs."""
        counts = self.skipped.items()
        return [f"{count:,} pairs {reason} and were skipped" for reason, count in counts if count]


def chosen_items(pairs: Sequence[Pair], count: int) -> list[Item]:
    """At most ``count`` prompts with their chosen responses, spread evenly over the pairs."""
    items = []
    for index in evenly_spread(count, len(pairs)):
        tokens, mask = pairs[index].chosen
        start = int(np.argmax(mask))
        items.append(Item(tokens[:start].astype(np.int32), tokens[start:].astype(np.int32)))
    return items


def _read(data: DataSection, tokenizer: Tokenizer, template: ChatTemplate | None) -> Iterator[Pair | None]:
    """The pairs of all files. A pair with an empty response becomes None."""
    examples: Examples = Completions() if template is None else Conversations(template)
    given = data.prompt_column if template is None else data.messages_column
    responses, end = (data.chosen_column, data.rejected_column), ResponseEnd.of(tokenizer, template)
    rows = (
        row
        for path in files_of(data, "pairs")
        for row in read_rows(path, (given, *responses), optional=(TOOLS,) if template else ())
    )
    for some in itertools.batched(rows, _AT_ONCE):
        both = [
            tuple(_document(row, column, place, data, template) for column in responses)
            for place, row in some
        ]
        learnable = [documents for documents in both if all(document.targets for document in documents)]
        yield from [None] * (len(both) - len(learnable))
        encoded = examples.encode(tokenizer, [document for documents in learnable for document in documents])
        for (document, _), chosen, rejected in zip(learnable, encoded[::2], encoded[1::2], strict=True):
            assert document.targets is not None
            start = document.targets[0][0]
            yield Pair(_ended(chosen, end), _ended(rejected, end), document.text.decode()[:start].encode())


def _ended(text: Encoded, end: ResponseEnd) -> Encoded:
    """The text up to the end of its response."""
    start = int(np.argmax(text.mask))
    stop = start + end.length(text.tokens[start:].tolist())
    return Encoded(text.tokens[:stop], text.mask[:stop])


def _document(
    row: dict[str, Any], column: str, place: str, data: DataSection, template: ChatTemplate | None
) -> Document:
    """The prompt or conversation of a row, followed by the response in a column."""
    if template is None:
        return Completions(data.prompt_column, column).document(row, place)
    conversations = Conversations(template, data.messages_column)
    return conversations.document(row, place, response=text_of(row, column, place))
