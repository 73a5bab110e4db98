"""Sources, tokenizers, token files and batches."""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from zerojax.checked_json import dump_checked, load_checked
from zerojax.config import DataSection
from zerojax.data import (
    BPETokenizer,
    ByteTokenizer,
    DataError,
    TokenFile,
    TrainBatches,
    Windows,
    held_out,
    is_prepared,
    load_tokenizer,
    open_dataset,
    open_source,
    open_tokens,
    prepare,
    validation_batches,
    write_tokens,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty small documents in two folders, a hidden file, a binary one and an empty one."""
    root = tmp_path / "text"
    for i in range(40):
        path = root / ("a" if i % 2 else "b") / f"doc{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {i}: " + "word " * (i + 5) + "\n")
    (root / ".hidden.txt").write_text("never")
    (root / "picture.bin").write_bytes(b"ab\0cd")
    (root / "empty.txt").write_text("")
    return root


def token_file(tmp_path: Path, tokens: np.ndarray, vocab_size: int = 256) -> TokenFile:
    path = tmp_path / "train.bin"
    write_tokens(path, [(tokens.astype(np.uint32), len(tokens))], vocab_size)
    return open_tokens(path)


class TestSource:
    def test_folder_takes_text_in_order(self, folder: Path) -> None:
        names = open_source(str(folder)).names()
        assert len(names) == 40
        assert names == sorted(names)
        assert names[0] == "a/doc1.txt"

    def test_pattern(self, folder: Path) -> None:
        assert all(n.startswith("b/") for n in open_source(str(folder), "b/*.txt").names())

    def test_glob_equals_folder(self, folder: Path) -> None:
        by_glob = open_source(str(folder / "*" / "doc*.txt"))
        assert by_glob.names() == open_source(str(folder)).names()

    def test_single_file_is_cut_at_line_ends(self, tmp_path: Path) -> None:
        text = "".join(f"line {i}\n" for i in range(1000))
        (tmp_path / "one.txt").write_text(text)
        source = open_source(str(tmp_path / "one.txt"))
        names = source.names()
        pieces = list(source.documents(set(names)))
        assert len(names) > 20
        assert b"".join(pieces).decode() == text
        assert all(piece.endswith(b"\n") for piece in pieces)

    def test_standard_library(self) -> None:
        names = open_source("stdlib").names()
        assert "argparse.py" in names
        assert "asyncio/events.py" in names
        assert not [n for n in names if "test" in n.split("/") or "site-packages" in n]

    @pytest.mark.parametrize("name", ["nothing-here", "nothing/*.txt"])
    def test_missing(self, name: str) -> None:
        with pytest.raises(DataError, match=r"nothing.*no such file, folder or glob"):
            open_source(name)

    def test_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "x.bin").write_bytes(b"\0")
        with pytest.raises(DataError, match="no text file"):
            open_source(str(tmp_path))

    def test_empty(self, tmp_path: Path) -> None:
        (tmp_path / "x.txt").touch()
        with pytest.raises(DataError, match="empty"):
            open_source(str(tmp_path))


class TestSplit:
    def test_size_and_stability(self) -> None:
        names = [f"d{i}" for i in range(200)]
        chosen = held_out(names, 0.05)
        assert len(chosen) == 10
        assert held_out(names[::-1], 0.05) == chosen
        # One more document changes the choice by at most the documents that the fraction adds.
        assert len(held_out([*names, "more"], 0.05) ^ chosen) <= 2

    def test_never_empty_never_all(self) -> None:
        assert len(held_out(["a", "b"], 0.001)) == 1
        assert len(held_out(["a", "b"], 0.999)) == 1

    def test_one_document(self) -> None:
        with pytest.raises(DataError, match="two documents"):
            held_out(["a"], 0.5)


class TestTokenizers:
    TEXT = "def f(x):\n    return 'grüße' + x  # 😀\n"

    def test_bytes_round_trip(self) -> None:
        tokenizer = ByteTokenizer()
        ids = tokenizer.encode(self.TEXT.encode())
        assert ids.max() < tokenizer.vocab_size
        assert tokenizer.end_of_text not in ids
        assert tokenizer.decode(ids.tolist()) == self.TEXT

    def test_bpe_round_trip_and_storage(self, tmp_path: Path) -> None:
        tokenizer = BPETokenizer.train([self.TEXT.encode()] * 20, 300)
        ids = tokenizer.encode(self.TEXT.encode())
        assert len(ids) < len(self.TEXT.encode())
        assert tokenizer.decode(ids.tolist()) == self.TEXT
        tokenizer.save(tmp_path / "tokenizer.json")
        again = load_tokenizer(tmp_path / "tokenizer.json")
        assert again.vocab_size == tokenizer.vocab_size
        np.testing.assert_array_equal(again.encode(self.TEXT.encode()), ids)

    def test_bpe_knows_every_byte(self) -> None:
        tokenizer = BPETokenizer.train([b"aaa bbb aaa bbb"], 300)
        assert tokenizer.decode(tokenizer.encode("ÿ☃".encode()).tolist()) == "ÿ☃"

    def test_damaged_file(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(DataError, match="not a tokenizer file"):
            load_tokenizer(tmp_path / "tokenizer.json")


class TestTokenFiles:
    @pytest.mark.parametrize(
        ("vocab_size", "dtype"),
        [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
    )
    def test_round_trip(self, tmp_path: Path, vocab_size: int, dtype: str) -> None:
        tokens = np.random.default_rng(0).integers(0, vocab_size, 1000)
        tokens[0] = vocab_size - 1
        file = token_file(tmp_path, tokens, vocab_size)
        assert file.header.dtype == dtype
        np.testing.assert_array_equal(file.tokens, tokens)
        assert isinstance(file.tokens, np.memmap)

    def test_truncated(self, tmp_path: Path) -> None:
        file = token_file(tmp_path, np.arange(200))
        file.path.write_bytes(file.path.read_bytes()[:-1])
        with pytest.raises(DataError, match=r"train\.bin: damaged: 199 bytes"):
            open_tokens(file.path, verify=False)

    def test_flipped_byte(self, tmp_path: Path) -> None:
        file = token_file(tmp_path, np.arange(200))
        raw = bytearray(file.path.read_bytes())
        raw[77] ^= 1
        file.path.write_bytes(raw)
        with pytest.raises(DataError, match="wrong checksum"):
            open_tokens(file.path)

    @pytest.mark.parametrize(
        "header",
        ["", "[]", "{}", '{"tokens": "many"}', '{"format": 9, "tokens": 1}', "null", "\udcff"],
    )
    def test_bad_header(self, tmp_path: Path, header: str) -> None:
        file = token_file(tmp_path, np.arange(200))
        file.path.with_suffix(".json").write_bytes(header.encode(errors="surrogateescape"))
        with pytest.raises(DataError, match=r"train\.json"):
            open_tokens(file.path)

    @pytest.mark.parametrize(("key", "value"), [("format", 2), ("dtype", "object"), ("tokens", 0)])
    def test_foreign_header(self, tmp_path: Path, key: str, value: object) -> None:
        file = token_file(tmp_path, np.arange(200))
        path = file.path.with_suffix(".json")
        path.write_text(dump_checked(load_checked(path.read_text()) | {key: value}))
        with pytest.raises(DataError, match="this version reads"):
            open_tokens(file.path)


class TestPrepare:
    def test_bytes(self, folder: Path, tmp_path: Path) -> None:
        settings = DataSection(source=str(folder), validation=0.1)
        prepare(settings, tmp_path / "data")
        data = open_dataset(settings, tmp_path / "data")
        assert (data.train.header.documents, data.validation.header.documents) == (36, 4)
        tokens = np.concatenate([data.train.tokens, data.validation.tokens])
        documents = set(bytes(tokens).split(b"\0")[:-1])
        assert documents == {path.read_bytes() for path in folder.glob("*/doc*.txt")}

    def test_bpe_learns_from_the_training_split_only(self, folder: Path, tmp_path: Path) -> None:
        secret = "zyxwvut" * 50
        names = open_source(str(folder)).names()
        (folder / next(iter(held_out(names, 0.1)))).write_text(secret)
        settings = DataSection(source=str(folder), tokenizer="bpe", vocab_size=400, validation=0.1)
        prepare(settings, tmp_path / "data")
        data = open_dataset(settings, tmp_path / "data")
        assert len(data.tokenizer.encode(b"zyxwvut")) == 7
        assert data.train.header.text_bytes > data.train.header.tokens
        assert data.train.header.vocab_size == data.tokenizer.vocab_size

    def test_goes_on_with_what_it_has(self, folder: Path, tmp_path: Path) -> None:
        settings = DataSection(source=str(folder), validation=0.1)
        prepare(settings, tmp_path / "data")
        before = (tmp_path / "data" / "train.bin").read_bytes()
        (folder / "a" / "doc1.txt").write_text("changed")
        prepare(settings, tmp_path / "data")
        assert (tmp_path / "data" / "train.bin").read_bytes() == before

    def test_other_settings_are_refused(self, folder: Path, tmp_path: Path) -> None:
        prepare(DataSection(source=str(folder), validation=0.1), tmp_path / "data")
        with pytest.raises(DataError, match="was prepared with"):
            prepare(DataSection(source=str(folder), validation=0.2), tmp_path / "data")

    def test_a_prepared_folder_is_a_source(self, folder: Path, tmp_path: Path) -> None:
        first = DataSection(source=str(folder), validation=0.1)
        prepare(first, tmp_path / "data")
        second = DataSection(source=str(tmp_path / "data"))
        prepare(second, tmp_path / "other")
        assert not is_prepared(tmp_path / "other")
        data = open_dataset(second, tmp_path / "other")
        assert data.train.path == tmp_path / "data" / "train.bin"

    def test_interrupted_preparation_leaves_no_folder(self, folder: Path, tmp_path: Path) -> None:
        settings = DataSection(source=str(folder), tokenizer=str(tmp_path / "none.json"))
        with pytest.raises(DataError, match="an existing file"):
            prepare(settings, tmp_path / "data")
        assert not (tmp_path / "data").exists()

    def test_unwritable(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(DataError, match="cannot write"):
            prepare(DataSection(source=str(folder)), tmp_path / "file" / "data")


class TestBatches:
    SETTINGS: ClassVar[dict[str, int]] = {"batch_size": 6, "length": 10, "seed": 3}

    @pytest.fixture
    def file(self, tmp_path: Path) -> TokenFile:
        return token_file(tmp_path, np.arange(10 * 24 + 1), 1000)

    def test_windows_overlap_by_one_token(self, file: TokenFile) -> None:
        windows = Windows(file, 10)
        assert len(windows) == 24
        np.testing.assert_array_equal(windows[2], np.arange(20, 31))
        assert windows[0].dtype == np.int32

    def test_too_short(self, file: TokenFile) -> None:
        with pytest.raises(DataError, match=r"241 tokens are too few for one sequence of 241"):
            Windows(file, 241)

    def test_each_window_once_an_epoch_in_a_new_order(self, file: TokenFile) -> None:
        batches = TrainBatches(file, **self.SETTINGS)
        first, second = (np.concatenate([next(batches)["tokens"][:, 0] for _ in range(4)]) for _ in range(2))
        for epoch in (first, second):
            np.testing.assert_array_equal(np.sort(epoch), np.arange(24) * 10)
        assert not np.array_equal(first, second)

    def test_seed_decides_the_order(self, file: TokenFile) -> None:
        one, same = (next(TrainBatches(file, **self.SETTINGS))["tokens"] for _ in range(2))
        other = next(TrainBatches(file, **(self.SETTINGS | {"seed": 4})))["tokens"]
        np.testing.assert_array_equal(one, same)
        assert not np.array_equal(one, other)

    @pytest.mark.parametrize("step", [0, 1, 4, 7])
    def test_position_resumes_exactly(self, file: TokenFile, step: int) -> None:
        batches = TrainBatches(file, **self.SETTINGS)
        for _ in range(step):
            next(batches)
        state = json.loads(json.dumps(batches.get_state()))
        expected = [next(batches)["tokens"] for _ in range(5)]
        resumed = TrainBatches(file, **self.SETTINGS)
        resumed.set_state(state)
        for batch in expected:
            np.testing.assert_array_equal(next(resumed)["tokens"], batch)

    def test_processes_share_the_same_global_batch(self, file: TokenFile) -> None:
        whole = TrainBatches(file, **self.SETTINGS)
        parts = [TrainBatches(file, **self.SETTINGS, process=p, processes=3) for p in range(3)]
        for _ in range(5):
            np.testing.assert_array_equal(
                next(whole)["tokens"], np.concatenate([next(part)["tokens"] for part in parts])
            )

    def test_processes_must_divide_the_batch(self, file: TokenFile) -> None:
        with pytest.raises(DataError, match="4 processes cannot share a batch of 6"):
            TrainBatches(file, **self.SETTINGS, processes=4)

    def test_validation_spreads_over_the_split(self, file: TokenFile) -> None:
        batches = validation_batches(file, batch_size=4, length=10, batches=3)
        starts = np.concatenate([batch["tokens"][:, 0] for batch in batches])
        assert len(batches) == 3
        assert (starts[0], starts[-1]) == (0, 230)
        assert len(set(starts)) == 12
        parts = [
            validation_batches(file, batch_size=4, length=10, batches=3, process=p, processes=2)
            for p in range(2)
        ]
        for whole, *halves in zip(batches, *parts, strict=True):
            np.testing.assert_array_equal(
                whole["tokens"], np.concatenate([half["tokens"] for half in halves])
            )

    def test_validation_takes_what_there_is(self, file: TokenFile) -> None:
        assert len(validation_batches(file, batch_size=10, length=10, batches=9)) == 2

    def test_validation_too_small(self, file: TokenFile) -> None:
        with pytest.raises(DataError, match="24 sequences of 10 tokens, and a batch takes 25"):
            validation_batches(file, batch_size=25, length=10, batches=1)
