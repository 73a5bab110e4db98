"""Which documents are held out for validation: decided by each document's own text."""

import hashlib
from collections.abc import Iterable

from zerojax.run.data.formats import DataError

_END = 1 << 64


def rank(text: bytes) -> int:
    """A document's place in 0 .. 2^64 - 1, a hash of its text: that of a copy is the same."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def validation_limit(texts: Iterable[bytes], fraction: float) -> int:
    """The rank below which documents are held out.

    It is `fraction` of all ranks, so that no other document, and no file's name or place, decides
    where a document goes: more data moves none across, and copies stay together. Only where that
    leaves one side empty (a handful of documents) does the limit give way, by one document.

    Args:
        texts: documents; read until there is one on either side.
        fraction: of the documents to hold out, on average.

    Raises:
        DataError: fewer than two different documents.
    """
    limit = round(fraction * _END)
    least, most = _END, -1
    for text in texts:
        place = rank(text)
        least, most = min(least, place), max(most, place)
        if least < limit <= most:
            return limit
    if least >= most:
        raise DataError(
            f"a validation split needs two different documents, and there is {'one' if most >= 0 else 'none'}"
        )
    return least + 1 if least >= limit else most
