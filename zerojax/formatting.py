"""Formats numbers for people, and tables as plain text."""

import io
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from html import escape

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.protocol import rich_cast
from rich.table import Column, Table
from rich.text import Text

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
# From this width on, tables are always drawn; and the least width of the output.
_TABLE_WIDTH, _LEAST_WIDTH = 100, 40
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def size(count: float) -> str:
    """A number of bytes with three digits and a decimal unit: 1536 -> "1.54 KB"."""
    unit = 0
    while abs(count) >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    if unit == 0:
        return f"{count:.0f} B"
    return f"{count:.{max(0, 3 - len(f'{abs(count):.0f}'))}f} {_UNITS[unit]}"


def abbreviated(value: float, spec: str = ".4g", least: float = 1e4) -> str:
    """A number with a decimal prefix from ``least`` on: 12345 -> "12.35k", 0.00012 -> "0.00012"."""
    if value and abs(value) < 1e-3:
        return f"{value:.3g}"
    for scale, prefix in _PREFIXES:
        if abs(value) >= max(scale, least):
            return f"{value / scale:{spec}}{prefix}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    """A fraction as percent, three digits: 0.4567 -> "45.7%"."""
    return f"{100 * value:.3g}%"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds without a unit: 0.01234 -> "12.3"."""
    return f"{1e3 * seconds:,.1f}"


def duration(seconds: float) -> str:
    """Seconds with their unit: 0.0123 -> "12 ms", 1.5 -> "1.50 s"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def numeric(*names: str) -> list[Column]:
    """Columns of numbers for a table of rich, by their headings."""
    return [Column(name, justify="right") for name in names]


def plain_text(renderable: RenderableType, width: int = 120) -> str:
    """Render with rich as plain text for the terminal, without trailing blanks.

    Where the terminal has fewer than 100 columns, a wider table becomes a block of lines for each row.

    Args:
        renderable: a text, a table, or a group of them.
        width: columns to use if the output is not a terminal and ``COLUMNS`` is not set.
    """
    width = max(shutil.get_terminal_size((width, 24)).columns, _LEAST_WIDTH)
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, legacy_windows=False)
    for part in _parts(renderable):
        if isinstance(part, Table) and width < min(_TABLE_WIDTH, _natural_width(part)):
            part = _stacked(part, width)
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def html(renderable: RenderableType) -> str:
    """Render as HTML, for notebooks; the argument is as for ``plain_text``."""
    return "\n".join(
        _html_table(part) if isinstance(part, Table) else f"<p>{escape(str(part))}</p>"
        for part in _parts(renderable)
    )


def _parts(renderable: RenderableType) -> Iterator[RenderableType]:
    """The texts and tables of a renderable, which may be nested groups."""
    renderable = rich_cast(renderable)
    if isinstance(renderable, Group):
        for one in renderable.renderables:
            yield from _parts(one)
    else:
        yield renderable


def _natural_width(table: Table) -> int:
    """The columns that a table takes if no line is wrapped."""
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def _rows(table: Table) -> Iterator[list[str]]:
    """The cells of each row."""
    yield from ([str(cell) for cell in row] for row in zip(*(c.cells for c in table.columns), strict=True))


def _stacked(table: Table, width: int) -> Text:
    """A table as lines: the first cell of each row, and below it the other cells with their headings."""
    names, lines = [str(column.header) for column in table.columns[1:]], [str(table.title or "")]
    for (label, *cells), row in zip(_rows(table), table.rows, strict=True):
        named = " | ".join(f"{name} {cell}" for name, cell in zip(names, cells, strict=True) if cell)
        indent = " " * (len(label) - len(label.lstrip()) + 4)
        lines += [label, *textwrap.wrap(named, width, initial_indent=indent, subsequent_indent=indent)]
        lines += [""] * row.end_section
    lines += [str(table.caption)] * (table.caption is not None)
    return Text("\n".join(lines).rstrip() + "\n")


def _html_table(table: Table) -> str:
    def line(tag: str, cells: Iterable[str]) -> str:
        aligned = zip(cells, table.columns, strict=True)
        inside = (f'<{tag} style="text-align: {c.justify}">{escape(text)}</{tag}>' for text, c in aligned)
        return f"<tr>{''.join(inside)}</tr>"

    heads = line("th", (str(column.header) for column in table.columns))
    return "\n".join(
        [f"<table><caption>{escape(str(table.title or ''))}</caption>", heads]
        + [line("td", row) for row in _rows(table)]
        + ["</table>"]
        + [f"<p>{escape(str(table.caption))}</p>"] * (table.caption is not None)
    )
