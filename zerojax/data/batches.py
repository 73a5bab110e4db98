"""Batches of token windows, in an order that depends on the seed and the step alone.

The global batch of step s is the same however many processes there are: each reads its own rows of
it. So a run's position is one number, and a run may go on with another number of processes.
"""

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32

from zerojax.data.source import DataError
from zerojax.data.tokens import TokenFile

Batch = dict[str, Int32[np.ndarray, "rows length_plus_1"]]


class Windows:
    """A token file as a random-access sequence of int32 [T + 1] windows; neighbours share a token.

    Window i starts at token i*T, so that every token but the first is predicted exactly once.
    """

    def __init__(self, file: TokenFile, length: int) -> None:
        """Cut `file` into windows that predict `length` tokens each.

        Raises:
            DataError: the file holds fewer than one.
        """
        self._tokens = file.tokens
        self._length = length
        self._count = (len(file.tokens) - 1) // length
        if self._count < 1:
            raise DataError(
                f"{file.path}: {len(file.tokens)} tokens are too few for one sequence of {length} "
                "(and the token after it): lower train.sequence_length or bring more text"
            )

    def __len__(self) -> int:
        """Number of windows."""
        return self._count

    def __getitem__(self, index: int) -> Int32[np.ndarray, " length_plus_1"]:
        """Window `index`, as int32 [T + 1]."""
        start = index * self._length
        return np.asarray(self._tokens[start : start + self._length + 1], np.int32)


class TrainBatches(Iterator[Batch]):
    """An endless stream of this process's part of each global batch, with a position."""

    def __init__(
        self,
        file: TokenFile,
        *,
        batch_size: int,
        length: int,
        seed: int,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        """Start at the first batch.

        Every window is seen once before any is seen again, in an order drawn anew each time.

        Args:
            file: the training split.
            batch_size: rows of the global batch.
            length: tokens predicted per row.
            seed: of the order.
            process: which of the `processes` this is; it gets rows [process*b, (process+1)*b).
            processes: how many share the batch; must divide it.

        Raises:
            DataError: the file is shorter than a sequence, or the batch does not divide.
        """
        if batch_size % processes:
            raise DataError(f"{processes} processes cannot share a batch of {batch_size} sequences")
        rows = batch_size // processes
        windows = grain.MapDataset.source(Windows(file, length)).seed(seed).shuffle().repeat()

        def load(step: int) -> Batch:
            first = step * batch_size + process * rows
            return {"tokens": np.stack([np.asarray(windows[first + i]) for i in range(rows)])}

        steps = grain.MapDataset.range(2**62 // batch_size).map(load)
        # Two threads and a few batches ahead: reading must not compete with the step for cores.
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
        self._iterator = iter(steps.to_iter_dataset(options))

    def __next__(self) -> Batch:
        """The next batch: {"tokens": int32 [rows, T + 1]}."""
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON-able data: `set_state` goes back to it, to the same next batch."""
        return self._iterator.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a position that `get_state` gave."""
        self._iterator.set_state(state)

    def close(self) -> None:
        """Stop the reading threads."""
        self._iterator.close()


def validation_batches(
    file: TokenFile,
    *,
    batch_size: int,
    length: int,
    batches: int,
    process: int = 0,
    processes: int = 1,
) -> list[Batch]:
    """The fixed batches that every evaluation uses, spread evenly over the validation split.

    Args:
        file: the validation split.
        batch_size: rows of the global batch.
        length: tokens predicted per row.
        batches: how many are wanted; fewer when the split has fewer.
        process: which of the `processes` this is.
        processes: how many share each batch.

    Raises:
        DataError: the split does not fill one batch.
    """
    windows = Windows(file, length)
    count = min(batches, len(windows) // batch_size)
    if count < 1:
        raise DataError(
            f"{file.path}: the validation split has {len(windows)} sequences of {length} tokens, "
            f"and a batch takes {batch_size}: raise data.validation, or lower train.batch_size"
        )
    chosen = np.linspace(0, len(windows) - 1, count * batch_size).astype(int)
    rows = batch_size // processes
    first = process * rows
    return [
        {"tokens": np.stack([windows[int(i)] for i in chosen[b : b + batch_size][first:][:rows]])}
        for b in range(0, count * batch_size, batch_size)
    ]
