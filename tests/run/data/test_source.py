"""Sources: which files are read, their documents, and the messages about damage."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from environment import ROOT
from pyarrow import parquet

from zerojax.run.data import formats as formats_module
from zerojax.run.data.examples import Texts
from zerojax.run.data.formats import DataError, read_rows
from zerojax.run.data.source import TextSource

TEXTS = [f"document {i}: grüße {'word ' * i}\n" for i in range(50)]
FIXTURES = ROOT / "tests" / "fixtures" / "data"


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


def texts(source: Path | str, pattern: str = "**/*", column: str = "text") -> list[str]:
    return [d.text.decode() for d in TextSource(str(source), pattern, Texts(column)).documents()]


class TestPlainText:
    def test_a_folder_is_read_in_order(self, folder: Path) -> None:
        places = [document.place for document in TextSource(str(folder)).documents()]
        assert len(places) == 40
        assert places == sorted(places)
        assert places[0] == str(folder / "a" / "doc1.txt")

    def test_a_pattern_chooses_files(self, folder: Path) -> None:
        assert texts(folder, "b/*.txt") == [p.read_text() for p in sorted(folder.glob("b/*"))]

    def test_a_glob_equals_its_folder(self, folder: Path) -> None:
        assert texts(folder / "*" / "doc*.txt") == texts(folder)

    @pytest.mark.parametrize("word", ["word ", "ä", "x", "grüße "])
    @pytest.mark.parametrize("count", [40, 9001])
    def test_one_long_line_is_cut_after_spaces_or_between_characters(
        self, tmp_path: Path, word: str, count: int
    ) -> None:
        (tmp_path / "one.txt").write_text(word * count)
        pieces = texts(tmp_path / "one.txt")
        assert "".join(pieces) == word * count
        assert len(pieces) in (range(1, 6) if count == 40 else range(45, 66))
        assert all(piece.endswith(word) for piece in pieces)

    def test_single_file_is_cut_at_line_ends(self, tmp_path: Path) -> None:
        text = "".join(f"line {i}\n" for i in range(1000))
        (tmp_path / "one.txt").write_text(text)
        pieces = texts(tmp_path / "one.txt")
        assert len(pieces) > 20
        assert "".join(pieces) == text
        assert all(piece.endswith("\n") for piece in pieces)

    def test_the_standard_library_comes_without_its_tests(self) -> None:
        places = [file.as_posix() for file in TextSource("stdlib").files]
        assert any(place.endswith("/argparse.py") for place in places)
        assert any(place.endswith("/asyncio/events.py") for place in places)
        assert not [p for p in places if "test" in p.split("/") or "site-packages" in p]

    @pytest.mark.parametrize("pattern", ["**.txt", "/a/*.txt", ""])
    def test_an_invalid_pattern_is_refused(self, folder: Path, pattern: str) -> None:
        with pytest.raises(DataError, match=r"data\.pattern .*; use for instance '\*\*/\*\.txt'"):
            TextSource(str(folder), pattern)

    def test_a_file_is_read_once_though_links_give_it_many_names(self, folder: Path) -> None:
        names = TextSource(str(folder)).files
        (folder / "loop").symlink_to(folder)
        (folder / "itself").symlink_to(folder / "itself")
        assert TextSource(f"{folder}/**").files == names

    @pytest.mark.parametrize("name", ["nothing-here", "nothing/*.txt", "~nothing/a.txt"])
    def test_a_missing_source_is_named(self, name: str) -> None:
        with pytest.raises(DataError, match=r"nothing.*no such file, folder or glob"):
            TextSource(name)

    def test_a_source_without_text_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x.bin").write_bytes(b"\0")
        with pytest.raises(DataError, match="no text file"):
            TextSource(str(tmp_path))

    def test_packed_text_is_refused_with_the_way_out(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt.gz").write_bytes(gzip.compress(b"text", mtime=0))
        with pytest.raises(DataError, match=r"no text file.*; unpack notes\.txt\.gz: only \.jsonl"):
            TextSource(str(tmp_path / "notes.txt.gz"))

    def test_empty_files_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x.txt").touch()
        with pytest.raises(DataError, match="empty"):
            TextSource(str(tmp_path))


def write_lines(path: Path, raw: bytes = b"") -> None:
    rows = [json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(TEXTS)]
    if not raw:
        raw = "\n".join(["", *rows]).encode()
    if path.suffix == ".gz":
        raw = gzip.compress(raw)
    if path.suffix == ".zst":
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as file:
            file.write(raw)
        raw = bytes(sink.getvalue())
    path.write_bytes(raw)


def table(kind: pa.DataType) -> pa.Table:
    return pa.table({"id": range(len(TEXTS)), "text": pa.array(TEXTS, pa.string()).cast(kind)})


def write_parquet(path: Path) -> None:
    parquet.write_table(table(pa.large_string()), path, row_group_size=7)


def write_arrow(path: Path) -> None:
    dictionary = pa.dictionary(pa.int32(), pa.string())
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table(dictionary).schema) as writer:
        writer.write_table(table(dictionary), max_chunksize=7)


def write_stream(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table(pa.string()).schema) as writer:
        writer.write_table(table(pa.string()), max_chunksize=7)


def write_views(path: Path) -> None:  # as of polars
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table(pa.string_view()).schema) as writer:
        writer.write_table(table(pa.string_view()), max_chunksize=7)


WRITERS: dict[str, Callable[[Path], None]] = {
    "rows.jsonl": write_lines,
    "rows.ndjson": write_lines,
    "rows.jsonl.gz": write_lines,
    "rows.JSONL.zst": write_lines,
    "rows.parquet": write_parquet,
    "file.arrow": write_arrow,
    "stream.arrow": write_stream,
    "views.arrow": write_views,
}
TABLES = pytest.mark.parametrize("name", WRITERS)


@TABLES
def test_a_row_is_a_document(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats_module, "_ROWS", 3)
    WRITERS[name](tmp_path / name)
    assert texts(tmp_path / name) == TEXTS
    assert texts(tmp_path) == TEXTS


@TABLES
def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    with pytest.raises(
        DataError,
        match=rf"{name}.*no column 'content' among \['id', 'text'\]: set data.column \(data.prompt_column",
    ):
        texts(tmp_path, column="content")


@TABLES
def test_a_column_of_numbers_is_refused(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}.*column 'id' is int.*not text"):
        texts(tmp_path, column="id")


@TABLES
def test_a_cut_off_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(DataError, match=name):
        texts(path)


@TABLES
def test_a_file_of_noise_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(bytes(range(256)) * 4)
    with pytest.raises(DataError, match=name):
        texts(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "caf\xe9"}', "rows.jsonl:3: not valid UTF-8 at byte 13"),
        (b'{"text": "a"', "rows.jsonl:3: not valid JSON"),
        (b"[" * 100_000, "rows.jsonl:3: not valid JSON"),
        (b'["text"]', "rows.jsonl:3: a list instead of a JSON object"),
        (b'{"text": null}', "rows.jsonl:3: column 'text' is null, not text"),
        (b'{"text": "\\ud800"}', "rows.jsonl:3: not valid Unicode: half of a surrogate pair at character 0"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    write_lines(tmp_path / "rows.jsonl", b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        texts(tmp_path)


def test_a_huge_line_in_a_small_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats_module, "MAX_LINE_BYTES", 1 << 20)
    write_lines(tmp_path / "rows.jsonl.gz", b'{"text": "' + b"a" * (1 << 21) + b'"}')
    with pytest.raises(DataError, match=r"rows.jsonl.gz:1: a line of more than 1 MiB"):
        texts(tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_null_and_a_damaged_text_in_a_column_are_named(tmp_path: Path, suffix: str) -> None:
    def write(values: pa.Array) -> None:
        rows = pa.table({"text": values})
        if suffix == "parquet":
            parquet.write_table(rows, tmp_path / "rows.parquet")
        else:
            path = str(tmp_path / "rows.arrow")
            with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
                writer.write_table(rows)

    write(pa.array(["a", "b", None, "c"]))
    with pytest.raises(DataError, match=rf"rows.{suffix} row 2: column 'text' is null, not text"):
        texts(tmp_path)
    write(pa.array([b"a", b"caf\xe9", b"c"]).view(pa.string()))
    with pytest.raises(DataError, match=rf"rows.{suffix} rows 0 to 2: a value is damaged: .*UTF8.* index 1"):
        texts(tmp_path)


class TestSavedDatasets:
    """Folders written by Hugging Face `datasets` 5.2; fixtures/README.md says how."""

    def test_a_saved_dataset_is_its_arrow_files(self, tmp_path: Path) -> None:
        saved = tmp_path / "saved"
        shutil.copytree(FIXTURES / "saved_dataset", saved)
        shutil.copy(saved / "data-00000-of-00003.arrow", saved / "cache-1234.arrow")
        assert texts(saved) == [f"row {i} grüße" for i in range(20)]

    def test_of_a_dictionary_of_splits_one_must_be_named(self) -> None:
        with pytest.raises(DataError, match=r"splits \['test', 'train'\]: name one"):
            texts(FIXTURES / "saved_splits")
        assert texts(FIXTURES / "saved_splits" / "test") == [f"row {i} grüße" for i in range(15, 20)]

    @pytest.mark.parametrize(
        "state",
        [
            "{",
            "[]",
            '{"_data_files": [{"filename": "../../etc/passwd"}]}',
            '{"_data_files": [{"filename": "/etc/passwd"}]}',
            '{"_data_files": []}',
            '{"_data_files": [{}]}',
        ],
    )
    def test_no_path_in_it_is_followed(self, tmp_path: Path, state: str) -> None:
        (tmp_path / "state.json").write_text(state)
        with pytest.raises(DataError, match=r"state\.json: (not a file that|expected the names)"):
            texts(tmp_path)


def test_a_column_whose_name_is_not_utf8_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, pa.schema({"name": pa.string()})) as writer,
    ):
        writer.write(pa.record_batch({"name": ["a"]}))
    path.write_bytes(path.read_bytes().replace(b"name", b"n\xe4me"))
    with pytest.raises(DataError, match=r"a.arrow: damaged: 'utf-8' codec"):
        list(read_rows(path, ["name"]))


def test_a_time_that_python_does_not_have_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"time": pa.array([1, 2**44], pa.timestamp("s"))}), path)
    with pytest.raises(DataError, match=r"a.parquet rows 0 to 1: a value is damaged: date value out of"):
        list(read_rows(path, ["time"]))
