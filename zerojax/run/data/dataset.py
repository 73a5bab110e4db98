"""The dataset of a run: the opened token files of each source."""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.errors import file_errors
from zerojax.run.config import DataSection
from zerojax.run.data.chat_template import ChatTemplate, find_template, load_template
from zerojax.run.data.formats import DataError, user_path
from zerojax.run.data.packing import shortened
from zerojax.run.data.source import check_source_exists
from zerojax.run.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer, same_tokenizer
from zerojax.run.data.tokens import TokenFile, open_tokens
from zerojax.validation.untrusted import load_checked

SPLITS = ("train", "validation")
TOKENIZER = "tokenizer.json"
ELSEWHERE = "prepared_elsewhere.json"
"""The file in RUN/data that names tokens prepared elsewhere. A copy of their tokenizer is beside it."""


@dataclass(frozen=True)
class DatasetPart:
    """The token files of one source, with its name in the settings and its weight in the mixture.

    Training never sees the documents in ``validation``.
    """

    source: str
    weight: float
    train: TokenFile
    validation: TokenFile


@dataclass(frozen=True)
class Dataset:
    """Tokens for training and for validation: a part for each source, all made by one tokenizer."""

    parts: tuple[DatasetPart, ...]
    tokenizer: Tokenizer

    @property
    def weights(self) -> list[float]:
        """The sources' weights."""
        return [part.weight for part in self.parts]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per validation token that counts in the loss, averaged over the mixture."""
        headers = [part.validation.header for part in self.parts]
        ratios = [header.text_bytes / (header.targets or header.tokens) for header in headers]
        return float(np.average(ratios, weights=self.weights))

    def account(self, rounds: Sequence[float]) -> list[dict[str, Any]]:
        """The size of each source and its number of epochs so far, as JSON-able data."""
        return [
            {
                "source": part.source,
                "weight": part.weight,
                "documents": part.train.header.documents,
                "tokens": part.train.header.tokens,
                "rounds": round(turns, 4),
            }
            for part, turns in zip(self.parts, rounds, strict=True)
        ]

    def describe(self) -> str:
        """A line about the training split: tokens, documents and weights of each source."""
        return "; ".join(
            f"{part.train.header.tokens:,} tokens of {part.train.header.documents:,} documents"
            + (f" ({targets:,} tokens count)" if (targets := part.train.header.targets) else "")
            + (f" in {part.source} ({part.weight / sum(self.weights):.1%})" if len(self.parts) > 1 else "")
            for part in self.parts
        )

    def describe_loss(self, loss: float, digits: int) -> str:
        """A validation loss per token and per byte.

        With a mask it is the completions' loss, with its perplexity.
        """
        per_byte = loss / self.bytes_per_token
        text = f"validation loss {loss:.{digits}f} nats per token, {per_byte:.{digits}f} per byte"
        if all(part.validation.mask is None for part in self.parts):
            return text
        return f"{text} of the completions, whose perplexity is {perplexity(loss):.{digits}f}"

    def notes(self, length: int) -> list[str]:
        """Lines about each source's data that are skipped or cut: empty completions, and too long documents.

        A row predicts ``length`` tokens.
        """
        found = []
        for part in self.parts:
            if empty := part.train.header.empty:
                found.append(f"{part.source}: {empty:,} rows have an empty completion and are skipped")
            if part.train.mask is None or not (short := shortened(part.train, length)).cut:
                continue
            found.append(
                f"{part.source}: {short.cut:,} of {short.documents:,} documents are longer than "
                f"{length + 1} tokens (train.sequence_length + 1) and lose their end: {short.lost:,} of "
                f"{short.targets:,} tokens that count. {short.skipped:,} have none left and are skipped"
            )
        return found


def perplexity(loss: float) -> float:
    """The perplexity of a loss in nats per token; at most 1e9, because a diverged model's would overflow."""
    return math.exp(min(loss, math.log(1e9)))


def is_prepared(folder: Path) -> bool:
    """Whether a folder holds finished token files of one source."""
    return all((folder / f"{split}.json").is_file() for split in SPLITS)


def part_folders(settings: DataSection, folder: Path) -> list[Path]:
    """The folder of each source's tokens: the source itself if it is prepared, else in ``folder``.

    A mixture's tokens are in numbered folders.
    """
    sources = [user_path(one.source) for one in settings.sources]
    for source in sources:
        if (source / ELSEWHERE).is_file():
            names = " and ".join(one.source for one in read_tokens(source))
            raise DataError(
                f"{source} holds no tokens: its run reads the tokens in {names}. Name that folder"
            )
        if is_prepared(source / "0"):
            raise DataError(
                f"{source} holds the tokens of a mixture: name the folder of a source, such as {source}/0"
            )
    prepared = [is_prepared(source) for source in sources]
    if all(prepared):
        return sources
    if any(prepared):
        raise DataError(
            f"data.mixture: {sources[prepared.index(True)]} holds tokens and "
            f"{sources[prepared.index(False)]} text: prepare all of them or none"
        )
    if not settings.mixture:
        return [folder]
    return [folder / str(number) for number in range(len(sources))]


def open_dataset(settings: DataSection, folder: Path) -> Dataset:
    """Open the token files that ``prepare`` wrote, or the sources themselves if they are prepared.

    Raises:
        DataError: files are damaged, do not belong together, or do not fit ``data.kind``.
    """
    folders = part_folders(settings, folder)
    tokenizer = load_tokenizer(folders[0] / TOKENIZER)
    checksum = tokenizer_checksum(folders[0])
    parts = []
    for one, place in zip(settings.sources, folders, strict=True):
        train, validation = (open_tokens(place / f"{split}.bin", verify=settings.verify) for split in SPLITS)
        if (train.mask is None) != (one.kind == "text"):
            has = "no loss mask" if train.mask is None else "a loss mask"
            raise DataError(
                f'{place}: the tokens have {has}, which does not fit data.kind = "{one.kind}": set it to the '
                "kind with which they were prepared"
            )
        if train.header.vocab_size != tokenizer.vocab_size:
            raise DataError(
                f"{place}: the tokens have a vocabulary of {train.header.vocab_size}, and the tokenizer has "
                f"{tokenizer.vocab_size}: files of two preparations are mixed. Delete "
                "that folder to prepare the data again"
            )
        if train.header.tokenizer_crc32 != checksum:
            raise DataError(
                f"{folders[0] / TOKENIZER}: damaged, or not the tokenizer of the tokens in {place} (wrong "
                "checksum): delete the damaged folder to prepare the data again"
            )
        parts.append(DatasetPart(one.source, one.weight, train, validation))
    return Dataset(tuple(parts), tokenizer)


def open_tokenizer(settings: DataSection, folder: Path) -> Tokenizer:
    """The tokenizer of a run's tokens: the one that made them, that the run keeps, or that will make them.

    Raises:
        DataError: it is gone, or is still to be trained.
    """
    file = tokenizer_file(settings, folder)
    if file.is_file() or is_prepared(file.parent) or (folder / ELSEWHERE).is_file():
        return load_tokenizer(file)
    if settings.tokenizer in ("byte", "bpe") and not folder.exists():
        try:
            check_source_exists(settings.sources[0].source, settings.sources[0].pattern)
        except DataError as error:
            raise DataError(
                f"the tokenizer should be in {folder} or beside the tokens of data.source, and both are gone "
                f"({error}). Put one of them back, or create that folder: with the {TOKENIZER} of the "
                "tokens, or empty if the tokens are bytes"
            ) from error
    if settings.tokenizer == "bpe":
        raise DataError(
            "data.tokenizer = 'bpe' is trained on the data, which are not prepared yet: start the run first"
        )
    return make_tokenizer(settings, iter(()))


def names_kept_tokenizer(settings: DataSection, folder: Path) -> bool:
    """Whether the settings name a file with the same tokenizer as the run keeps, perhaps at another path."""
    files = user_path(settings.tokenizer), tokenizer_file(settings, folder)
    return all(file.is_file() for file in files) and same_tokenizer(*map(load_tokenizer, files))


def names_kept_tokens(settings: DataSection, folder: Path) -> bool:
    """Whether the settings name the tokens that the run reads from elsewhere, perhaps at another path."""
    places = part_folders(settings, folder)
    are_there = (folder / ELSEWHERE).is_file() and all(map(is_prepared, places))
    return are_there and read_tokens(folder) == tokens_of(settings, places)


def tokenizer_file(settings: DataSection, folder: Path) -> Path:
    """The place of a run's tokenizer. There is no file if it is "byte", or before the data are prepared."""
    place = folder if (folder / ELSEWHERE).is_file() else part_folders(settings, folder)[0]
    return place / TOKENIZER


@dataclass(frozen=True)
class PreparedTokens:
    """The number of tokens of a source that a run reads from elsewhere, and a checksum of their headers.

    The same tokens are equal at another path.
    """

    source: str = field(compare=False)
    tokens: int
    crc32: int

    def __str__(self) -> str:
        return f"{self.source} ({self.tokens:,} tokens, checksum {self.crc32:08x})"


def read_tokens(folder: Path) -> list[PreparedTokens]:
    """The run's record of tokens prepared elsewhere, one for each source.

    Raises DataError if it is damaged.
    """
    path = folder / ELSEWHERE
    with file_errors(path, DataError, content="damaged; delete the file to use the tokens that are there"):
        found = load_checked(path.read_text(encoding="utf-8"))["sources"]
        return [PreparedTokens(one["source"], one["tokens"], one["crc32"]) for one in found]


def tokens_of(settings: DataSection, places: Sequence[Path]) -> list[PreparedTokens]:
    """The prepared tokens of each source, from the headers of their files."""
    found = []
    for one, place in zip(settings.sources, places, strict=True):
        headers = [open_tokens(place / f"{split}.bin", verify=False).header for split in SPLITS]
        sums = [(one.crc32, one.lengths_crc32, one.mask_crc32, one.tokenizer_crc32) for one in headers]
        tokens = sum(header.tokens for header in headers)
        found.append(PreparedTokens(one.source, tokens, zlib.crc32(repr(sums).encode())))
    return found


def open_template(settings: DataSection, folder: Path) -> ChatTemplate:
    """The chat template that made the tokens of a run, or that will make them."""
    place = tokenizer_file(settings, folder).parent
    tokenizer = open_tokenizer(settings, folder)
    template = find_template(place) or load_template(settings.chat_template, settings.tokenizer)
    return replace(template, special_tokens=tokenizer.special_tokens)


def make_tokenizer(settings: DataSection, texts: Iterator[bytes]) -> Tokenizer:
    """The tokenizer that the settings choose, trained on ``texts`` if it is "bpe".

    Raises:
        DataError: ``data.tokenizer`` names no file, or one that cannot be read.
    """
    if settings.tokenizer == "byte":
        return ByteTokenizer()
    if settings.tokenizer == "bpe":
        return BPETokenizer.train(texts, settings.vocab_size)
    path = user_path(settings.tokenizer)
    if not path.is_file():
        raise DataError(f"data.tokenizer {settings.tokenizer!r} must be 'byte', 'bpe' or an existing file")
    return load_tokenizer(path)


def tokenizer_checksum(folder: Path) -> int:
    """CRC-32 of the tokenizer's file in a folder; 0 if there is none, as for bytes."""
    path = folder / TOKENIZER
    return zlib.crc32(path.read_bytes()) if path.exists() else 0
