#!/usr/bin/env python3
"""Collect text to train on from the files of this machine: source code, headers and documentation.

    scripts/bench/machine_text.py text.jsonl --kinds Python --megabytes 150

Every machine that can train a model has the sources of its Python packages, the headers of its C and C++
libraries, and their documentation. Files are taken in the order of a hash of their paths, so that a limit on
the size cuts all kinds alike and the same machine gives the same text again.
"""

import hashlib
import json
import os
import string
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import batched
from pathlib import Path
from typing import Any, Literal

import harness

Kind = Literal["Python", "C and C++", "documentation"]
KINDS: dict[Kind, tuple[str, ...]] = {
    "Python": (".py", ".pyi"),
    "C and C++": (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hh", ".hpp", ".inl"),
    "documentation": (".md", ".rst", ".txt"),
}
KIND_OF = {suffix: kind for kind, suffixes in KINDS.items() for suffix in suffixes}
MIN_BYTES, MAX_BYTES = 256, 1 << 20
"""Bytes of a document; larger files are mostly tables or generated."""

MAX_LINE_LENGTH = 1000
MIN_LETTERS = 0.6
"""Least fraction of ASCII letters and white space in a document; tables of numbers have less."""

_LETTERS = (string.ascii_letters + string.whitespace).encode()
_TELLING_LINE = 16
_THREADS = 32
_BATCH = 2048


def default_roots() -> list[Path]:
    """The folders of such files: the running Python's library and packages, and /usr."""
    own = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    return [*own, Path("/usr/include"), Path("/usr/local"), Path("/usr/share")]


def collect(
    path: Path, roots: Iterable[Path], megabytes: float, kinds: Iterable[Kind] = tuple(KINDS)
) -> dict[str, Any]:
    """Write documents as JSON lines, ``{"text": ...}``, up to a number of megabytes.

    A document is left out if another has the same text, or if more than half of its lines (of at least 16
    characters without indentation) occur in earlier documents, as in edited copies and licences.

    Args:
        path: of the file, which appears when it is complete.
        roots: folders to search; links to folders are not followed.
        megabytes: of text, 10^6 bytes each.
        kinds: of text to take.

    Returns:
        A description of the text: documents, bytes, bytes of each kind, SHA-256 in the order of the file, and
        the number of duplicates left out.
    """
    seen: set[bytes] = set()
    lines: set[int] = set()
    found: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    total = hashlib.sha256()
    draft = path.with_name(path.name + ".unfinished")
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft.open("w", encoding="utf-8") as out:
        for file, text in _texts(_files(roots, kinds)):
            raw = text.encode()
            digest = hashlib.blake2b(raw, digest_size=16).digest()
            if digest in seen:
                found["duplicates"] += 1
                continue
            seen.add(digest)
            own = {hash(line) for each in text.splitlines() if len(line := each.strip()) >= _TELLING_LINE}
            if len(own & lines) > len(own) / 2:
                found["near_duplicates"] += 1
                continue
            lines |= own
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            total.update(raw)
            sizes[KIND_OF[file.suffix]] += len(raw)
            found["documents"] += 1
            if sizes.total() >= megabytes * 1e6:
                break
    draft.rename(path)
    return {"bytes": sizes.total(), "sha256": total.hexdigest(), "kinds": dict(sizes), **found}


def _files(roots: Iterable[Path], kinds: Iterable[Kind]) -> list[Path]:
    """The files of some kinds, in the order of their paths' hashes."""
    suffixes = {suffix for kind in kinds for suffix in KINDS[kind]}
    files = {
        Path(folder, name)
        for root in roots
        for folder, _, names in os.walk(root)
        for name in names
        if os.path.splitext(name)[1] in suffixes
    }
    return sorted(files, key=lambda file: hashlib.blake2b(os.fsencode(file), digest_size=8).digest())


def _texts(files: list[Path]) -> Iterator[tuple[Path, str]]:
    """The texts of the files that hold any, read concurrently, a few at a time."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for some in batched(files, _BATCH):
            for file, text in zip(some, pool.map(_read, some), strict=True):
                if text is not None:
                    yield file, text


def _read(file: Path) -> str | None:
    """A file's text, or None if it holds none to train on."""
    try:
        if not MIN_BYTES <= file.stat().st_size <= MAX_BYTES:
            return None
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if "\0" in text or max(map(len, text.splitlines()), default=0) > MAX_LINE_LENGTH:
        return None
    raw = text.encode()
    return text if len(raw.translate(None, _LETTERS)) <= (1 - MIN_LETTERS) * len(raw) else None


def main() -> None:
    """Write the text and print its description."""
    parser = harness.parser(__doc__)
    parser.add_argument("out", type=Path, help="JSON lines to write")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--megabytes", type=float, default=300)
    options = parser.parse_args()
    print(json.dumps(collect(options.out, default_roots(), options.megabytes, options.kinds)))


if __name__ == "__main__":
    main()
