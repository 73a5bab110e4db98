"""Token files: a flat array on disk, memory-mapped, with a JSON header beside it.

`train.bin` holds the tokens, little-endian; `train.json` says their number, dtype and checksum, and has a
checksum of its own. The header is written last, so a file without one is unfinished.
"""

import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import dacite
import numpy as np
from jaxtyping import UInt32

from zerojax.checked_json import dump_checked, load_checked
from zerojax.data.source import DataError

_FORMAT = 1
_DTYPES = {"uint8": np.dtype("<u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Header:
    """What is known of a token file.

    Attributes:
        tokens: how many there are.
        dtype: uint8, uint16 or uint32, the narrowest that holds the vocabulary.
        crc32: checksum of the .bin file.
        vocab_size: every token is below it.
        documents: how many documents the tokens are of.
        text_bytes: bytes of text that they encode.
        tokenizer_crc32: checksum of the tokenizer.json that made them; 0 where the tokens are bytes.
        format: version of this layout.
    """

    tokens: int
    dtype: str
    crc32: int
    vocab_size: int
    documents: int
    text_bytes: int
    tokenizer_crc32: int = 0
    format: int = _FORMAT


@dataclass(frozen=True)
class TokenFile:
    """An opened token file.

    Attributes:
        path: of the .bin file.
        header: its description.
        tokens: memory-mapped array, uint8, uint16 or uint32 [tokens].
    """

    path: Path
    header: Header
    tokens: np.ndarray


def write_tokens(
    path: Path,
    documents: Iterable[tuple[UInt32[np.ndarray, " n"], int]],
    vocab_size: int,
    tokenizer_crc32: int = 0,
) -> Header:
    """Write a token file and its header.

    Args:
        path: of the .bin file; the header goes beside it.
        documents: (token ids, bytes of text) of each document.
        vocab_size: decides the dtype.
        tokenizer_crc32: as in the header.

    Raises:
        DataError: there is no token at all, or the disk refuses.
    """
    dtype = next(name for name, t in _DTYPES.items() if vocab_size - 1 <= np.iinfo(t).max)
    count = tokens = text_bytes = crc = 0
    try:
        with path.open("wb") as file:
            for ids, size in documents:
                raw = ids.astype(_DTYPES[dtype]).tobytes()
                file.write(raw)
                crc = zlib.crc32(raw, crc)
                count, tokens, text_bytes = count + 1, tokens + len(ids), text_bytes + size
        if not tokens:
            raise DataError(f"{path}: no tokens: the documents of this split are empty")
        header = Header(tokens, dtype, crc, vocab_size, count, text_bytes, tokenizer_crc32)
        path.with_suffix(".json").write_text(dump_checked(asdict(header)))
    except OSError as error:
        raise DataError(f"{path}: cannot write: {error.strerror or error}") from error
    return header


def open_tokens(path: Path, *, verify: bool = True) -> TokenFile:
    """Map a token file into memory.

    Args:
        path: of the .bin file.
        verify: read it all once and compare its checksum.

    Raises:
        DataError: missing, unfinished or damaged; names the file and what is wrong with it.
    """
    header = _read_header(path.with_suffix(".json"))
    dtype = _DTYPES[header.dtype]
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if size != header.tokens * dtype.itemsize:
        raise DataError(
            f"{path}: damaged: {size} bytes, where its header says {header.tokens} tokens of "
            f"{dtype.itemsize}; delete its folder to prepare the data again"
        )
    tokens = np.memmap(path, dtype, mode="r")
    if verify and _checksum(tokens) != header.crc32:
        raise DataError(f"{path}: damaged: wrong checksum; delete its folder to prepare it again")
    return TokenFile(path, header, tokens)


def _checksum(tokens: np.ndarray) -> int:
    crc = 0
    step = _CHUNK_BYTES // tokens.itemsize
    for start in range(0, len(tokens), step):
        crc = zlib.crc32(tokens[start : start + step].tobytes(), crc)
    return crc


def _read_header(path: Path) -> Header:
    try:
        data = load_checked(path.read_text(encoding="utf-8"))
        header = dacite.from_dict(Header, data, dacite.Config(strict=True))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except (ValueError, TypeError, RecursionError, dacite.DaciteError) as error:
        raise DataError(f"{path}: damaged, or not the header of a token file: {error}") from error
    if header.format != _FORMAT or header.dtype not in _DTYPES or header.tokens < 1:
        raise DataError(
            f"{path}: format {header.format}, dtype {header.dtype!r}, {header.tokens} tokens: "
            f"this version reads format {_FORMAT} with {', '.join(_DTYPES)}"
        )
    return header
