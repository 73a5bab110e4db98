"""From a text source to two token files: once per run, by one process."""

import json
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from zerojax.config import DataSection
from zerojax.data.source import DataError, held_out, open_source
from zerojax.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer
from zerojax.data.tokens import TokenFile, open_tokens, write_tokens

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Dataset:
    """Tokens to learn from and tokens to check with.

    Attributes:
        train: the training split.
        validation: documents that training never sees.
        tokenizer: what made the tokens.
    """

    train: TokenFile
    validation: TokenFile
    tokenizer: Tokenizer


def is_prepared(folder: Path) -> bool:
    """Whether a folder holds finished token files."""
    return all((folder / f"{split}.json").is_file() for split in SPLITS)


def prepare(settings: DataSection, folder: Path) -> None:
    """Write the token files and the tokenizer of a source.

    A folder that is prepared already is left alone, so a run that goes on sees the tokens that it
    began with, even when the source has changed since. So is a source that is such a folder.

    Args:
        settings: source, tokenizer, split.
        folder: where to; it appears only when it is complete.

    Raises:
        DataError: the source or tokenizer cannot be used, or the folder was prepared with other
            settings.
    """
    if is_prepared(Path(settings.source)):
        return
    wanted = _identity(settings)
    if is_prepared(folder):
        _check_same(wanted, folder)
        return
    source = open_source(settings.source, settings.pattern)
    names = set(source.names())
    validation = held_out(names, settings.validation)
    splits = {"train": names - validation, "validation": validation}
    tokenizer = _make_tokenizer(settings, source.documents(splits["train"]))
    draft = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"{draft}: cannot write: {error.strerror or error}") from error
    tokenizer.save(draft / "tokenizer.json")
    checksum = _tokenizer_checksum(draft)
    for split, members in splits.items():
        documents = (
            (np.append(tokenizer.encode(text), np.uint32(tokenizer.end_of_text)), len(text))
            for text in source.documents(members)
        )
        write_tokens(draft / f"{split}.bin", documents, tokenizer.vocab_size, checksum)
    (draft / "settings.json").write_text(json.dumps(wanted, indent=1) + "\n")
    draft.rename(folder)


def open_dataset(settings: DataSection, folder: Path) -> Dataset:
    """Open what `prepare` wrote, or, where the source is such a folder itself, that one.

    Raises:
        DataError: missing or damaged files.
    """
    if is_prepared(Path(settings.source)):
        folder = Path(settings.source)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    train, validation = (open_tokens(folder / f"{split}.bin", verify=settings.verify) for split in SPLITS)
    if train.header.vocab_size != tokenizer.vocab_size:
        raise DataError(
            f"{folder}: the tokens are of a vocabulary of {train.header.vocab_size}, the tokenizer "
            f"has {tokenizer.vocab_size}: files of two preparations are mixed"
        )
    if train.header.tokenizer_crc32 != _tokenizer_checksum(folder):
        raise DataError(
            f"{folder / 'tokenizer.json'}: damaged, or not the one that made the tokens: wrong checksum; "
            "delete its folder to prepare the data again"
        )
    return Dataset(train, validation, tokenizer)


def open_tokenizer(settings: DataSection, folder: Path) -> Tokenizer:
    """The tokenizer of a run: what made its tokens or, where there are none yet, will make them.

    Raises:
        DataError: it is to be trained on the data, which are not prepared yet; or its file is gone.
    """
    for place in (Path(settings.source), folder):
        if is_prepared(place):
            return load_tokenizer(place / "tokenizer.json")
    if settings.tokenizer == "bpe":
        raise DataError("data.tokenizer = 'bpe' is trained on the data, and they are not prepared yet")
    return _make_tokenizer(settings, iter(()))


def _tokenizer_checksum(folder: Path) -> int:
    """Of the tokenizer's file; 0 where there is none, as for bytes."""
    path = folder / "tokenizer.json"
    return zlib.crc32(path.read_bytes()) if path.exists() else 0


def _identity(settings: DataSection) -> dict[str, object]:
    """The settings that decide the tokens."""
    identity = asdict(settings)
    del identity["verify"]
    if settings.tokenizer != "bpe":
        del identity["vocab_size"]
    return identity


def _check_same(wanted: dict[str, object], folder: Path) -> None:
    path = folder / "settings.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot read what the tokens were made from: {error}") from error
    if found != wanted:
        raise DataError(
            f"{folder} was prepared with {found}, and this run wants {wanted}: use another "
            "--run-dir, or delete that folder"
        )


def _make_tokenizer(settings: DataSection, texts: Iterator[bytes]) -> Tokenizer:
    if settings.tokenizer == "byte":
        return ByteTokenizer()
    if settings.tokenizer == "bpe":
        return BPETokenizer.train(texts, settings.vocab_size)
    path = Path(settings.tokenizer).expanduser()
    if not path.is_file():
        raise DataError(f"data.tokenizer {settings.tokenizer!r}: 'byte', 'bpe' or an existing file")
    return load_tokenizer(path)
