"""Packing documents into rows, against numpy and plain Python."""

import itertools
from pathlib import Path

import jax
import numpy as np
import pytest
from data_files import write_documents, write_masked
from micro_run import micro_config

from zerojax.run.data.batches import TrainBatches, make_rows, validation_batches
from zerojax.run.data.formats import DataError
from zerojax.run.data.packing import PackedRows, Shortened, best_fit, shortened
from zerojax.run.inputs import batches_of

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


def test_rows_of_a_file_with_a_mask_have_its_labels(tmp_path: Path):
    documents = [([7, 8, 9], [0, 1, 1]), ([1, 2, 3, 4], [0, 1, 0, 1]), ([5, 6], [0, 1])]
    rows = PackedRows(write_masked(tmp_path, documents), 7, labels=True)
    first, second = rows[0], rows[1]
    assert len(rows) == 2
    np.testing.assert_array_equal(first["tokens"], [7, 8, 9, 1, 2, 3, 4, -1])
    np.testing.assert_array_equal(first["segments"], [1, 1, 1, 2, 2, 2, 2, 0])
    np.testing.assert_array_equal(first["labels"], [-1, 8, 9, -1, 2, -1, 4, -1])
    np.testing.assert_array_equal(second["labels"], [-1, 6, -1, -1, -1, -1, -1, -1])
    assert first["labels"].dtype == np.int32


def test_longer_documents_lose_their_end_and_are_counted(tmp_path: Path):
    documents = [
        ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1]),  # loses one token that counts
        ([6, 7, 8, 9], [0, 0, 0, 1]),  # loses the only one
        ([10, 11, 12], [0, 1, 1]),
        ([13], [1]),  # nothing predicts it
        ([14, 15, 16, 17], [0, 1, 0, 1]),
    ]
    file = write_masked(tmp_path, documents)
    # The first token of a document is never predicted.
    assert shortened(file, 2) == Shortened(documents=5, cut=3, skipped=2, targets=8, lost=3)
    assert shortened(file, 4) == Shortened(documents=5, cut=0, skipped=1, targets=8, lost=0)
    rows = PackedRows(file, 2, labels=True)
    assert sorted(rows[i]["tokens"].tolist() for i in range(len(rows))) == [
        [1, 2, 3],
        [10, 11, 12],
        [14, 15, 16],
    ]
    assert all(np.any(rows[i]["labels"][1:] >= 0) for i in range(len(rows)))


def test_a_mask_is_counted_as_document_by_document(tmp_path: Path):
    rng = np.random.default_rng(5)
    documents = [(size * [1], rng.integers(0, 2, size).tolist()) for size in rng.integers(1, 12, 50).tolist()]
    file = write_masked(tmp_path, documents)
    for length in (1, 3, 7, 20):
        wanted = [sum(mask[1 : length + 1]) for _, mask in documents]
        found = shortened(file, length)
        assert found.targets - found.lost == sum(wanted)
        assert found.skipped == sum(count == 0 for count in wanted)


def test_no_token_to_learn_within_a_row_is_refused(tmp_path: Path):
    file = write_masked(tmp_path, [([1, 2, 3, 4], [0, 0, 0, 1])])
    with pytest.raises(DataError, match=r"no completion begins within 2 tokens: raise train.sequence_length"):
        PackedRows(file, 2)


def test_micro_batches_do_not_change_which_rows_are_evaluated(tmp_path: Path):
    file = write_documents(tmp_path, [np.full(15, 1 + i) for i in range(40)])

    def evaluated(accumulate: int) -> np.ndarray:
        train = {"sequence_length": 16, "batch_size": 8, "accumulate": accumulate, "eval_batches": 2}
        config = micro_config(tmp_path, train=train)
        _, batches = batches_of(config, [PackedRows(file, 16)], [make_rows(file, 16, "documents")])
        assert {len(batch["tokens"]) for batch in batches} == {8 // accumulate}
        return np.concatenate([batch["tokens"] for batch in batches])

    np.testing.assert_array_equal(evaluated(1), evaluated(4))


def test_rows_that_processes_share_are_those_of_all_and_resume_on_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Documents of up to five rows, on four processes of one device of which two or four share each row."""
    file = write_documents(tmp_path, [np.arange(1, 2 + 23 * i % 83) for i in range(40)])

    def read(process: int, processes: int, sharing: int) -> TrainBatches:
        monkeypatch.setattr(jax, "process_index", lambda: process)
        monkeypatch.setattr(jax, "process_count", lambda: processes)
        monkeypatch.setattr(jax, "local_device_count", lambda: 1)
        train = {"sequence_length": 16, "batch_size": 4}
        config = micro_config(tmp_path, train=train, zero={"sequence_parallel": sharing})
        return batches_of(config, [PackedRows(file, 16)], [PackedRows(file, 16)])[0]

    whole = read(0, 1, 1)
    before = [next(whole) for _ in range(3)]
    after = [next(whole) for _ in range(60)]  # beyond the first epoch
    for sharing in (2, 4):
        parts = [read(process, 4, sharing) for process in range(4)]
        for batch in before:
            for rank, part in enumerate(next(one) for one in parts):
                rows = slice(rank // sharing * sharing, rank // sharing * sharing + sharing)
                for name, x in part.items():
                    np.testing.assert_array_equal(x, batch[name][rows])
        resumed = read(0, 1, 1)
        resumed.set_state(parts[-1].get_state())
        for batch in after:
            jax.tree.map(np.testing.assert_array_equal, next(resumed), batch)
