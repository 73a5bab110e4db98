"""Where text comes from: a source name to documents."""

import glob
import hashlib
import sysconfig
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zerojax.errors import ZeroError

_PIECES = 64
_SNIFF_BYTES = 8192


class DataError(ZeroError):
    """A text source or token file that cannot be used; the message names it and the way out."""


@dataclass(frozen=True)
class Source:
    """The documents of a text source, in a fixed order.

    Attributes:
        root: What the files' names are relative to, so that a split does not depend on where the
            text lies.
        files: Text files, sorted; each is a document, except that a lone file is cut into pieces.
    """

    root: Path
    files: tuple[Path, ...]

    def names(self) -> list[str]:
        """The names of all documents."""
        if len(self.files) == 1:
            return [name for name, _ in _pieces(self.files[0])]
        return [self._name(file) for file in self.files if file.stat().st_size]

    def documents(self, names: Container[str]) -> Iterator[bytes]:
        """The contents of the documents among `names`, in order."""
        if len(self.files) == 1:
            yield from (text for name, text in _pieces(self.files[0]) if name in names)
            return
        yield from (file.read_bytes() for file in self.files if self._name(file) in names)

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


def open_source(source: str, pattern: str = "**/*") -> Source:
    """Find the files behind a source.

    Args:
        source: "stdlib" for the Python standard library's own .py files without its tests; or the
            path of a file or folder; or a glob.
        pattern: which files of a folder to take. Hidden files, and files with a NUL byte (which are
            not text), are never taken.

    Raises:
        DataError: nothing there, or no text in it.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        names = (p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts))
        return _source(root, names, source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _source(path, path.glob(pattern), f"{source}/{pattern}")
    if path.is_file():
        return _source(path.parent, [path], source)
    if names := glob.glob(str(path), recursive=True):
        files = [Path(name) for name in names]
        return _source(_common_folder(files), files, source)
    raise DataError(f"data.source {source!r}: no such file, folder or glob (from {Path.cwd()})")


def held_out(names: Collection[str], fraction: float) -> set[str]:
    """Choose the documents of the validation split.

    The choice goes by a hash of the names alone: it is the same on every machine, and another
    document moves none of the others across.

    Args:
        names: of all documents, each once.
        fraction: of the documents to hold out; at least one is, and at least one is not.

    Raises:
        DataError: fewer than two documents.
    """
    if len(names) < 2:
        raise DataError(f"a validation split needs two documents, and there is {len(names)}")
    ranked = sorted(names, key=lambda name: hashlib.blake2b(name.encode()).digest())
    return set(ranked[: min(max(1, round(fraction * len(names))), len(names) - 1)])


def _source(root: Path, names: Iterable[Path], label: str) -> Source:
    files = [path for path in names if path.is_file() and _is_text(path, root)]
    if not files:
        raise DataError(f"data.source {label!r}: no text file in it")
    if not any(path.stat().st_size for path in files):
        raise DataError(f"data.source {label!r}: all of its {len(files)} text files are empty")
    return Source(root, tuple(sorted(files)))


def _is_text(path: Path, root: Path) -> bool:
    if any(part.startswith(".") for part in path.relative_to(root).parts):
        return False
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(_SNIFF_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _common_folder(files: list[Path]) -> Path:
    parents = [file.parent for file in files]
    candidates = [parents[0], *parents[0].parents]
    return next(c for c in candidates if all(parent.is_relative_to(c) for parent in parents))


def _pieces(file: Path) -> Iterator[tuple[str, bytes]]:
    """Cut a lone file at line ends, so that a part of it can be held out."""
    target = max(1, file.stat().st_size // _PIECES)
    piece: list[bytes] = []
    size = count = 0
    with file.open("rb") as lines:
        for line in lines:
            piece.append(line)
            size += len(line)
            if size >= target:
                yield f"{file.name}#{count}", b"".join(piece)
                piece, size, count = [], 0, count + 1
    if piece:
        yield f"{file.name}#{count}", b"".join(piece)
