"""Recognises the end of a response, and finds held-out prompts whose responses are known."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Int32

from zerojax.run.data.chat_template import ChatTemplate
from zerojax.run.data.split import evenly_spread
from zerojax.run.data.tokenizer import Tokenizer
from zerojax.run.data.tokens import TokenFile


@dataclass(frozen=True)
class ResponseEnd:
    """The token or text that ends a response.

    Attributes:
        token: the end token.
        text: a text that also ends a response, if the template's end is more than one token (as with bytes);
            else empty.
        tokens: the tokens of that text.
    """

    token: int
    text: str = ""
    tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: ChatTemplate | None) -> Self:
        """The end of an assistant's message; without a template, the end of a text."""
        if template is None:
            return cls(tokenizer.end_of_text)
        ending = template.closing
        tokens = tuple(map(int, tokenizer.encode(ending.encode())))
        return cls(tokens[0]) if len(tokens) == 1 else cls(tokenizer.end_of_text, ending, tokens)

    @property
    def stop(self) -> list[tuple[int, ...]]:
        """The sequences of tokens that end a response, for ``zerojax.generate``."""
        return [(self.token,), self.tokens] if self.tokens else [(self.token,)]

    def length(self, tokens: Iterable[int]) -> int:
        """The number of tokens of a response up to and including its last end; all tokens if it has none.

        Templates write more after the end, such as a line break, but models do not.
        """
        ids = tuple(tokens)
        for stop in range(len(ids), 0, -1):
            if any(ids[max(stop - len(end), 0) : stop] == end for end in self.stop):
                return stop
        return len(ids)

    def read(self, tokenizer: Tokenizer, tokens: Iterable[int]) -> tuple[str, bool]:
        """The text of a response up to its end, and whether it has ended."""
        ids = list(tokens)
        ended = self.token in ids
        text = tokenizer.decode(ids[: ids.index(self.token)] if ended else ids)
        if self.text and self.text in text:
            return text[: text.index(self.text)], True
        return text, ended


class Item(NamedTuple):
    """A prompt's tokens from the token that begins the text, and its completion's tokens with the end."""

    prompt: Int32[np.ndarray, " prompt"]
    completion: Int32[np.ndarray, " completion"]


def held_out_items(file: TokenFile, count: int, longest: int) -> list[Item]:
    """At most ``count`` prompts and completions, spread evenly over a file of validation documents.

    The completion of a conversation is the assistant's last message; the completion of a text is its second
    half. Longer documents than ``longest`` tokens are skipped, and longer texts are cut.
    """
    lengths = np.asarray(file.lengths, np.int64)
    own = lengths - file.header.shared_ends  # the last token of a document may be the first of the next
    starts = np.cumsum(own) - own
    # A text may be cut, but must have two halves.
    fitting = np.flatnonzero(lengths > 1 if file.mask is None else lengths <= longest)
    items: list[Item] = []
    for document in fitting[evenly_spread(count, len(fitting))]:
        whole = slice(starts[document], starts[document] + lengths[document])
        tokens = np.asarray(file.tokens[whole], np.int32)
        if file.mask is None:
            tokens = tokens[:longest]
            items.append(Item(tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]))
            continue
        mask = file.mask[whole]
        counted = np.flatnonzero(mask)
        if not len(counted):
            continue
        end = int(counted[-1]) + 1
        others = np.flatnonzero(mask[:end] == 0)
        if len(others):
            start = int(others[-1]) + 1
            items.append(Item(tokens[:start], tokens[start:end]))
    return items
