"""The order of rows: windows, mixtures, processes, positions, validation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import grain
import numpy as np
import pytest
from data_files import write_documents

from zerojax.run.data.batches import Shares, TrainBatches, Windows, validation_batches
from zerojax.run.data.formats import DataError
from zerojax.run.data.tokens import TokenFile


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    """The tokens 0 ... 240 in a row."""
    return write_documents(tmp_path, [np.arange(1, 240)], 1000, end=240, begin=0)


@pytest.fixture
def windows(file: TokenFile) -> Windows:
    return Windows(file, 10)


class Numbers(Sequence[Any]):
    """A source of `size` rows that contain their source and index."""

    def __init__(self, source: int, size: int) -> None:
        self.source, self.size = source, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        return {"tokens": np.array([self.source, index], np.int32)}


class TestWindows:
    def test_they_overlap_by_one_token(self, file: TokenFile, windows: Windows) -> None:
        assert len(windows) == 24
        np.testing.assert_array_equal(windows[2]["tokens"], np.arange(20, 31))
        assert windows[0]["tokens"].dtype == np.int32
        np.testing.assert_array_equal(windows[0]["tokens"], file.tokens[:11])

    def test_a_file_shorter_than_a_window_is_refused(self, file: TokenFile) -> None:
        with pytest.raises(DataError, match=r"241 tokens are too few for one sequence of 241"):
            Windows(file, 241)


class TestOrder:
    SETTINGS: ClassVar[dict[str, Any]] = {"batch_size": 6, "seed": 3}

    def test_each_window_once_a_round_in_a_new_order(self, windows: Windows) -> None:
        batches = TrainBatches([windows], **self.SETTINGS)
        first, second = (np.concatenate([next(batches)["tokens"][:, 1] for _ in range(4)]) for _ in range(2))
        for epoch in (first, second):
            np.testing.assert_array_equal(np.sort(epoch), np.arange(24) * 10 + 1)
        assert not np.array_equal(first, second)
        assert batches.rounds(8) == [2.0]

    def test_the_seed_decides_the_order(self, windows: Windows) -> None:
        one, same = (next(TrainBatches([windows], **self.SETTINGS))["tokens"] for _ in range(2))
        other = next(TrainBatches([windows], batch_size=6, seed=4))["tokens"]
        np.testing.assert_array_equal(one, same)
        assert not np.array_equal(one, other)

    @pytest.mark.parametrize("step", [0, 1, 4, 7])
    def test_a_position_resumes_exactly(self, step: int) -> None:
        sources: Any = [Numbers(0, 5), Numbers(1, 17)]
        weights = [0.3, 0.7]
        batches = TrainBatches(sources, weights=weights, **self.SETTINGS)
        for _ in range(step):
            next(batches)
        state = json.loads(json.dumps(batches.get_state()))
        expected = [next(batches)["tokens"] for _ in range(5)]
        resumed = TrainBatches(sources, weights=weights, **self.SETTINGS)
        resumed.set_state(state)
        for batch in expected:
            np.testing.assert_array_equal(next(resumed)["tokens"], batch)

    def test_processes_share_the_same_global_batch(self) -> None:
        sources, weights = [Numbers(0, 5), Numbers(1, 17)], [0.3, 0.7]

        def read(process: int, processes: int) -> TrainBatches:
            place = {"process": process, "processes": processes}
            return TrainBatches(sources, weights=weights, **(self.SETTINGS | place))

        whole, parts = read(0, 1), [read(p, 3) for p in range(3)]
        for _ in range(5):
            np.testing.assert_array_equal(
                next(whole)["tokens"], np.concatenate([next(part)["tokens"] for part in parts])
            )

    def test_processes_must_divide_the_batch(self, windows: Windows) -> None:
        with pytest.raises(DataError, match="4 processes cannot share a batch of 6"):
            TrainBatches([windows], **self.SETTINGS, processes=4)


class TestMixture:
    def test_every_source_has_its_share_at_all_times_and_its_own_rounds(self) -> None:
        sizes, weights = (7, 50, 400), np.array([0.21, 0.29, 0.5])
        batches = TrainBatches(
            [Numbers(i, size) for i, size in enumerate(sizes)], weights=list(weights), batch_size=10, seed=1
        )
        rows = np.concatenate([next(batches)["tokens"] for _ in range(100)])
        for source, size in enumerate(sizes):
            drawn = rows[:, 0] == source
            assert np.all(np.abs(np.cumsum(drawn) - weights[source] * np.arange(1, 1001)) < len(sizes))
            order = rows[drawn, 1]
            for start in range(0, len(order) - size + 1, size):
                np.testing.assert_array_equal(np.sort(order[start : start + size]), np.arange(size))
            assert batches.rounds(100)[source] == pytest.approx(drawn.sum() / size)
        small = rows[rows[:, 0] == 0, 1]
        assert not np.array_equal(small[:7], small[7:14])

    def test_sources_of_one_size_are_not_shuffled_alike(self) -> None:
        batches = TrainBatches([Numbers(0, 64), Numbers(1, 64)], weights=[1, 1], batch_size=128, seed=1)
        rows = next(batches)["tokens"]
        assert not np.array_equal(rows[rows[:, 0] == 0, 1], rows[rows[:, 0] == 1, 1])

    def test_the_order_of_sources_is_grains(self) -> None:
        weights = [300, 100, 250]
        sources = [grain.MapDataset.source(Numbers(i, 10**6)) for i in range(3)]
        mixed = grain.MapDataset.mix(sources, weights)
        shares = Shares(weights)
        for row in range(500):
            assert list(shares.place(row)) == cast(Any, mixed[row])["tokens"].tolist()

    def test_far_rows_are_found_exactly(self) -> None:
        shares = Shares([0.1, 1e-9, 1 - 0.1 - 1e-9])
        for row in (0, 10**9, 10**18):
            source, index = shares.place(row)
            assert shares.taken(row)[source] == index
            assert sum(shares.taken(row)) == row
        assert shares.taken(10**18)[0] == pytest.approx(10**17, rel=1e-12)


class TestValidation:
    def test_batches_spread_over_the_split(self, windows: Windows) -> None:
        batches = validation_batches([windows], batch_size=4, batches=3)
        starts = np.concatenate([batch["tokens"][:, 1] for batch in batches])
        assert len(batches) == 3
        assert (starts[0], starts[-1]) == (1, 231)
        assert len(set(starts)) == 12
        parts = [
            validation_batches([windows], batch_size=4, batches=3, process=p, processes=2) for p in range(2)
        ]
        for whole, *halves in zip(batches, *parts, strict=True):
            np.testing.assert_array_equal(
                whole["tokens"], np.concatenate([half["tokens"] for half in halves])
            )

    def test_a_mixture_is_measured_as_it_is_trained(self) -> None:
        sources = [Numbers(0, 100), Numbers(1, 40)]
        batches = validation_batches(sources, weights=[1, 3], batch_size=8, batches=9)
        rows = np.concatenate([batch["tokens"] for batch in batches])
        assert len(batches) == 6  # the 40 rows of the second source last for 6 and no more
        assert np.bincount(rows[:, 0]).tolist() == [12, 36]
        assert len({tuple(row) for row in rows}) == 48

    def test_a_small_split_gives_fewer_batches(self, windows: Windows) -> None:
        assert len(validation_batches([windows], batch_size=10, batches=9)) == 2
        assert len(validation_batches([windows], batch_size=1, batches=2**32 - 1)) == 24

    def test_a_split_smaller_than_a_batch_is_refused(self, windows: Windows) -> None:
        with pytest.raises(DataError, match="has 24 sequences, but a batch needs 25"):
            validation_batches([windows], batch_size=25, batches=1)
