"""Helpers of the tests of data."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerojax.run.data.tokenizer import ByteTokenizer
from zerojax.run.data.tokens import TokenFile, TokenWriter, open_tokens


@dataclass
class Ends(ByteTokenizer):
    """A tokenizer with only a size and the ends of a text."""

    vocab_size: int
    end_of_text: int
    begin_of_text: int


def write_documents(
    folder: Path,
    documents: Iterable[np.ndarray],
    vocab_size: int = 1000,
    end: int = 0,
    begin: int | None = None,
) -> TokenFile:
    """A token file of documents given as arrays of tokens."""
    path = folder / "train.bin"
    with TokenWriter(path, Ends(vocab_size, end, end if begin is None else begin)) as writer:
        for tokens in documents:
            writer.add(np.asarray(tokens, np.uint32), len(tokens))
    return open_tokens(path)


def write_masked(folder: Path, documents: Iterable[tuple[list[int], list[int]]]) -> TokenFile:
    """A token file of documents given as tokens, each with whether it counts in the loss."""
    path = folder / "train.bin"
    with TokenWriter(path, Ends(1000, 0, 0), masked=True) as writer:
        for tokens, mask in documents:
            writer.add(np.asarray(tokens, np.uint32), len(tokens), np.asarray(mask, bool))
    return open_tokens(path)
