"""Batches of rows of tokens, in an order that depends only on the seed and the step.

The global batch of a step is the same for any number of processes, and each reads its own rows of it.
Therefore a run's position is one number, and a run can resume with another number of processes. The source of
a row in a mixture depends only on the row's index and the weights.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Protocol, cast

import grain
import numpy as np
from jaxtyping import Int32

from zerojax.run.data.formats import DataError
from zerojax.run.data.packing import PackedRows
from zerojax.run.data.split import evenly_spread
from zerojax.run.data.tokens import TokenFile


class Shares:
    """Rows interleaved from sources in proportion to their weights.

    Among the first k rows, each source has its share of k, to within the number of sources. The order is
    deterministic, and equals the order of ``grain.MapDataset.mix`` for weights that it allows.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Take the sources' weights, all positive; only their ratios matter."""
        exact = [Fraction(weight) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._shares = [int(weight * scale) for weight in exact]

    def taken(self, rows: int) -> list[int]:
        """The number of rows from each source among the first ``rows`` rows."""
        counts, left = [], sum(self._shares)
        for share in self._shares:
            others = rows * (left - share) // left
            counts.append(rows - others)
            rows, left = others, left - share
        return counts

    def place(self, row: int) -> tuple[int, int]:
        """The source of a row, and its index in that source."""
        before, after = self.taken(row), self.taken(row + 1)
        source = next(i for i, (b, a) in enumerate(zip(before, after, strict=True)) if a > b)
        return source, before[source]


Row = dict[str, Int32[np.ndarray, " length_plus_1"]]
Batch = dict[str, Int32[np.ndarray, "rows length_plus_1"]]


class Rows(Protocol):
    """A random-access sequence of rows of one shape."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, index: int) -> Row:
        """Row ``index``."""
        ...


class Windows:
    """A token file as a random-access sequence of {"tokens": int32 [T + 1]}; neighbours share a token.

    Window i starts at token i T, for T = ``length``, so every token but the first is predicted exactly once.
    """

    def __init__(self, file: TokenFile, length: int) -> None:
        self._tokens = file.tokens
        self._length = length
        self._count = (len(file.tokens) - 1) // length
        if self._count < 1:
            raise DataError(
                f"{file.path}: {len(file.tokens)} tokens are too few for one sequence of {length} "
                "(and the token after it): lower train.sequence_length or bring more text"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        start = index * self._length
        return {"tokens": np.asarray(self._tokens[start : start + self._length + 1], np.int32)}


def make_rows(file: TokenFile, length: int, packing: str, *, labels: bool = False) -> Rows:
    """The rows of a token file: ``Windows`` for packing "none", ``PackedRows`` for "documents".

    A row predicts ``length`` tokens. With ``labels``, packed rows have "labels". In a mixture, if the rows of
    one source have labels, the rows of all sources must have them.
    """
    return PackedRows(file, length, labels=labels) if packing == "documents" else Windows(file, length)


class TrainBatches(Iterator[Batch]):
    """An endless stream of this process's part of each global batch, with a position.

    A source's rows are all seen once before any is seen again, in a new order each time. The sources take
    turns by their weights, so a small source may be in its tenth epoch when a large one is in its first.

    The processes share the batch of ``batch_size`` rows. A process gets rows [process * b, (process + 1) *
    b).
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        *,
        batch_size: int,
        seed: int,
        weights: Sequence[float] = (1.0,),
        process: int = 0,
        processes: int = 1,
    ) -> None:
        if batch_size % processes:
            raise DataError(
                f"{processes} processes cannot share a batch of {batch_size} sequences: set "
                "train.batch_size to a multiple"
            )
        rows = batch_size // processes
        shares = Shares(weights)
        shuffled = [
            grain.MapDataset.source(source).seed(_seed_of(seed, number)).shuffle().repeat()
            for number, source in enumerate(sources)
        ]

        def load(step: int) -> Batch:
            first = step * batch_size + process * rows
            places = [shares.place(row) for row in range(first, first + rows)]
            return stack_rows([cast(Row, shuffled[source][index]) for source, index in places])

        steps = grain.MapDataset.range(2**62 // batch_size).map(load)
        # Two threads, a few batches ahead: reading must not compete with the step for cores.
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
        self._iterator = iter(steps.to_iter_dataset(options))
        self._batch_size = batch_size
        self._shares = shares
        self._sizes = [len(source) for source in sources]

    def __next__(self) -> Batch:
        """The next batch: "tokens", int32 [rows, T + 1], and any "segments" and "labels" of its rows."""
        return next(self._iterator)

    def rounds(self, step: int) -> list[float]:
        """The number of epochs of each source in the first ``step`` global batches."""
        taken = self._shares.taken(step * self._batch_size)
        return [count / size for count, size in zip(taken, self._sizes, strict=True)]

    def get_state(self) -> dict[str, Any]:
        """The position as JSON-able data, for ``set_state``."""
        return self._iterator.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a position that ``get_state`` returned; the next batch is the same as it was then."""
        self._iterator.set_state(state)

    def close(self) -> None:
        """Stop the reading threads."""
        self._iterator.close()


def validation_batches(
    sources: Sequence[Rows],
    *,
    batch_size: int,
    batches: int,
    weights: Sequence[float] = (1.0,),
    process: int = 0,
    processes: int = 1,
) -> list[Batch]:
    """The fixed batches of every evaluation, spread evenly over the validation splits.

    Arguments are as for ``TrainBatches``. There are at most ``batches``, or fewer if the splits have too few
    rows.
    """
    shares = Shares(weights)

    def too_many(count: int) -> bool:
        return any(n > len(s) for n, s in zip(shares.taken(count * batch_size), sources, strict=True))

    count = bisect.bisect_right(range(1, batches + 1), False, key=too_many)
    if not count:
        sizes = " + ".join(str(len(source)) for source in sources)
        raise DataError(
            f"the validation split has {sizes} sequences, but a batch needs "
            f"{' + '.join(map(str, shares.taken(batch_size)))}: raise data.validation, lower "
            "train.batch_size, or bring more text"
        )
    chosen = [
        evenly_spread(wanted, len(source))
        for source, wanted in zip(sources, shares.taken(count * batch_size), strict=True)
    ]
    rows = batch_size // processes

    def load(batch: int) -> Batch:
        first = batch * batch_size + process * rows
        places = [shares.place(row) for row in range(first, first + rows)]
        return stack_rows([sources[source][chosen[source][index]] for source, index in places])

    return [load(batch) for batch in range(count)]


def stack_rows(rows: Sequence[Row]) -> Batch:
    """Rows as one batch."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _seed_of(seed: int, source: int) -> int:
    """A different seed for each source, so that sources of the same size are shuffled differently."""
    return seed if source == 0 else int(np.random.SeedSequence((seed, source)).generate_state(1)[0])
