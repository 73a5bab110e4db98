"""Formats numbers for people, and tables as plain text."""

import io

from rich.console import Console, RenderableType
from rich.table import Column

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
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
    """0.01234 -> "12.3"."""
    return f"{1e3 * seconds:,.1f}"


def duration(seconds: float) -> str:
    """Seconds with their unit: 0.0123 -> "12 ms", 1.5 -> "1.50 s"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def numeric(*names: str) -> list[Column]:
    """Columns of numbers for a table of rich, by their headings."""
    return [Column(name, justify="right") for name in names]


def plain_text(renderable: RenderableType, width: int = 120) -> str:
    """Render with rich as plain text, at most ``width`` columns wide, without trailing blanks."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
