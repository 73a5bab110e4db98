"""Numbers and tables for people: on a narrow terminal, and as HTML."""

import pytest
from rich.console import Group
from rich.table import Table

from zerojax.formatting import html, numeric, plain_text


def table() -> Table:
    made = Table("unit", *numeric("copies", "elements"), "format of the gather", title="Units <of> a model")
    made.add_row("blocks", "12", "1,024", "", end_section=True)
    made.add_row("  attention/kernel", "", "1,000", "int8, over the nodes of the cluster")
    made.caption = "(no totals)"
    return made


STACKED = """\
before
Units <of> a model
blocks
    copies 12 | elements 1,024

  attention/kernel
      elements 1,000 | format of the gather int8,
      over the nodes of the cluster
(no totals)

after"""


def test_a_wide_table_is_stacked_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert plain_text(Group("before", Group(table()), "after")) == STACKED
    monkeypatch.setenv("COLUMNS", "90")
    assert "┃ unit" in plain_text(table())  # it fits


def test_from_a_hundred_columns_on_a_table_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = table()
    wide.add_row("a unit " * 30)
    for columns in (100, 130):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = plain_text(wide).splitlines()
        assert max(map(len, lines)) == columns
        assert lines[1].startswith("┏")


def test_what_is_no_terminal_has_the_width_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert plain_text("word " * 40, width=60).splitlines()[0] == ("word " * 12).strip()


def test_tables_as_html() -> None:
    text = html(Group("a < b", table()))
    assert text.startswith("<p>a &lt; b</p>\n<table><caption>Units &lt;of&gt; a model</caption>")
    assert '<td style="text-align: left">  attention/kernel</td><td style="text-align: right"></td>' in text
    assert text.endswith("</table>\n<p>(no totals)</p>")
