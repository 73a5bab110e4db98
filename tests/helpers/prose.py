"""The product's sentences in docstrings, comments, messages and pages, and the habits that make them hard.

``python tests/helpers/prose.py [PATH...]`` prints each finding with its place, then the counts.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pages import PAGES, ROOT

SOURCES = ("zerojax", "pallas_kernels")

PHRASES = ("those of", "that of", "of which", "of what", "but for", "anew", "of its own")
"""Phrases that leave out a noun, hide the main point in a relative clause, or are old idiom."""

LONGEST = 30
"""Words of a sentence that is read once."""

_PHRASE = re.compile(rf"\b({'|'.join(PHRASES)})\b", re.IGNORECASE)
_FENCE = re.compile(r"^ *```.*?^ *```$|^<!--.*?-->$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"``.*?``|`.*?`|https?://\S+", re.DOTALL)
_LINK = re.compile(r"!?\[(.*?)\]\([^)]*\)", re.DOTALL)
# A list's item, a table's row, a heading and an attribute's entry each end the sentence before.
_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.|\w+(?:, \w+)*: ))|(?<=[.?!])\s+(?=[A-Z`*(])|\|")
_COLON = re.compile(r":\s*\n")


@dataclass(frozen=True)
class Text:
    """A piece of prose, and the file and line where it begins."""

    path: Path
    line: int
    text: str

    def sentences(self) -> Iterator[str]:
        """Its sentences; code counts as one word."""
        plain = _COLON.sub(":\n\n", _CODE.sub("Code", _LINK.sub(r"\1", self.text)))
        yield from (s for s in (" ".join(part.split()) for part in _BLOCK.split(plain)) if s)


def texts_of_source(path: Path) -> Iterator[Text]:
    """Docstrings, comments and messages of a Python file. A message is any other string of four words."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(value)) if len(value.split()) >= 4:
                yield Text(path, node.lineno, value)
            case ast.JoinedStr(values=values):
                joined = "".join(str(v.value) if isinstance(v, ast.Constant) else "it" for v in values)
                if len(joined.split()) >= 4:
                    yield Text(path, node.lineno, joined)
                for value in values:  # counted once, with the whole
                    if isinstance(value, ast.Constant):
                        value.value = ""
    comment, begun, last = [], 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1 and comment:
            yield Text(path, begun, "\n".join(comment))
            comment = []
        begun, last = (begun if comment else token.start[0]), token.start[0]
        comment.append(token.string.lstrip("# "))
    if comment:
        yield Text(path, begun, "\n".join(comment))


def texts_of_page(path: Path) -> Iterator[Text]:
    """The paragraphs, items and cells of a Markdown page, without its code."""
    text = _FENCE.sub(lambda m: "\n" * m[0].count("\n"), path.read_text(encoding="utf-8"))
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        if paragraph.strip():
            yield Text(path, line, paragraph)
        line += paragraph.count("\n")


def texts(paths: list[Path]) -> Iterator[Text]:
    """All prose of files and folders."""
    for path in paths:
        found = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in found:
            yield from texts_of_page(file) if file.suffix == ".md" else texts_of_source(file)


def product() -> list[Path]:
    """What users and developers read: the packages, the pages, README and CONTRIBUTING."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    return [*(ROOT / name for name in SOURCES), *pages]


def findings(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """(kind, place and sentence) of every hard phrase and every sentence of more than ``LONGEST`` words."""
    for text in texts(paths):
        at = f"{text.path}:{text.line}"
        for sentence in text.sentences():
            for match in _PHRASE.finditer(sentence):
                yield match[1].lower(), f"{at}: {sentence}"
            if len(sentence.split()) > LONGEST:
                yield "long", f"{at}: {sentence}"


def counts(paths: list[Path]) -> Counter[str]:
    """How often each kind of finding occurs."""
    return Counter(kind for kind, _ in findings(paths))


def main() -> None:
    """Print the findings of the paths given, or of the whole product."""
    paths = [Path(given) for given in sys.argv[1:]] or product()
    for kind, where in findings(paths):
        print(f"{kind:12} {where}")
    print(dict(counts(paths)))


if __name__ == "__main__":
    main()
