"""The validation split: a document's own text decides whether it is held out."""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from zerojax.run.data.formats import DataError

_END = 1 << 64


def rank(text: bytes) -> int:
    """A hash of a document's text in 0 .. 2^64 - 1; equal documents have the same rank."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def validation_limit(texts: Iterable[bytes], fraction: float, where: str = "") -> int:
    """The rank below which documents are held out.

    It is ``fraction`` of all ranks, so a document's split depends neither on other documents nor on file
    names: adding data moves no document, and equal documents stay together. If one side would be empty (with
    a handful of documents), the limit is moved by one document.

    Texts are read until each side has one. Errors begin with ``where``.
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
            f"{where}a validation split needs two different documents, but there is "
            f"{'one' if most >= 0 else 'none'}: bring more"
        )
    return least + 1 if least >= limit else most


def hold_out[T](every: Sequence[T], text: Callable[[T], bytes], fraction: float) -> tuple[list[T], list[T]]:
    """Split examples into those for training and those held out.

    An example's text decides, as for documents; ``fraction`` is as for ``validation_limit``.
    """
    texts = [text(one) for one in every]
    limit = validation_limit(texts, fraction)
    sides: tuple[list[T], list[T]] = [], []
    for one, own in zip(every, texts, strict=True):
        sides[rank(own) < limit].append(one)
    return sides


def evenly_spread(most: int, total: int) -> list[int]:
    """At most ``most`` of the indices below ``total``, spread evenly over them."""
    return np.linspace(0, total - 1, min(most, total)).astype(int).tolist()
