"""Prose stays readable: few hard phrases and long sentences, short pages, and paths that exist."""

import re
from collections import Counter

import prose
import pytest
from environment import ROOT
from pages import PAGES

WRITTEN = [*(page for page in PAGES if page.name != "CHANGELOG.md"), ROOT / "pallas_kernels" / "README.md"]
MOST_WORDS = 59_000
# The counts reached; lower a bound when you lower its count.
MOST_IN_SOURCES = Counter({"long": 36, "of its own": 2})
_PATH = re.compile(
    r"`((?:zerojax|pallas_kernels|scripts|tests|configs|docs)/[\w./-]+\.(?:py|sh|toml|json|yaml|md))\b"
)
_EXAMPLES = ("zerojax/a/b.py", "tests/a/test_b.py")  # CONTRIBUTING.md says where a module's tests are


def test_pages_have_no_hard_phrases_and_no_long_sentences():
    assert list(prose.findings(WRITTEN)) == []


def test_the_documentation_has_at_most_59_thousand_words():
    texts = (page.read_text(encoding="utf-8") for page in WRITTEN if page.parent == ROOT / "docs")
    assert sum(len(text.split()) for text in texts) <= MOST_WORDS


def test_docstrings_comments_and_messages_have_no_more_of_them_than_before():
    found = prose.counts([ROOT / name for name in prose.SOURCES])
    assert not found - MOST_IN_SOURCES, "python tests/helpers/prose.py zerojax pallas_kernels lists them"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    named = set(_PATH.findall(page.read_text(encoding="utf-8"))) - set(_EXAMPLES)
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_a_finding_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"Losses are those of training. {' '.join(['word'] * 31)}.\n")
    assert prose.counts([page]) == {"those of": 1, "long": 1}
