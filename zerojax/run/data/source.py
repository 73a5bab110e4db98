"""Text sources: finds the files of a source, and reads their documents."""

import glob
import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from zerojax.errors import file_errors
from zerojax.run.data.examples import Examples, Texts
from zerojax.run.data.formats import DataError, Document, cut_document, is_table, user_path
from zerojax.validation.untrusted import parse_json

_SNIFF_BYTES = 8192
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz")
# Written by ``datasets.save_to_disk`` beside the Arrow files.
_SAVED_DATASET = "state.json"
_SAVED_SPLITS = "dataset_dict.json"


class TextSource:
    """The files of a text source, in a fixed order.

    Args:
        source: "stdlib" for the .py files of Python's standard library without its tests; or the path of a
            file or folder; or a glob. A folder saved by ``datasets`` is read as that dataset.
        pattern: which files of a folder to read. Hidden files are never read, nor files with a NUL byte that
            are not tables.
        examples: how its files become documents; by default texts, in the column "text" of tables.

    Attributes:
        files: the files, sorted.
    """

    def __init__(self, source: str, pattern: str = "**/*", examples: Examples | None = None) -> None:
        self.files = _find_files(source, pattern)
        self.examples = examples or Texts()

    def documents(self) -> Iterator[Document]:
        """The documents with something to learn, in order; errors as for ``rows``."""
        return (document for document in self.rows() if document.targets != ())

    def rows(self) -> Iterator[Document]:
        """All documents, in order; a single file of plain text is cut into about 64."""
        if len(self.files) == 1 and not (self.examples.masked or is_table(self.files[0])):
            return cut_document(self.files[0])
        return itertools.chain.from_iterable(map(self.examples.read, self.files))


def check_source_exists(source: str, pattern: str | None) -> None:
    """Check that a source exists, without reading it. The tokens of an earlier run are a source, too.

    Raises:
        DataError: it does not, or has no file that fits ``pattern`` ("**/*" if that is None).
    """
    if source != "stdlib" and not user_path(source).exists():
        _find_files(source, pattern or "**/*")


def _find_files(source: str, pattern: str) -> tuple[Path, ...]:
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        files = (p for p in root.rglob("*.py") if not excluded & set(p.relative_to(root).parts))
        return _texts_among(files, root, source)
    path = user_path(source)
    if path.is_dir():
        if (path / _SAVED_SPLITS).is_file():
            splits = sorted(child.name for child in path.iterdir() if (child / _SAVED_DATASET).is_file())
            raise DataError(f"data.source {source!r} holds the splits {splits}: name one, as {path}/SPLIT")
        if (path / _SAVED_DATASET).is_file():
            return _saved_files(path)
        try:
            files = list(path.glob(pattern))
        except (ValueError, NotImplementedError) as error:
            raise DataError(f"data.pattern {pattern!r}: {error}; use for instance '**/*.txt'") from error
        return _texts_among(files, path, f"{source}/{pattern}")
    if path.is_file():
        return _texts_among([path], path.parent, source)
    if names := glob.glob(str(path), recursive=True):
        # If a folder links to a folder around it, a file has one more name for every time the link is
        # followed.
        own = {os.path.realpath(name): Path(name) for name in sorted(names, key=len, reverse=True)}
        folder = Path(os.path.commonpath([file.parent for file in own.values()]))
        return _texts_among(own.values(), folder, source)
    raise DataError(f"data.source {source!r}: no such file, folder or glob (from {Path.cwd()})")


def _texts_among(paths: Iterable[Path], root: Path, label: str) -> tuple[Path, ...]:
    """The files of text or tables, sorted, without files that are hidden below ``root``."""
    there = [path for path in paths if path.is_file()]
    files = [path for path in there if _is_taken(path, root)]
    if not files:
        packed = next((path for path in there if path.suffix.lower() in _PACKED), None)
        raise DataError(
            f"data.source {label!r}: no text file in it (hidden files, and those with NUL bytes, as "
            "UTF-16 has them, are skipped)"
            + (f"; unpack {packed.name}: only .jsonl and .ndjson are read with .gz or .zst" if packed else "")
        )
    if not any(path.stat().st_size for path in files):
        raise DataError(f"data.source {label!r}: all of its {len(files)} text files are empty")
    return tuple(sorted(files))


def _is_taken(path: Path, root: Path) -> bool:
    if any(part.startswith(".") for part in path.relative_to(root).parts):
        return False
    if is_table(path):
        return True
    with file_errors(path, DataError), path.open("rb") as file:
        return b"\0" not in file.read(_SNIFF_BYTES)


def _saved_files(folder: Path) -> tuple[Path, ...]:
    """The Arrow files of a saved dataset; other Arrow files beside them are caches."""
    path = folder / _SAVED_DATASET
    with file_errors(path, DataError, content="not a file that `datasets` has saved"):
        names = [entry["filename"] for entry in parse_json(path.read_text(encoding="utf-8"))["_data_files"]]
        outside = [name for name in names if Path(name).name != name]
    if outside or not names:
        raise DataError(f"{path}: expected the names of files in this folder, found {outside or 'none'}")
    return tuple(folder / name for name in names)
