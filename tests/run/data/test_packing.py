"""Packing documents into rows, against numpy and plain Python."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from data_files import write_documents

from zerojax.run.data import PackedRows, best_fit, make_rows, validation_batches

END = 999


def naive_rooms(sizes: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing, one piece at a time; returns the room left in each row."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [row for row, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda row: rooms[row])] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


def test_best_fit_fills_rows_as_piece_by_piece():
    rng = np.random.default_rng(0)
    for _ in range(200):
        capacity = int(rng.integers(1, 40))
        sizes = rng.integers(1, capacity + 1, int(rng.integers(1, 80)))
        rows = best_fit(sizes, capacity)
        filled = np.bincount(rows, weights=sizes)
        assert filled.min() > 0
        assert sorted(capacity - filled) == naive_rooms(sizes.tolist(), capacity)


def test_rows_are_nearly_full():
    sizes = np.minimum(np.random.default_rng(0).lognormal(5, 1, 20_000).astype(int) + 2, 1025)
    filled = np.bincount(best_fit(sizes, 1025), weights=sizes)
    assert filled.mean() / 1025 > 0.999


@pytest.mark.parametrize("begin", [END, 998])
@pytest.mark.parametrize("length", [1, 2, 7, 16, 100])
def test_every_token_is_predicted_once_after_what_is_before_it_in_its_document(tmp_path: Path, length, begin):
    rng = np.random.default_rng(1)
    # All tokens differ, so that each is identifiable.
    sizes = [0, 1, 2, 6, 7, 8, 15, 16, 17, 40, *rng.integers(1, 30, 20)]
    names = iter(range(1000, 10_000))
    documents = [[next(names) for _ in range(size)] for size in sizes]
    file = write_documents(tmp_path, [np.array(d) for d in documents], 10_000, END, begin)
    rows = PackedRows(file, length)
    found = []
    for index in range(len(rows)):
        tokens, segments = rows[index]["tokens"], rows[index]["segments"]
        assert tokens.shape == segments.shape == (length + 1,)
        assert tokens.dtype == segments.dtype == np.int32
        assert np.all((tokens == -1) == (segments == 0))
        numbers = segments[segments > 0]
        assert numbers[0] == 1
        assert set(np.diff(numbers)) <= {0, 1}
        for number in range(1, numbers[-1] + 1):
            piece = tokens[segments == number].tolist()
            found += list(itertools.pairwise(piece))
    whole = [[begin, *document, END] for document in documents]
    wanted = [pair for text in whole for pair in itertools.pairwise(text)]
    assert sorted(found) == sorted(wanted)


def test_a_document_that_fits_is_never_cut(tmp_path: Path):
    documents = [np.full(size, size) for size in np.random.default_rng(2).integers(1, 31, 100)]
    rows = PackedRows(write_documents(tmp_path, documents, end=END), 31)
    ends = sum(
        int(np.sum(row["tokens"][row["segments"] == number] == END) == 2)
        for row in (rows[i] for i in range(len(rows)))
        for number in range(1, row["segments"].max() + 1)
    )
    assert ends == 100


def test_batches_of_packed_rows_have_segments(tmp_path: Path):
    file = write_documents(tmp_path, [np.arange(1, 9)] * 6, end=END)
    assert set(make_rows(file, 20, "none")[0]) == {"tokens"}
    (batch,) = validation_batches([make_rows(file, 20, "documents")], batch_size=3, batches=9)
    np.testing.assert_array_equal(batch["segments"], [[1] * 10 + [2] * 10 + [0]] * 3)
    np.testing.assert_array_equal(batch["tokens"][0], [*[END, *range(1, 9), END] * 2, -1])
