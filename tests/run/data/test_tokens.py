"""Splits, tokenizers, token files, and preparing them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from data_files import write_documents

from zerojax.run.config import DataSection, MixtureSource
from zerojax.run.data import prepare as prepare_module
from zerojax.run.data.dataset import is_prepared, open_dataset, perplexity
from zerojax.run.data.formats import DataError
from zerojax.run.data.prepare import prepare
from zerojax.run.data.source import TextSource
from zerojax.run.data.split import rank, validation_limit
from zerojax.run.data.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer
from zerojax.run.data.tokens import TokenFile, TokenWriter, open_tokens
from zerojax.validation.untrusted import dump_checked, load_checked


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty small documents."""
    root = tmp_path / "text"
    root.mkdir()
    for i in range(40):
        (root / f"doc{i}.txt").write_text(f"document {i}: " + "word " * (i + 5) + "\n")
    return root


def documents_of(file: TokenFile) -> list[bytes]:
    """The texts of a file of bytes, by its lengths."""
    assert file.tokens[0] == 0
    parts = np.split(file.tokens[1:].astype(np.uint8), np.cumsum(file.lengths - 1)[:-1])
    assert all(part[-1] == 0 for part in parts)
    return [bytes(part[:-1]) for part in parts]


class TestSplit:
    TEXTS = tuple(f"d{i}".encode() for i in range(2000))

    def held_out(self, texts: Any, fraction: float) -> set[bytes]:
        limit = validation_limit(texts, fraction)
        return {text for text in texts if rank(text) < limit}

    def test_the_fraction_decides_the_size(self) -> None:
        assert 70 <= len(self.held_out(self.TEXTS, 0.05)) <= 130

    def test_more_documents_move_none_across(self) -> None:
        some = self.held_out(self.TEXTS[:300], 0.05)
        assert self.held_out(self.TEXTS[::-1], 0.05) & set(self.TEXTS[:300]) == some

    def test_of_a_handful_there_is_one_on_either_side(self) -> None:
        for fraction in (1e-6, 0.5, 1 - 1e-6):
            for count in (2, 3):
                assert 1 <= len(self.held_out(self.TEXTS[:count], fraction)) < count

    def test_reading_ends_when_both_sides_are_seen(self) -> None:
        texts = iter(self.TEXTS)
        validation_limit(texts, 0.5)
        assert len(list(texts)) > 1900

    @pytest.mark.parametrize("texts", [[], [b"a"], [b"a", b"a"]])
    def test_a_single_document_cannot_be_split(self, texts: list[bytes]) -> None:
        with pytest.raises(DataError, match=r"^here: a validation split needs two different documents"):
            validation_limit(texts, 0.5, "here: ")


class TestTokenizers:
    TEXT = "def f(x):\n    return 'grüße' + x  # 😀\n"

    def test_bytes_decode_to_their_text(self) -> None:
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

    @pytest.mark.parametrize("kind", ["byte", "bpe"])
    def test_a_batch_is_each_text_by_itself(self, kind: str) -> None:
        texts = [self.TEXT[i:].encode() for i in range(12)]
        tokenizer = ByteTokenizer() if kind == "byte" else BPETokenizer.train(texts, 300)
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            np.testing.assert_array_equal(ids, tokenizer.encode(text))

    def test_bpe_knows_every_byte(self) -> None:
        tokenizer = BPETokenizer.train([b"aaa bbb aaa bbb"], 300)
        assert tokenizer.decode(tokenizer.encode("ÿ☃".encode()).tolist()) == "ÿ☃"

    def test_a_tokenizer_that_cuts_and_fills_up_reads_whole_texts(self, tmp_path: Path) -> None:
        path, text = tmp_path / "tokenizer.json", self.TEXT.encode() * 3
        plain = BPETokenizer.train([self.TEXT.encode()], 300)
        plain.save(path)
        saved = tokenizers.Tokenizer.from_file(str(path))
        saved.enable_truncation(5)
        saved.enable_padding(length=500)
        saved.save(str(path))
        whole, again = plain.encode(text), load_tokenizer(path)
        for ids in (
            again.encode(text),
            again.encode_batch([text])[0],
            again.encode_spans([text.decode()])[0][0],
        ):
            np.testing.assert_array_equal(ids, whole)

    def test_ids_with_gaps_are_below_the_size_of_the_vocabulary(self, tmp_path: Path) -> None:
        path = tmp_path / "tokenizer.json"
        BPETokenizer.train([self.TEXT.encode()], 280).save(path)
        values = json.loads(path.read_text())
        vocabulary = values["model"]["vocab"]
        vocabulary["z"] = 70_000
        path.write_text(json.dumps(values))
        tokenizer = load_tokenizer(path)
        assert tokenizer.vocab_size == 70_001
        with TokenWriter(tmp_path / "train.bin", tokenizer) as writer:
            writer.add(tokenizer.encode(b"z"), 1)
        assert open_tokens(tmp_path / "train.bin").tokens.tolist()[1] == 70_000

    @pytest.mark.parametrize("kind", ["byte", "bpe"])
    def test_ids_of_no_token_have_no_text(self, kind: str) -> None:
        tokenizer = ByteTokenizer() if kind == "byte" else BPETokenizer.train([b"aaa"], 300)
        (a,) = tokenizer.encode(b"x").tolist()
        assert tokenizer.decode([a, 5000, a]) == "xx"

    def test_a_damaged_tokenizer_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(DataError, match="not a tokenizer file"):
            load_tokenizer(tmp_path / "tokenizer.json")


class TestTokenFiles:
    @pytest.fixture
    def file(self, tmp_path: Path) -> TokenFile:
        return write_documents(tmp_path, [np.arange(1, 200), np.arange(50)], 256)

    @pytest.mark.parametrize(
        ("vocab_size", "dtype"),
        [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
    )
    def test_written_tokens_are_read_as_the_same(self, tmp_path: Path, vocab_size: int, dtype: str) -> None:
        tokens = np.random.default_rng(0).integers(0, vocab_size, 1000)
        tokens[0] = vocab_size - 1
        for begin, between in ((7, [7]), (8, [7, 8])):
            file = write_documents(tmp_path, [tokens[:300], tokens[300:]], vocab_size, 7, begin)
            assert file.header.dtype == dtype
            assert file.header.tokens == len(file.tokens) == 1002 + len(between)
            assert file.header.text_bytes == 1000
            np.testing.assert_array_equal(file.lengths, [302, 702])
            whole = np.concatenate([[begin], tokens[:300], between, tokens[300:], [7]])
            np.testing.assert_array_equal(file.tokens, whole)
            assert isinstance(file.tokens.base, np.memmap)

    def test_a_truncated_file_is_refused(self, file: TokenFile) -> None:
        for path, size in ((file.path, 252), (file.path.with_suffix(".lengths"), 8)):
            raw = path.read_bytes()
            assert len(raw) == size
            path.write_bytes(raw[:-1])
            with pytest.raises(DataError, match=rf"{path.name}: damaged: {size - 1} bytes"):
                open_tokens(file.path, verify=False)
            path.write_bytes(raw)

    def test_a_flipped_byte_is_found(self, file: TokenFile) -> None:
        for path in (file.path, file.path.with_suffix(".lengths")):
            raw = bytearray(path.read_bytes())
            raw[5] ^= 1
            path.write_bytes(raw)
            with pytest.raises(DataError, match=f"{path.name}: damaged: wrong checksum"):
                open_tokens(file.path)
            raw[5] ^= 1
            path.write_bytes(raw)

    @pytest.mark.parametrize(
        "header",
        ["", "[]", "{}", '{"tokens": "many"}', '{"format": 9, "tokens": 1}', "null", "\udcff", "[" * 9999],
    )
    def test_a_damaged_header_is_refused(self, file: TokenFile, header: str) -> None:
        file.path.with_suffix(".json").write_bytes(header.encode(errors="surrogateescape"))
        with pytest.raises(DataError, match=r"train\.json"):
            open_tokens(file.path)

    @pytest.mark.parametrize(("key", "value"), [("format", 1), ("dtype", "object"), ("tokens", 0)])
    def test_a_header_of_another_version_is_refused(self, file: TokenFile, key: str, value: object) -> None:
        path = file.path.with_suffix(".json")
        path.write_text(dump_checked(load_checked(path.read_text()) | {key: value}))
        with pytest.raises(DataError, match="this version reads"):
            open_tokens(file.path)

    def test_an_error_leaves_no_header(self, tmp_path: Path) -> None:
        def documents() -> Any:
            yield np.arange(3)
            raise DataError("broken")

        with pytest.raises(DataError, match="broken"):
            write_documents(tmp_path, documents())
        assert not (tmp_path / "train.json").exists()


class TestPrepare:
    def test_prepared_bytes_are_those_of_the_files(self, folder: Path, tmp_path: Path) -> None:
        settings = DataSection(source=str(folder), validation=0.2)
        prepare(settings, tmp_path / "data")
        (part,) = open_dataset(settings, tmp_path / "data").parts
        train, validation = documents_of(part.train), documents_of(part.validation)
        assert 2 <= len(validation) <= 16
        assert len(train) + len(validation) == 40
        assert {*train, *validation} == {path.read_bytes() for path in folder.iterdir()}
        assert part.train.header.text_bytes == sum(map(len, train))

    def test_rows_are_split_one_by_one_and_stay_where_they_are(self, tmp_path: Path) -> None:
        def lines(numbers: range) -> str:
            return "".join(json.dumps({"body": f"row {i}"}) + "\n" for i in numbers)

        text = tmp_path / "text"
        text.mkdir()
        (text / "m.jsonl").write_text(lines(range(300)))
        settings = DataSection(source=str(text), column="body", validation=0.1)
        prepare(settings, tmp_path / "one")
        # More files, sorted before and after, and a copy of a file.
        for name, numbers in {"a": range(300, 500), "z": range(500, 600), "n": range(300)}.items():
            (text / f"{name}.jsonl").write_text(lines(numbers))
        prepare(settings, tmp_path / "two")
        (one,) = open_dataset(settings, tmp_path / "one").parts
        (two,) = open_dataset(settings, tmp_path / "two").parts
        first = {f"row {i}".encode() for i in range(300)}
        assert set(documents_of(one.validation)) == set(documents_of(two.validation)) & first
        assert not set(documents_of(two.validation)) & set(documents_of(two.train))
        assert two.train.header.documents + two.validation.header.documents == 900

    def test_bpe_learns_from_the_training_split_only(self, folder: Path, tmp_path: Path) -> None:
        secret = next(text for i in range(99) if rank(text := b"zyxwvut" * (50 + i)) < 2**64 // 10)
        (folder / "secret.txt").write_bytes(secret)
        settings = DataSection(source=str(folder), tokenizer="bpe", vocab_size=400, validation=0.1)
        prepare(settings, tmp_path / "data")
        data = open_dataset(settings, tmp_path / "data")
        assert len(data.tokenizer.encode(b"zyxwvut")) == 7
        header = data.parts[0].train.header
        assert header.text_bytes > header.tokens
        assert header.vocab_size == data.tokenizer.vocab_size

    def test_goes_on_with_what_it_has(self, folder: Path, tmp_path: Path) -> None:
        settings = DataSection(source=str(folder), validation=0.1)
        prepare(settings, tmp_path / "data")
        before = (tmp_path / "data" / "train.bin").read_bytes()
        (folder / "doc1.txt").write_text("changed")
        prepare(settings, tmp_path / "data")
        assert (tmp_path / "data" / "train.bin").read_bytes() == before

    @pytest.mark.parametrize("there", [True, False])
    def test_the_folder_may_be_a_link(self, folder: Path, tmp_path: Path, there: bool) -> None:
        settings, disk = DataSection(source=str(folder), validation=0.1), tmp_path / "disk/tokens"
        if there:
            disk.mkdir(parents=True)
        (tmp_path / "data").symlink_to(disk)
        prepare(settings, tmp_path / "data")
        assert (tmp_path / "data").is_symlink()
        assert is_prepared(disk)
        assert [path.name for path in disk.parent.iterdir()] == ["tokens"]

    def test_other_settings_are_refused(self, folder: Path, tmp_path: Path) -> None:
        prepare(DataSection(source=str(folder), validation=0.1), tmp_path / "data")
        with pytest.raises(DataError, match="was prepared with") as got:
            prepare(DataSection(source=str(folder), validation=0.2, column="body"), tmp_path / "data")
        assert 'with data.column = "text", data.validation = 0.1; this' in str(got.value)
        assert 'wants data.column = "body", data.validation = 0.2: use' in str(got.value)
        assert "{" not in str(got.value)

    def test_a_changed_source_of_a_mixture_is_named(self, folder: Path, tmp_path: Path) -> None:
        first = MixtureSource(str(folder))
        parts = (first, replace(first, pattern="*[0-4].txt"))
        prepare(DataSection(mixture=parts, validation=0.1), tmp_path / "data")
        parts = (first, replace(first, pattern="*", kind="completion"))
        with pytest.raises(DataError, match=r'data\.mixture\[2\]\.pattern = "\*\[0-4\]\.txt"; this') as got:
            prepare(DataSection(mixture=parts, validation=0.1, packing="documents"), tmp_path / "data")
        assert 'data.mixture[2].kind = "completion"' in str(got.value)
        assert "data.mixture[1]" not in str(got.value)

    def test_a_tokenizer_may_move_but_not_change(self, folder: Path, tmp_path: Path) -> None:
        path = tmp_path / "tokenizer.json"
        BPETokenizer.train([b"one two"], 300).save(path)
        settings = DataSection(source=str(folder), tokenizer=str(path), validation=0.1)
        prepare(settings, tmp_path / "data")
        shutil.copytree(tmp_path, tmp_path / "else")
        moved = replace(settings, tokenizer=str(tmp_path / "else/tokenizer.json"))
        prepare(moved, tmp_path / "data")
        BPETokenizer.train([b"three four"], 300).save(tmp_path / "else/tokenizer.json")
        with pytest.raises(DataError, match="was prepared with"):
            prepare(moved, tmp_path / "data")
        with pytest.raises(DataError, match="was prepared with"):
            prepare(replace(settings, tokenizer="byte"), tmp_path / "data")

    def test_a_prepared_folder_is_a_source(self, folder: Path, tmp_path: Path) -> None:
        first = DataSection(source=str(folder), validation=0.1)
        prepare(first, tmp_path / "data")
        second = DataSection(source=str(tmp_path / "data"))
        prepare(second, tmp_path / "other")
        assert not is_prepared(tmp_path / "other")
        data = open_dataset(second, tmp_path / "other")
        assert data.parts[0].train.path == tmp_path / "data" / "train.bin"

    def test_a_mixture_is_prepared_source_by_source(self, folder: Path, tmp_path: Path) -> None:
        rows = "".join(json.dumps({"code": f"print({i})"}) + "\n" for i in range(50))
        (tmp_path / "code.jsonl").write_text(rows)
        mixture = (
            MixtureSource(str(folder), 3.0, pattern="*[0-4].txt"),
            MixtureSource(str(tmp_path / "code.jsonl"), column="code"),
        )
        settings = DataSection(mixture=mixture, tokenizer="bpe", vocab_size=300, validation=0.2)
        prepare(settings, tmp_path / "data")
        data = open_dataset(settings, tmp_path / "data")
        assert data.weights == [3.0, 1.0]
        counts = [part.train.header.documents + part.validation.header.documents for part in data.parts]
        assert counts == [len(list(folder.glob("*[0-4].txt"))), 50]
        assert "(75.0%)" in data.describe()
        # Tokens of a mixture can be mixed again, and are not taken for text.
        parts = tuple(MixtureSource(str(tmp_path / "data" / name)) for name in "01")
        again = DataSection(mixture=parts)
        prepare(again, tmp_path / "other")
        assert open_dataset(again, tmp_path / "other").weights == [1.0, 1.0]
        with pytest.raises(DataError, match="holds the tokens of a mixture"):
            prepare(DataSection(source=str(tmp_path / "data")), tmp_path / "other")
        with pytest.raises(DataError, match="prepare all of them or none"):
            prepare(DataSection(mixture=(parts[0], mixture[1])), tmp_path / "other")
        alone = DataSection(source=mixture[1].source, column="code", tokenizer="bpe", validation=0.2)
        prepare(alone, tmp_path / "alone")
        foreign = DataSection(mixture=(parts[0], MixtureSource(str(tmp_path / "alone"))))
        with pytest.raises(DataError, match=r"alone: .* files of two preparations are mixed"):
            open_dataset(foreign, tmp_path / "other")

    def test_a_nul_is_no_text_for_the_byte_tokenizer(self, tmp_path: Path) -> None:
        rows = ['{"text": "one"}', '{"text": "two"}', '{"text": "a\\u0000b"}']
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(rows))
        with pytest.raises(DataError, match=r"rows\.jsonl:3: a NUL byte"):
            prepare(DataSection(source=str(path), validation=0.5), tmp_path / "data")
        assert not (tmp_path / "data").exists()
        settings = DataSection(source=str(path), tokenizer="bpe", vocab_size=300, validation=0.5)
        prepare(settings, tmp_path / "data")

    def test_long_work_is_reported(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prepare_module, "_PROGRESS_SECONDS", 0.0)
        said: list[str] = []
        prepare(DataSection(source=str(folder), validation=0.1), tmp_path / "data", said.append)
        size = sum(len(d.text) for d in TextSource(str(folder)).documents())
        assert said[-1].startswith(f"preparing {folder}: {size / 1000:.2f} KB of text, 0.0M tokens in 0 s")

    def test_interrupted_preparation_leaves_no_folder(self, folder: Path, tmp_path: Path) -> None:
        settings = DataSection(source=str(folder), tokenizer=str(tmp_path / "none.json"))
        with pytest.raises(DataError, match="an existing file"):
            prepare(settings, tmp_path / "data")
        assert not (tmp_path / "data").exists()

    def test_a_folder_that_cannot_be_written_is_refused(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(DataError, match="cannot write"):
            prepare(DataSection(source=str(folder)), tmp_path / "file" / "data")


def test_the_perplexity_of_a_diverged_model_is_a_number() -> None:
    assert perplexity(1.0) == pytest.approx(2.718281828)
    assert perplexity(5000.0) == pytest.approx(1e9)
