"""Reads documents from files: plain text, JSON lines, Parquet and Arrow, a few rows in memory at a time.

Files are data: nothing in them is executed, imported or unpickled, and no path in them is followed.
"""

import gzip
import io
import itertools
import json
import os
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from zerojax.errors import ConfigurationError
from zerojax.validation.untrusted import short

MAX_LINE_BYTES = 1 << 28
"""The longest line of a JSON file, in decompressed bytes: a small archive could hold a huge line."""

_ROWS = 1024
_PIECES = 64
_LONGEST_WORD = 64
_LINES = (".jsonl", ".ndjson")
_COMPRESSED = (".gz", ".zst")
_COLUMNAR = (".parquet", ".arrow")


class DataError(ConfigurationError):
    """A text source or a token file cannot be used; the message names it and the way out."""


@dataclass(frozen=True)
class Document:
    """A text and its origin.

    Attributes:
        place: for messages: a file, "FILE:LINE" or "FILE row ROW"; lines count from 1, rows from 0.
        text: the bytes of the text. They are UTF-8, except that a plain text file may have any bytes.
        targets: the ranges of characters, in order, that count in the loss; None if all do, () if none does.
    """

    place: str
    text: bytes
    targets: tuple[tuple[int, int], ...] | None = None


def user_path(name: str) -> Path:
    """The path that a setting names; a leading "~" or "~USER" becomes that user's home."""
    return Path(os.path.expanduser(name))


def is_table(path: Path) -> bool:
    """Whether a file holds rows, by its name: JSON lines, Parquet or Arrow."""
    return _lines_suffix(path) is not None or path.suffix.lower() in _COLUMNAR


def read_documents(path: Path, column: str) -> Iterator[Document]:
    """The non-empty documents of a file.

    Args:
        path: .jsonl or .ndjson, plain or with .gz or .zst; .parquet; .arrow (both layouts of Arrow's IPC).
            Any other file is one document of plain text.
        column: the column or key of a row that holds the text.

    Raises:
        DataError: the file is damaged, a row has no such column or no text in it, or the format's reader is
            not installed; names the file and the row.
    """
    if is_table(path):
        rows = read_rows(path, [column])
        documents = (Document(place, encode_text(text_of(row, column, place), place)) for place, row in rows)
    else:
        with _readable(path):
            documents = iter([Document(str(path), path.read_bytes())])
    return (document for document in documents if document.text)


def read_rows(
    path: Path, columns: Sequence[str], *, optional: Sequence[str] = (), others: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a table, each with its place and its values in some columns.

    Args:
        path: .jsonl or .ndjson, plain or with .gz or .zst; .parquet; .arrow.
        columns: columns that every row must have.
        optional: further columns to read if they exist.
        others: whether to read all other columns as well.

    Yields:
        A place as in ``Document``, and column -> value, as JSON has it: a string, a list, a dict, None ... In
        a list of tables from Parquet or Arrow, null values are left out, because such tables have the keys of
        all rows.
    """
    if _lines_suffix(path) is not None:
        yield from _json_rows(path, columns, optional=optional, others=others)
    elif is_table(path):
        for first, batch in _batches(path, columns, optional=optional, others=others):
            for row, values in enumerate(_values(batch, path, first), first):
                for column in (*columns, *optional):
                    if isinstance(tables := values.get(column), list):
                        values[column] = [_own_keys(table) for table in tables]
                yield f"{path} row {row}", values
    else:
        raise DataError(
            f"{path}: plain text has no columns {short(list(columns))}: bring JSON lines, Parquet or Arrow, "
            'or set data.kind to "text"'
        )


def cut_document(path: Path) -> Iterator[Document]:
    """A single text file as about 64 documents, so that some of them can be held out.

    It is cut at line ends, and in a line that is longer than a document at spaces.

    Raises:
        DataError: it cannot be read.
    """
    with _readable(path), path.open("rb") as file:
        target = max(1, path.stat().st_size // _PIECES)
        piece: list[bytes] = []
        number, first, size = 1, 1, 0
        for line in _short_lines(file, target + _LONGEST_WORD):
            piece.append(line)
            size += len(line)
            number += line.endswith(b"\n")
            if size >= target:
                yield Document(f"{path}:{first}", b"".join(piece))
                piece, first, size = [], number, 0
        if piece:
            yield Document(f"{path}:{first}", b"".join(piece))


def _short_lines(file: BinaryIO, longest: int) -> Iterator[bytes]:
    """The file's lines; one of more than ``longest`` bytes is cut after a space or between two characters."""
    while line := file.readline(longest):
        if len(line) == longest and not line.endswith(b"\n"):
            # Where characters start in UTF-8, the last one first.
            starts = (i for i in range(longest - 1, 0, -1) if line[i] & 0xC0 != 0x80)
            end = line.rfind(b" ") + 1 or next(starts, longest)
            file.seek(end - longest, os.SEEK_CUR)
            line = line[:end]
        yield line


def _lines_suffix(path: Path) -> str | None:
    """The compression suffix of a JSON lines file, "" if it is not compressed; None for other files."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSED else ""
    return packed if suffixes and suffixes[-1] in _LINES else None


def _own_keys(table: Any) -> Any:
    """A table without the null keys of tables inside of it; its own nulls stay."""

    def pruned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: pruned(item) for key, item in value.items() if item is not None}
        return [pruned(item) for item in value] if isinstance(value, list) else value

    return {key: pruned(value) for key, value in table.items()} if isinstance(table, dict) else table


def _json_rows(
    path: Path, columns: Sequence[str], *, optional: Sequence[str], others: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    with _readable(path), _open_lines(path) as lines:
        for number in itertools.count(1):
            line = lines.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            place = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{place}: a line of more than {MAX_LINE_BYTES >> 20} MiB: split its row")
            if not line.isspace():
                row = _json_row(line, columns, place)
                wanted = (*columns, *(column for column in optional if column in row))
                yield place, row if others else {column: row[column] for column in wanted}


def _open_lines(path: Path) -> Any:
    packed = _lines_suffix(path)
    if packed == ".gz":
        return gzip.open(path, "rb")
    if packed == ".zst":
        arrow = _pyarrow(path)
        return io.BufferedReader(arrow.CompressedInputStream(arrow.OSFile(str(path)), "zstd"))
    return path.open("rb")


def _json_row(line: bytes, columns: Sequence[str], place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not valid UTF-8 at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: a {type(row).__name__} instead of a JSON object: write one object a line")
    for column in columns:
        if column not in row:
            raise _no_column(place, column, list(row))
    return row


def text_of(row: Mapping[str, Any], column: str, place: str) -> str:
    """The text in a column of a row. Raises DataError, which names the ``place``, if that is no text."""
    value = row[column]
    if not isinstance(value, str):
        raise DataError(
            f"{place}: column {column!r} is {kind_of(value)}, not text: name another column, or clean the "
            "data"
        )
    return value


def kind_of(value: Any) -> str:
    """The name of a value's type, for a message."""
    return "null" if value is None else type(value).__name__


def encode_text(text: str, place: str) -> bytes:
    """A string of a JSON file as UTF-8.

    Raises DataError, which names the ``place``, if it is not valid Unicode.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: not valid Unicode: half of a surrogate pair at character {error.start}"
        ) from error


def _batches(
    path: Path, columns: Sequence[str], *, optional: Sequence[str], others: bool
) -> Iterator[tuple[int, Any]]:
    """The record batches of some columns of a Parquet or Arrow file, each with the number of its first row.

    ``optional`` columns are read if they exist. With ``others``, all columns are read.
    """
    arrow = _pyarrow(path)
    row = 0
    with ExitStack() as stack:
        stack.enter_context(_readable(path, arrow))
        if path.suffix.lower() == ".parquet":
            from pyarrow import parquet

            file = stack.enter_context(parquet.ParquetFile(path, memory_map=True))
            schema = file.schema_arrow
            there = [column for column in optional if column in schema.names]
            batches = file.iter_batches(_ROWS, columns=None if others else [*columns, *there])
        else:
            schema, batches = _record_batches(arrow, stack.enter_context(arrow.memory_map(str(path))), stack)
            there = [column for column in optional if column in schema.names]
        for column in columns:
            if column not in schema.names:
                raise _no_column(str(path), column, schema.names)
        for batch in batches:
            yield row, batch if others else batch.select([*columns, *there])
            row += batch.num_rows


def _record_batches(arrow: ModuleType, file: Any, stack: ExitStack) -> tuple[Any, Iterator[Any]]:
    """Schema and batches of an Arrow file, in either layout of IPC; ``datasets`` writes streams."""
    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        reader = stack.enter_context(arrow.ipc.open_file(file))
        return reader.schema, map(reader.get_batch, range(reader.num_record_batches))
    reader = stack.enter_context(arrow.ipc.open_stream(file))
    return reader.schema, iter(reader)


def _values(batch: Any, path: Path, first_row: int) -> list[dict[str, Any]]:
    """The rows of a batch. The batch is validated in full before any offset in it is used."""
    try:
        batch.validate(full=True)
        return batch.to_pylist()
    except (_pyarrow(path).ArrowException, ValueError, OverflowError) as error:
        last = first_row + len(batch) - 1
        raise DataError(f"{path} rows {first_row} to {last}: a value is damaged: {error}") from error


def _no_column(place: str, column: str, columns: list[str]) -> DataError:
    return DataError(
        f"{place}: no column {column!r} among {short(columns)}: set data.column (data.prompt_column and the "
        "like, if data.kind is not text), or data.pattern"
    )


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow
        import pyarrow.ipc  # an attribute from then on
    except ImportError as error:
        raise DataError(f"{path}: this format needs pyarrow: pip install 'pyarrow>=18'") from error
    return pyarrow


@contextmanager
def _readable(path: Path, arrow: ModuleType | None = None) -> Generator[None]:
    """Turn readers' errors about a damaged or unreadable file into a ``DataError``."""
    # A column name that is not UTF-8 raises a ValueError.
    damage = (EOFError, zlib.error) if arrow is None else (EOFError, ValueError, arrow.ArrowException)
    try:
        yield
    except DataError:
        raise
    except damage as error:
        raise DataError(f"{path}: damaged: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
