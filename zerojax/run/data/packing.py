"""Documents packed into rows, whole if they fit, by best-fit decreasing.

Ding et al., 2024, "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830), section 3: documents
longer than a row are cut to rows; then, longest first, each piece goes to the fullest row with room for it.
"""

import numpy as np
from jaxtyping import Int, Int32, Int64

from zerojax.run.data.tokens import TokenFile

PADDING = -1
"""The token of unused positions; ``zerojax.models.lm_loss`` does not count it."""


class PackedRows:
    """A token file as a random-access sequence of rows of whole documents, or of pieces of long ones.

    A row is {"tokens": int32 [T + 1], "segments": int32 [T + 1]}. Segments are 1 for the first document of
    the row, 2 for the next, and 0 for padding. A document includes the tokens that begin and end a text; if
    it is longer than T + 1, it is cut into pieces of T + 1 that share a token with the next, so that each of
    its tokens but the first is predicted exactly once.
    """

    def __init__(self, file: TokenFile, length: int) -> None:
        """Plan rows of T = ``length``; the plan takes about 16 bytes of memory per document."""
        starts, sizes = _pieces(file, length)
        rows = best_fit(sizes, length + 1)
        order = np.argsort(rows, kind="stable")
        self._tokens = file.tokens
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
        at = 0
        pairs = zip(self._starts[mine].tolist(), self._sizes[mine].tolist(), strict=True)
        for number, (start, size) in enumerate(pairs, 1):
            tokens[at : at + size] = self._tokens[start : start + size]
            segments[at : at + size] = number
            at += size
        return {"tokens": tokens, "segments": segments}


def best_fit(sizes: Int[np.ndarray, " pieces"], capacity: int) -> Int32[np.ndarray, " pieces"]:
    """Assign pieces to rows: longest first, each to the fullest row with room, else to a new one.

    All pieces of one size are placed at once, so the time grows with the number of different sizes.

    Args:
        sizes: of the pieces, at least one, each 1 to ``capacity``.
        capacity: of a row.

    Returns:
        The row of each piece; rows count from 0, and none is empty.
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
