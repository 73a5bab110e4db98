"""Prepares token files from text sources, once per run, in one process, a few documents at a time."""

import json
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from zerojax import terminal
from zerojax.errors import errors_at, file_errors
from zerojax.formatting import size
from zerojax.run.config import DataSection, MixtureSource
from zerojax.run.data.chat_template import TEMPLATE, ChatTemplate, load_template
from zerojax.run.data.dataset import (
    ELSEWHERE,
    SPLITS,
    TOKENIZER,
    PreparedTokens,
    is_prepared,
    make_tokenizer,
    names_kept_tokenizer,
    open_tokenizer,
    part_folders,
    read_tokens,
    tokenizer_checksum,
    tokens_of,
)
from zerojax.run.data.examples import Completions, Conversations, Encoded, Examples, Texts, text_that_counts
from zerojax.run.data.formats import DataError, Document
from zerojax.run.data.source import TextSource, check_source_exists
from zerojax.run.data.split import rank, validation_limit
from zerojax.run.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
from zerojax.run.data.tokenizer import SETTINGS as TOKENIZER_SETTINGS
from zerojax.run.data.tokens import TokenWriter
from zerojax.run.run_dir import copy_files
from zerojax.validation.untrusted import dump_checked, parse_json

_SETTINGS = "settings.json"
_BATCH_DOCUMENTS = 1024
_BATCH_BYTES = 1 << 22
_PROGRESS_SECONDS = 10.0


class TextProgress:
    """Counts bytes and tokens, and prints a line every ten seconds."""

    def __init__(self, task: str, say: Callable[[str], None]) -> None:
        self._task = task
        self._say = say
        self._bytes = self._tokens = 0
        self._start = self._said = time.monotonic()

    def add(self, text_bytes: int, tokens: int = 0) -> None:
        """Count more bytes of text, and the tokens made of them."""
        self._bytes += text_bytes
        self._tokens += tokens
        now = time.monotonic()
        if now - self._said < _PROGRESS_SECONDS:
            return
        self._said = now
        made = f", {self._tokens / 1e6:,.1f}M tokens" if self._tokens else ""
        seconds = now - self._start
        self._say(f"{self._task}: {size(self._bytes)} of text{made} in {seconds:.0f} s")


def _print(message: str) -> None:
    terminal.stdout.write(f"{message}\n")


def prepare(settings: DataSection, folder: Path, say: Callable[[str], None] = _print) -> None:
    """Write the token files of each source, and the tokenizer. The folder appears only when it is complete.

    A prepared folder is left alone, so a resumed run sees the tokens that it started with even if a source
    has changed. Sources that are prepared folders are left alone, too. The run's folder then gets a copy of
    their tokenizer and chat template, and a record of the tokens.
    """
    if _is_ready(settings, folder):
        return
    draft = _draft(folder)
    drafts = part_folders(settings, draft)
    if _are_elsewhere(drafts, draft):
        _keep_from(settings, drafts, folder)
        return
    template = _template(settings)
    sources = [
        TextSource(one.source, one.pattern or "", _examples(one, settings, template))
        for one in settings.sources
    ]
    limits = [
        validation_limit(
            (document.text for document in source.documents()), settings.validation, f"{one.source}: "
        )
        for one, source in zip(settings.sources, sources, strict=True)
    ]
    with _drafted(folder):
        tokenizer = make_tokenizer(settings, _training_texts(sources, limits, say))
        for one, source, limit, part in zip(settings.sources, sources, limits, drafts, strict=True):
            part.mkdir(exist_ok=True)
            _write_tokenizer(tokenizer, template, part)
            _write_splits(source, limit, tokenizer, part, TextProgress(f"preparing {one.source}", say))
        (draft / _SETTINGS).write_text(json.dumps(_identity(settings), indent=1) + "\n")


def _is_ready(settings: DataSection, folder: Path) -> bool:
    """Whether ``prepare`` has nothing to do; refuses a folder that it may not replace."""
    draft = _draft(folder)
    parts = part_folders(settings, draft)
    if _are_elsewhere(parts, draft):
        if _are_elsewhere([part.resolve() for part in parts], folder.resolve()):
            return _keeps_from(settings, parts, folder)
        return True  # a source names the run's own tokens
    if all(is_prepared(part) for part in part_folders(settings, folder)):
        _check_same(settings, _identity(settings), folder)
        return True
    if (folder / ELSEWHERE).is_file():
        raise DataError(
            f"{folder.parent} was started with prepared tokens, {_words(read_tokens(folder))}, but "
            f"data.source names none (from {Path.cwd()}): put them back, or choose another --run-dir"
        )
    _check_replaceable(folder)
    return False


def prepared_tokenizer(settings: DataSection, folder: Path) -> Tokenizer | None:
    """The tokenizer that a folder will have after ``prepare``; None if ``prepare`` trains it.

    Nothing is written and no text is read.

    Raises:
        DataError: as for ``prepare``, except for faults in the text; or the chat template is missing.
    """
    if _is_ready(settings, folder):
        return open_tokenizer(settings, folder)
    draft = _draft(folder)
    parts = part_folders(settings, draft)
    if _are_elsewhere(parts, draft):
        return load_tokenizer(parts[0] / TOKENIZER)
    for one in settings.sources:
        check_source_exists(one.source, one.pattern)
    _template(settings)
    return None if settings.tokenizer == "bpe" else make_tokenizer(settings, iter(()))


def check_template(settings: DataSection, folder: Path, tokenizer: Tokenizer) -> None:
    """Check the chat template that ``prepare`` or ``keep_tokenizer`` would use.

    ``tokenizer`` is the one that data.tokenizer names, whose file need not exist yet.
    """
    draft = _draft(folder)
    if not _are_elsewhere(part_folders(settings, draft), draft):
        _template(settings, tokenizer)


def _are_elsewhere(parts: list[Path], folder: Path) -> bool:
    """Whether a run's tokens are outside of its folder."""
    return folder not in (parts[0], parts[0].parent)


def _keeps_from(settings: DataSection, parts: list[Path], folder: Path) -> bool:
    """Whether a folder has the tokenizer of tokens that are elsewhere; refuses a folder for other tokens."""
    if not (folder / ELSEWHERE).is_file():
        if is_prepared(folder) or is_prepared(folder / "0"):
            raise DataError(
                f"{folder} holds tokens, but data.source names others: use another --run-dir, or delete that "
                "folder"
            )
        _check_replaceable(folder)
        return False
    before, now = read_tokens(folder), tokens_of(settings, parts)
    if before != now:
        raise DataError(
            f"{folder.parent} was started with the tokens of {_words(before)}, and these are {_words(now)}: "
            "put the former back, or choose another --run-dir"
        )
    return True


def _words(tokens: list[PreparedTokens]) -> str:
    return " and ".join(map(str, tokens))


def _keep_from(settings: DataSection, parts: list[Path], folder: Path) -> None:
    """Record which prepared tokens a run reads, and copy their tokenizer and chat template."""
    with _drafted(folder) as draft:
        copy_files(parts[0], draft, (TOKENIZER, TOKENIZER_SETTINGS, TEMPLATE))
        found = [asdict(one) for one in tokens_of(settings, parts)]
        (draft / ELSEWHERE).write_text(dump_checked({"sources": found}), encoding="utf-8")


def keep_tokenizer(settings: DataSection, folder: Path) -> None:
    """Write the tokenizer, and the chat template, of a run that reads its data without preparing them.

    The run can then be moved, and keeps the tokenizer that it started with. A prepared folder is left alone;
    files from another start are replaced.

    Raises:
        DataError: the tokenizer is "bpe", which needs prepared data, or the folder has other files.
    """
    if (found := tokenizer_to_keep(settings, folder)) is not None:
        with _drafted(folder) as draft:
            _write_tokenizer(*found, draft)


def tokenizer_to_keep(settings: DataSection, folder: Path) -> tuple[Tokenizer, ChatTemplate | None] | None:
    """The files that ``keep_tokenizer`` writes; None if the folder is left alone. Errors as there."""
    if is_prepared(folder):
        return None
    if settings.tokenizer == "bpe":
        raise DataError(
            "data.tokenizer = 'bpe' is trained on prepared data, and this run prepares none: name a "
            "tokenizer.json, or 'byte'"
        )
    _check_replaceable(folder)
    return make_tokenizer(settings, iter(())), _template(settings)


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder of a run's data that holds more than a tokenizer."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if others := sorted({*names} - {TOKENIZER, TOKENIZER_SETTINGS, TEMPLATE}):
        raise DataError(
            f"{folder} holds {others[0]!r}, but not all files of prepared data: put them back, or delete "
            "that folder to prepare the data again"
        )


def _draft(folder: Path) -> Path:
    """The path at which a run's data folder is written. The folder may be a link to another disk."""
    folder = folder.resolve()
    return folder.with_name(folder.name + ".unfinished")


@contextmanager
def _drafted(folder: Path) -> Generator[Path]:
    """A new folder to write to, which becomes the run's data folder at the end."""
    draft = _draft(folder)
    shutil.rmtree(draft, ignore_errors=True)
    with file_errors(draft, DataError, "cannot write: "):
        draft.mkdir(parents=True)
    yield draft
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)  # it has at most a tokenizer
    draft.rename(folder)


def _write_tokenizer(tokenizer: Tokenizer, template: ChatTemplate | None, folder: Path) -> None:
    tokenizer.save(folder / TOKENIZER)
    if template is not None:
        (folder / TEMPLATE).write_text(template.source, encoding="utf-8")


def _write_splits(
    source: TextSource, limit: int, tokenizer: Tokenizer, folder: Path, progress: TextProgress
) -> None:
    """Encode a source's documents into the token files of its two splits."""
    checksum = tokenizer_checksum(folder)
    examples = source.examples
    with ExitStack() as stack:
        train, validation = (
            stack.enter_context(
                TokenWriter(folder / f"{split}.bin", tokenizer, checksum, masked=examples.masked)
            )
            for split in SPLITS
        )

        def counted() -> Iterator[Document]:
            for document in source.rows():
                if document.targets == ():
                    train.empty += 1
                else:
                    yield document

        for documents in _batches(counted()):
            encoded = _encode(documents, tokenizer, examples)
            for document, (tokens, mask) in zip(documents, encoded, strict=True):
                writer = validation if rank(document.text) < limit else train
                writer.add(tokens, text_that_counts(document), mask if examples.masked else None)
            progress.add(
                sum(len(document.text) for document in documents), sum(len(one.tokens) for one in encoded)
            )


def _encode(documents: list[Document], tokenizer: Tokenizer, examples: Examples) -> list[Encoded]:
    try:
        return examples.encode(tokenizer, documents)
    except DataError:
        for document in documents:  # find the faulty one, to name it
            with errors_at(document.place):
                examples.encode(tokenizer, [document])
        raise


def _template(settings: DataSection, tokenizer: Tokenizer | None = None) -> ChatTemplate | None:
    """The chat template, if there are conversations; its end of a turn is checked."""
    if all(one.kind != "chat" for one in settings.sources):
        return None
    template = load_template(settings.chat_template, settings.tokenizer)
    if tokenizer is None and settings.tokenizer != "bpe":
        tokenizer = make_tokenizer(settings, iter(()))
    # The special tokens are known before the tokenizer is trained.
    ends = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
    template = replace(template, special_tokens=ends if tokenizer is None else tokenizer.special_tokens)
    _ = template.turn_end  # raises if a model could not learn it
    return template


def _examples(one: MixtureSource, settings: DataSection, template: ChatTemplate | None) -> Examples:
    """How the files of a source become documents."""
    if one.kind == "completion":
        return Completions(settings.prompt_column, settings.completion_column)
    if one.kind == "chat" and template is not None:
        return Conversations(template, settings.messages_column)
    return Texts(one.column or "")


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
    """The settings that determine the tokens."""
    sources = [_source_identity(settings, one) for one in settings.sources]
    identity: dict[str, object] = {
        "sources": sources,
        "tokenizer": settings.tokenizer,
        "validation": settings.validation,
    }
    return identity | ({"vocab_size": settings.vocab_size} if settings.tokenizer == "bpe" else {})


def _source_identity(settings: DataSection, one: MixtureSource) -> dict[str, object]:
    """The settings that determine a source's documents. For texts they are as in the first version."""
    common: dict[str, object] = {"source": one.source, "pattern": one.pattern}
    if one.kind == "text":
        return common | {"column": one.column}
    if one.kind == "chat":
        return common | {
            "kind": one.kind,
            "messages_column": settings.messages_column,
            "chat_template": settings.chat_template,
        }
    columns = {"prompt_column": settings.prompt_column, "completion_column": settings.completion_column}
    return common | {"kind": one.kind} | columns


def _check_same(settings: DataSection, wanted: dict[str, object], folder: Path) -> None:
    path = folder / _SETTINGS
    with file_errors(path, DataError, content="cannot read what the tokens were made from"):
        found = parse_json(path.read_text(encoding="utf-8"))
    if found == wanted:
        return
    moved = isinstance(found, dict) and found | {"tokenizer": settings.tokenizer} == wanted
    if not (moved and names_kept_tokenizer(settings, folder)):
        before, now = _differences(found, wanted)
        raise DataError(
            f"{folder} was prepared with {before}; this run wants {now}: use another --run-dir, or delete "
            "that folder"
        )


def _differences(before: object, now: object) -> tuple[str, str]:
    """The settings of tokens that differ, as a TOML file has them: "data.validation = 0.05"."""
    flat = [_named_values(identity) for identity in (before, now)]
    names = sorted(name for name in {*flat[0], *flat[1]} if flat[0].get(name) != flat[1].get(name))
    texts = [", ".join(f"{name} = {one[name]}" for name in names if name in one) for one in flat]
    return texts[0] or "other settings", texts[1] or "none of them"


def _named_values(identity: object) -> dict[str, str]:
    """The name and the TOML value of each setting. Settings of several sources are numbered from 1."""
    identity = identity if isinstance(identity, dict) else {"settings.json": str(identity)}
    sources = identity.get("sources")
    sources = [one for one in sources if isinstance(one, dict)] if isinstance(sources, list) else []
    prefixes = ["data."] if len(sources) == 1 else [f"data.mixture[{i + 1}]." for i in range(len(sources))]
    found = {f"data.{key}": value for key, value in identity.items() if key != "sources"}
    for prefix, one in zip(prefixes, sources, strict=True):
        found |= {prefix + key: value for key, value in one.items()}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in found.items() if value is not None}
