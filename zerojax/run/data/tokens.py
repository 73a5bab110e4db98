"""Token files: a flat, memory-mapped array on disk, with the documents' lengths and a JSON header beside it.

``train.bin`` holds the tokens of all documents one after another, each between a token that begins a text and
a token that ends it. If these are the same token, as for bytes or GPT-2's tokenizer, neighbouring documents
share it. ``train.lengths`` holds the number of tokens of each document, including both ends, as uint32. Both
files are little-endian. ``train.json`` has the counts, the dtype and the checksums, including its own. It is
written last, so a folder without it is unfinished.

Files of prompts and completions, or of conversations, also have ``train.mask``: a byte for each token, 1 if
it counts in the loss. No tokens are added between their documents.
"""

import zlib
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import dacite
import numpy as np
from jaxtyping import Bool, UInt32

from zerojax.errors import file_errors
from zerojax.run.data.formats import DataError
from zerojax.run.data.tokenizer import Tokenizer
from zerojax.validation.untrusted import dump_checked, load_checked

_FORMAT = 2
_DTYPES = {"uint8": np.dtype("<u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Header:
    """The header of a token file.

    Attributes:
        tokens: number of tokens.
        dtype: uint8, uint16 or uint32, the narrowest that holds the vocabulary.
        crc32: checksum of the .bin file.
        vocab_size: every token is below it.
        documents: number of documents.
        shared_ends: whether the token that ends a document also begins the next.
        lengths_crc32: checksum of the .lengths file.
        text_bytes: bytes of the text whose tokens count in the loss.
        tokenizer_crc32: checksum of the tokenizer.json that made them; 0 if the tokens are bytes.
        format: version of this layout.
        targets: number of tokens that count in the loss; None without a mask, when all count.
        mask_crc32: checksum of the .mask file, or None.
        empty: rows of the source that are skipped because their completion is empty, in both splits; None if
            there are none.
    """

    tokens: int
    dtype: str
    crc32: int
    vocab_size: int
    documents: int
    shared_ends: bool
    lengths_crc32: int
    text_bytes: int
    tokenizer_crc32: int = 0
    format: int = _FORMAT
    targets: int | None = None
    mask_crc32: int | None = None
    empty: int | None = None


@dataclass(frozen=True)
class TokenFile:
    """An opened token file.

    Attributes:
        path: the .bin file.
        header: its header.
        tokens: memory-mapped array, uint8, uint16 or uint32 [tokens].
        lengths: memory-mapped array, uint32 [documents]: the tokens of each document, in order, including
            both ends.
        mask: memory-mapped array, uint8 [tokens]: 1 for the tokens that count in the loss; None if all do.
    """

    path: Path
    header: Header
    tokens: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray | None = None


class _Checked:
    """A file that is being written, and the checksum of its content."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.crc32 = 0
        self.close = self._file.close

    def write(self, values: np.ndarray, dtype: np.dtype) -> None:
        raw = values.astype(dtype).tobytes()
        self._file.write(raw)
        self.crc32 = zlib.crc32(raw, self.crc32)


class TokenWriter:
    """Writes a token file, document by document, and its header at the end if there was no error.

    The path names the .bin file; the other files are written beside it. If ``masked``, every document comes
    with a mask.

    Attributes:
        empty: as in the header.
    """

    def __init__(
        self, path: Path, tokenizer: Tokenizer, tokenizer_crc32: int = 0, *, masked: bool = False
    ) -> None:
        self.empty = 0
        self._path = path
        self._vocab_size = tokenizer.vocab_size
        self._tokenizer_crc32 = tokenizer_crc32
        self._ends = tokenizer.begin_of_text, tokenizer.end_of_text
        self._shared_ends = tokenizer.begin_of_text == tokenizer.end_of_text and not masked
        self._dtype = next(name for name, t in _DTYPES.items() if tokenizer.vocab_size - 1 <= np.iinfo(t).max)
        self._documents = self._count = self._text_bytes = self._targets = 0
        with self._writing():
            self._tokens = _Checked(path)
            self._lengths = _Checked(path.with_suffix(".lengths"))
            self._mask = _Checked(path.with_suffix(".mask")) if masked else None

    def __enter__(self) -> Self:
        return self

    def add(
        self,
        tokens: UInt32[np.ndarray, " n"],
        text_bytes: int,
        mask: Bool[np.ndarray, " n"] | None = None,
    ) -> None:
        """Add a document.

        With a mask, the tokens are written as they are. Otherwise the tokens that begin and end a text are
        added. ``text_bytes`` is the number of bytes of text that count in the loss.
        """
        length = len(tokens)
        if mask is None:
            begin, end = self._ends
            first = [] if self._shared_ends and self._documents else [begin]
            tokens, length = np.concatenate([first, tokens, [end]]), length + 2
        with self._writing():
            self._tokens.write(tokens, _DTYPES[self._dtype])
            self._lengths.write(np.asarray(length), _DTYPES["uint32"])
            if self._mask is not None and mask is not None:
                self._mask.write(mask, _DTYPES["uint8"])
                self._targets += int(mask.sum())
        self._documents += 1
        self._count += len(tokens)
        self._text_bytes += text_bytes

    def _writing(self) -> AbstractContextManager[None]:
        return file_errors(self._path, DataError, "cannot write: ")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the files, and write the header if there was no error."""
        with self._writing():
            for file in (self._tokens, self._lengths, self._mask):
                if file is not None:
                    file.close()
            if error is not None:
                return
            if not self._documents:
                raise DataError(
                    f"{self._path}: no tokens, because no document is in this split: bring more text"
                )
            header = Header(
                tokens=self._count,
                dtype=self._dtype,
                crc32=self._tokens.crc32,
                vocab_size=self._vocab_size,
                documents=self._documents,
                shared_ends=self._shared_ends,
                lengths_crc32=self._lengths.crc32,
                text_bytes=self._text_bytes,
                tokenizer_crc32=self._tokenizer_crc32,
                targets=None if self._mask is None else self._targets,
                mask_crc32=None if self._mask is None else self._mask.crc32,
                empty=self.empty or None,
            )
            # Without a mask, the header has no more keys than before there were masks.
            values = {name: value for name, value in asdict(header).items() if value is not None}
            self._path.with_suffix(".json").write_text(dump_checked(values))


def open_tokens(path: Path, *, verify: bool = True) -> TokenFile:
    """Map a token file, given its .bin file, into memory; with ``verify``, compare all checksums.

    Raises:
        DataError: a file is missing, damaged, or of another version.
    """
    header = _read_header(path.with_suffix(".json"))
    lengths_path = path.with_suffix(".lengths")
    tokens = _map(path, _DTYPES[header.dtype], header.tokens)
    lengths = _map(lengths_path, _DTYPES["uint32"], header.documents)
    checked = [(path, tokens, header.crc32), (lengths_path, lengths, header.lengths_crc32)]
    mask = None
    if header.mask_crc32 is not None:
        mask = _map(path.with_suffix(".mask"), _DTYPES["uint8"], header.tokens)
        checked.append((path.with_suffix(".mask"), mask, header.mask_crc32))
    if verify:
        for file, array, crc in checked:
            if zlib.crc32(array) != crc:
                raise DataError(f"{file}: damaged: wrong checksum; delete its folder to prepare it again")
    return TokenFile(path, header, tokens, lengths, mask)


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    with file_errors(path, DataError):
        size = path.stat().st_size
    if size != count * dtype.itemsize:
        raise DataError(
            f"{path}: damaged: {size} bytes, but its header says {count} numbers of {dtype.itemsize}; "
            "delete its folder to prepare the data again"
        )
    # A plain array over the mapping: slicing a memmap would be ten times slower.
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _read_header(path: Path) -> Header:
    with file_errors(path, DataError, content="damaged, or not the header of a token file"):
        data = load_checked(path.read_text(encoding="utf-8"))
        if data.get("format") != _FORMAT:
            raise DataError(
                f"{path}: format {data.get('format')!r}, but this version reads format {_FORMAT}; "
                "delete its folder to prepare the data again"
            )
        header = dacite.from_dict(Header, data, dacite.Config(strict=True))
    if header.dtype not in _DTYPES or header.tokens < 1 or header.documents < 1:
        raise DataError(
            f"{path}: dtype {header.dtype!r}, {header.tokens} tokens of {header.documents} documents: "
            f"this version reads {', '.join(_DTYPES)}, at least one of each"
        )
    return header
