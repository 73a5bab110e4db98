"""The page of errors by their text: zerojax has each of them."""

import ast
import functools
import re

import pytest
from environment import ROOT

TEXTS = re.findall(r"^\| `([^|]+?)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
# Of the system and of XLA.
OTHERS = ("No space left on device", "RESOURCE_EXHAUSTED: Out of memory")


@functools.cache
def messages() -> str:
    """All texts of the package, a line each, with "..." for values."""
    found = list[str]()
    for file in (ROOT / "zerojax").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(" ".join(text.split()) for text in found)


@pytest.mark.parametrize("text", [text for text in TEXTS if text not in OTHERS])
def test_the_package_has_a_message_of_this_text(text: str):
    pieces = [piece.strip() for piece in text.split("...") if piece.strip()]
    pattern = ".*".join(map(re.escape, pieces))
    assert re.search(f"^.*{pattern}", messages(), re.MULTILINE), text


def test_the_rows_are_found():
    assert len(TEXTS) > 30
    assert set(OTHERS) < set(TEXTS)
