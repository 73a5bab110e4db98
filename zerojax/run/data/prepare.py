"""Prepares token files from text sources, once per run, in one process, a few documents at a time."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np

from zerojax.run.config import DataSection
from zerojax.run.data.dataset import (
    SPLITS,
    TOKENIZER,
    is_prepared,
    make_tokenizer,
    part_folders,
    tokenizer_checksum,
)
from zerojax.run.data.formats import DataError, Document
from zerojax.run.data.progress import TextProgress
from zerojax.run.data.source import TextSource, open_source
from zerojax.run.data.split import rank, validation_limit
from zerojax.run.data.tokenizer import Tokenizer
from zerojax.run.data.tokens import TokenWriter
from zerojax.validation.untrusted import parse_json

_SETTINGS = "settings.json"
_BATCH_DOCUMENTS = 1024
_BATCH_BYTES = 1 << 22


def _print(message: str) -> None:
    print(message, flush=True)


def prepare(settings: DataSection, folder: Path, say: Callable[[str], None] = _print) -> None:
    """Write the token files of each source, and the tokenizer.

    A prepared folder is left alone, so a resumed run sees the tokens that it began with even if a source
    has changed. So are sources that are prepared folders themselves.

    Args:
        settings: sources, tokenizer, split.
        folder: to write; it appears only when it is complete.
        say: prints progress when it takes long.

    Raises:
        DataError: a source or the tokenizer cannot be used, or the folder was prepared with other settings.
    """
    draft = folder.with_name(folder.name + ".unfinished")
    drafts = part_folders(settings, draft)
    if draft not in (drafts[0], drafts[0].parent):
        return
    wanted = _identity(settings)
    if all(is_prepared(part) for part in part_folders(settings, folder)):
        _check_same(wanted, folder)
        return
    sources = [open_source(one.source, one.pattern or "", one.column or "") for one in settings.sources]
    limits = [
        validation_limit((document.text for document in source.documents()), settings.validation)
        for source in sources
    ]
    shutil.rmtree(draft, ignore_errors=True)
    try:
        for part in drafts:
            part.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"{draft}: cannot write: {error.strerror or error}") from error
    tokenizer = make_tokenizer(settings, _training_texts(sources, limits, say))
    for one, source, limit, part in zip(settings.sources, sources, limits, drafts, strict=True):
        tokenizer.save(part / TOKENIZER)
        _write_splits(source, limit, tokenizer, part, TextProgress(f"preparing {one.source}", say))
    (draft / _SETTINGS).write_text(json.dumps(wanted, indent=1) + "\n")
    draft.rename(folder)


def _write_splits(
    source: TextSource, limit: int, tokenizer: Tokenizer, folder: Path, progress: TextProgress
) -> None:
    """Encode a source's documents into the token files of its two splits."""
    checksum = tokenizer_checksum(folder)
    with ExitStack() as stack:
        train, validation = (
            stack.enter_context(TokenWriter(folder / f"{split}.bin", tokenizer, checksum)) for split in SPLITS
        )
        for documents in _batches(source.documents()):
            encoded = _encode(tokenizer, documents)
            for document, tokens in zip(documents, encoded, strict=True):
                writer = validation if rank(document.text) < limit else train
                writer.add(tokens, len(document.text))
            progress.add(sum(len(document.text) for document in documents), sum(map(len, encoded)))


def _encode(tokenizer: Tokenizer, documents: list[Document]) -> list[np.ndarray]:
    try:
        return tokenizer.encode_batch([document.text for document in documents])
    except DataError:
        for document in documents:  # find the one at fault, to name it
            try:
                tokenizer.encode(document.text)
            except DataError as error:
                raise DataError(f"{document.place}: {error}") from error
        raise


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if len(batch) == _BATCH_DOCUMENTS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _training_texts(
    sources: list[TextSource], limits: list[int], say: Callable[[str], None]
) -> Iterator[bytes]:
    progress = TextProgress("learning the vocabulary", say)
    for source, limit in zip(sources, limits, strict=True):
        for document in source.documents():
            if rank(document.text) >= limit:
                yield document.text
                progress.add(len(document.text))


def _identity(settings: DataSection) -> dict[str, object]:
    """The settings that decide the tokens."""
    sources = [asdict(one) for one in settings.sources]
    for one in sources:
        del one["weight"]
    identity: dict[str, object] = {
        "sources": sources,
        "tokenizer": settings.tokenizer,
        "validation": settings.validation,
    }
    return identity | ({"vocab_size": settings.vocab_size} if settings.tokenizer == "bpe" else {})


def _check_same(wanted: dict[str, object], folder: Path) -> None:
    path = folder / _SETTINGS
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot read what the tokens were made from: {error}") from error
    if found != wanted:
        raise DataError(
            f"{folder} was prepared with {found}, and this run wants {wanted}: use another "
            "--run-dir, or delete that folder"
        )
