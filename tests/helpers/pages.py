"""The documentation's code blocks, and how each is meant to be run.

A fence of `sh`, `python` or `toml` is run by the tests unless a comment before it says why not:

    <!-- not run: needs a GPU -->
"""

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from environment import ROOT

PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])

RUN = ("sh", "python", "toml")
SHOWN = ("text", "html")  # what a command printed, what a file looks like
REASONS = (
    "needs a GPU",
    "needs a cluster",
    "needs PyTorch",
    "needs vLLM",
    "needs root",
    "needs a downloaded model",
    "sets up a machine",  # the tests' own first step
    "takes minutes",
    "a fragment",  # of a program that stands elsewhere, and is run there
)

_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^>]*?) -->\n)?"
    r"(?P<indent> *)```(?P<kind>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class CodeBlock:
    """A fence of a page: where it stands, what it holds, and why it is not run, if it is not."""

    page: Path
    line: int
    kind: str
    code: str
    reason: str | None

    def __str__(self) -> str:
        """Where to look."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[CodeBlock]:
    """All fences of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        CodeBlock(page, text.count("\n", 0, m.start()) + 1, m["kind"].strip(), dedent(m["code"]), m["reason"])
        for m in _FENCE.finditer(text)
    ]
