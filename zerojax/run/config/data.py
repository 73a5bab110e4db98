"""Settings of the data."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from zerojax.validation.bounds import check_numbers, require

Kind = Literal["text", "chat", "completion"]


@dataclass(frozen=True)
class MixtureSource:
    """One source of a mixture: a table [[data.mixture]] of the TOML file.

    Attributes:
        source: As data.source.
        weight: Its share of the sequences, relative to the weights of the others.
        column: Overrides data.column.
        pattern: Overrides data.pattern.
        kind: Overrides data.kind.
    """

    source: str
    weight: float = 1.0
    column: str | None = None
    pattern: str | None = None
    kind: Kind | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "data.mixture: {}".format)
        require(self.source != "", "data.mixture: a source is empty: name a file, folder, glob or 'stdlib'")
        require(
            0 < self.weight < float("inf"),
            f"data.mixture: the weight of {self.source!r} must be positive; remove the table to drop it",
        )


@dataclass(frozen=True)
class DataSection:
    """The text to learn from.

    Attributes:
        source: A file, folder or glob of plain text, JSON lines, Parquet or Arrow; a folder saved by Hugging
            Face `datasets`; the tokens of an earlier run (RUN/data); or "stdlib", the source of Python's
            standard library.
        mixture: Several sources with weights, instead of `source`; in a file only.
        pattern: Which files of a folder to read.
        column: Which column of JSON lines, Parquet and Arrow holds the text.
        kind: What a row holds. "text": one text. "chat": a conversation; the loss counts only the assistant's
            messages. "completion": a prompt and its completion; the loss counts only the completion.
        messages_column: Which column holds a conversation: a list of {"role", "content"}.
        prompt_column: Which column holds a prompt.
        completion_column: Which column holds its completion.
        chosen_column: Which column holds the better of two answers, to learn from preferences.
        rejected_column: Which column holds the other one.
        chat_template: What turns a conversation into text: the "tokenizer"'s own chat template, "chatml", or
            the path of a Jinja file.
        tokenizer: "byte", or "bpe" (trained on the training split), or the path of a tokenizer.json.
        vocab_size: Vocabulary of a newly trained BPE.
        validation: Fraction of the documents held out for validation.
        packing: "none" joins all documents and cuts them into sequences; "documents" packs whole documents
            into sequences, and no document attends to another.
        verify: Read the token files once at the start and compare their checksums.
    """

    source: str = "stdlib"
    mixture: tuple[MixtureSource, ...] = ()
    pattern: str = "**/*"
    column: str = "text"
    kind: Kind = "text"
    messages_column: str = "messages"
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    chat_template: str = "tokenizer"
    tokenizer: str = "byte"
    vocab_size: int = 4096
    validation: float = 0.05
    packing: Literal["none", "documents"] = "none"
    verify: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, "data.{}".format)
        require(self.source != "", "data.source is empty: name a file, folder, glob or 'stdlib'")
        require(
            not self.mixture or self.source == DataSection.source,
            f"data.source {self.source!r} and data.mixture exclude each other: add the source to the mixture",
        )
        columns = [one.name for one in dataclasses.fields(self) if one.name.endswith("column")]
        for name in (*columns, "chat_template"):
            require(getattr(self, name) != "", f"data.{name} is empty: remove the key, or give it a name")
        require(
            self.prompt_column != self.completion_column,
            f"data.prompt_column and data.completion_column are both {self.prompt_column!r}: name two",
        )
        require(
            self.chosen_column != self.rejected_column,
            f"data.chosen_column and data.rejected_column are both {self.chosen_column!r}: name two",
        )
        require(
            not self.masked or self.packing == "documents",
            'data.kind = "chat" or "completion" keeps documents whole: set data.packing = "documents"',
        )
        require(self.vocab_size > 256, "data.vocab_size must exceed the 256 bytes")
        require(0.0 < self.validation < 1.0, "data.validation must lie between 0 and 1")

    @property
    def masked(self) -> bool:
        """Whether only some of the tokens count in the loss."""
        return any(one.kind != "text" for one in self.sources)

    @property
    def sources(self) -> tuple[MixtureSource, ...]:
        """The sources of the mixture, or the single one, each with its column, pattern and kind."""
        return tuple(
            dataclasses.replace(
                one,
                column=one.column or self.column,
                pattern=one.pattern or self.pattern,
                kind=one.kind or self.kind,
            )
            for one in self.mixture or (MixtureSource(self.source),)
        )
