"""Packs documents into rows by best-fit decreasing; a document that fits into a row stays whole.

Ding et al., 2024, "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830), section 3. Documents
longer than a row are cut into rows. Then each piece, longest first, goes to the fullest row with room for it.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int32, Int64

from zerojax.run.data.formats import DataError
from zerojax.run.data.tokens import TokenFile

PADDING = -1
"""The token at unused positions; ``zerojax.models.lm_loss`` does not count it."""


class PackedRows:
    """A token file as a random-access sequence of rows of whole documents, or of pieces of long ones.

    A row is {"tokens": int32 [T + 1], "segments": int32 [T + 1]} with T = ``length``. Segments are 1 for the
    first document of the row, 2 for the next, and 0 for padding. A document includes the tokens that begin
    and end a text. If it is longer than T + 1, it is cut into pieces of T + 1. Each piece shares a token with
    the next, so each token but the first is predicted exactly once.

    In a file with a mask, longer documents are not cut into pieces but lose their end, because a piece
    without its beginning is not a conversation. A document without a token to learn in its beginning is
    skipped. With ``labels``, a row also has "labels": int32 [T + 1], with the tokens that count in the loss
    and -1 elsewhere.

    The plan of the rows takes about 16 bytes of memory per document.
    """

    def __init__(self, file: TokenFile, length: int, *, labels: bool = False) -> None:
        starts, sizes = _pieces(file, length) if file.mask is None else _beginnings(file, length)[:2]
        if not len(starts):
            raise DataError(
                f"{file.path}: no completion begins within {length} tokens: raise train.sequence_length"
            )
        rows = best_fit(sizes, length + 1)
        order = np.argsort(rows, kind="stable")
        self._tokens = file.tokens
        self._mask = file.mask
        self._labels = labels
        self._length = length
        self._starts = starts[order]
        self._sizes = sizes[order]
        self._firsts = np.searchsorted(rows[order], np.arange(rows.max() + 2))

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, " length_plus_1"]]:
        mine = slice(self._firsts[index], self._firsts[index + 1])
        tokens = np.full(self._length + 1, PADDING, np.int32)
        segments = np.zeros(self._length + 1, np.int32)
        counted = np.zeros(self._length + 1, bool)
        at = 0
        pairs = zip(self._starts[mine].tolist(), self._sizes[mine].tolist(), strict=True)
        for number, (start, size) in enumerate(pairs, 1):
            tokens[at : at + size] = self._tokens[start : start + size]
            segments[at : at + size] = number
            counted[at : at + size] = True if self._mask is None else self._mask[start : start + size]
            at += size
        row = {"tokens": tokens, "segments": segments}
        return row | ({"labels": np.where(counted, tokens, PADDING)} if self._labels else {})


def best_fit(sizes: Int[np.ndarray, " pieces"], capacity: int) -> Int32[np.ndarray, " pieces"]:
    """Assign pieces to rows: longest first, each to the fullest row with room, else to a new one.

    All pieces of one size are placed at once, so the time grows with the number of different sizes. Sizes are
    from 1 to ``capacity``, and there is at least one.

    Returns:
        The row of each piece. Rows count from 0, and none is empty.
    """
    row_of = np.empty(len(sizes), np.int32)
    order = np.argsort(-sizes, kind="stable")
    rows_by_room: dict[int, list[np.ndarray]] = {}
    rooms = 0  # bit r: there are rows with room r
    rows = 0
    for pieces in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1):
        size = int(sizes[pieces[0]])
        while len(pieces):
            if fitting := rooms >> size:
                room = size + (fitting & -fitting).bit_length() - 1
                targets = np.concatenate(rows_by_room.pop(room))
                rooms ^= 1 << room
            else:
                room = capacity
                targets = np.arange(rows, rows + -(-len(pieces) // (capacity // size)), dtype=np.int32)
                rows += len(targets)
            # The fullest row with room stays the fullest until it has none, so it takes all it can.
            each = room // size
            placed = pieces[: each * len(targets)]
            row_of[placed] = np.repeat(targets, each)[: len(placed)]
            filled, over = divmod(len(placed), each)
            left = (
                (room - each * size, targets[:filled]),
                (room - over * size, targets[filled : filled + 1]),
                (room, targets[filled + 1 :]),
            )
            for free, some in left:
                if free and len(some):
                    rows_by_room.setdefault(free, []).append(some)
                    rooms |= 1 << free
            pieces = pieces[len(placed) :]
    return row_of


def _pieces(
    file: TokenFile, length: int
) -> tuple[Int64[np.ndarray, " pieces"], Int64[np.ndarray, " pieces"]]:
    """The start of each piece in the file, and its number of tokens, 2 to length + 1."""
    predicted = np.asarray(file.lengths, np.int64) - 1
    taken = predicted if file.header.shared_ends else predicted + 1
    counts = -(-predicted // length)
    document = np.repeat(np.arange(len(counts)), counts)
    within = length * (np.arange(len(document)) - (np.cumsum(counts) - counts)[document])
    starts = (np.cumsum(taken) - taken)[document] + within
    return starts, np.minimum(length, predicted[document] - within) + 1


@dataclass(frozen=True)
class Shortened:
    """The tokens of a file with a mask that the packed rows leave out.

    Attributes:
        documents: number of documents.
        cut: documents that are longer than a row, and lose their end.
        skipped: cut documents that have no token to learn left.
        targets: tokens that count in the loss, in all documents.
        lost: tokens that count in the loss and are in no row.
    """

    documents: int
    cut: int
    skipped: int
    targets: int
    lost: int


def shortened(file: TokenFile, length: int) -> Shortened:
    """Count the tokens of a file with a mask that rows of ``length`` tokens leave out."""
    return _beginnings(file, length)[2]


def _beginnings(
    file: TokenFile, length: int
) -> tuple[Int64[np.ndarray, " pieces"], Int64[np.ndarray, " pieces"], Shortened]:
    """Start and size of each document's part in a row of length + 1 tokens; and the tokens left out."""
    assert file.mask is not None
    whole = np.asarray(file.lengths, np.int64)
    starts, sizes = np.cumsum(whole) - whole, np.minimum(whole, length + 1)
    all_targets, targets = (_count(file.mask, starts + 1, starts + taken) for taken in (whole, sizes))
    kept = targets > 0
    report = Shortened(
        documents=len(whole),
        cut=int(np.sum(sizes < whole)),
        skipped=int(np.sum(~kept)),
        targets=int(all_targets.sum()),
        lost=int(all_targets.sum() - targets.sum()),
    )
    return starts[kept], sizes[kept], report


def _count(
    mask: np.ndarray, starts: Int64[np.ndarray, " n"], ends: Int64[np.ndarray, " n"]
) -> Int64[np.ndarray, " n"]:
    """The number of ones in each range of a mask; ranges are in order and do not overlap."""
    bounds = np.stack([starts, ends], axis=1).ravel()
    # A bound at the very end is not an index; the last range then extends to the end by itself.
    inside = bounds[bounds < len(mask)]
    sums = np.add.reduceat(mask, inside, dtype=np.int64) if len(inside) else np.zeros(0, np.int64)
    sums = np.concatenate([sums, np.zeros(len(bounds) - len(sums), np.int64)])[::2]
    return np.where(ends > starts, sums, 0)
