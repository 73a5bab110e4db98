"""What reports have in common: sizes for people, and tables as plain text."""

import io

from rich.console import Console, RenderableType

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def size(count: float) -> str:
    """A number of bytes with three digits and a decimal unit: 1536 -> "1.54 KB"."""
    unit = 0
    while abs(count) >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    if unit == 0:
        return f"{count:.0f} B"
    return f"{count:.{max(0, 3 - len(f'{abs(count):.0f}'))}f} {_UNITS[unit]}"


def milliseconds(seconds: float) -> str:
    """0.01234 -> "12.3"."""
    return f"{1e3 * seconds:,.1f}"


def plain_text(renderable: RenderableType, width: int = 120) -> str:
    """What rich would draw, without colours or trailing blanks.

    Args:
        renderable: a table, a group of them, text.
        width: columns to use at most.
    """
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
