"""Strict readers of untrusted JSON and TOML, and quoting of their values in messages.

What the formats leave to their readers is refused in all files: unbounded nesting, duplicate keys, NaN and
infinities, whole numbers of hundreds of digits, text that is not valid Unicode.
"""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

from zerojax.errors import ConfigurationError, file_errors

DEEPEST = 64
"""Levels of nested tables and lists; a settings file has four or five."""
MAX_SETTINGS_CHARS = 1 << 20
"""Characters of a settings file."""
_MAX_DOTS = 200  # per line
_MAX_DIGITS = 300  # so that every whole number fits a float; transformers writes one of 31
_TOO_LONG = f"a whole number of more than {_MAX_DIGITS} digits"
_TOO_DEEP = f"nested too deeply: more than {DEEPEST} tables and lists inside each other"


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, or has what the module refuses; says which in one line.
    """
    try:
        data = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_int=_integer
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check(data)
    return data


def read_json_object(path: Path, kind: type[ConfigurationError] = ConfigurationError) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigurationError: ``kind``, if it cannot be read, ``parse_json`` refuses it, or it is no object.
    """
    with file_errors(path, kind, content="not JSON"):
        values = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise kind(f"{path}: not a JSON object")
    return values


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        ValueError: as for ``parse_json``; or the text is longer than any settings.
    """
    if len(text) > MAX_SETTINGS_CHARS:
        raise ValueError(
            f"{len(text):,} characters, more than the {MAX_SETTINGS_CHARS:,} of any settings file"
        )
    # The time of tomllib is quadratic in the parts of a dotted key.
    if any(line.count(".") > _MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"nested too deeply: a line has more than {_MAX_DOTS} dots; break it if it is not")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check(data)
    return data


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, as file names and options that are not UTF-8 have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def short(value: Any) -> str:
    """A value as one line of at most 80 characters, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str) -> str:
    """Text as one line that is safe in a terminal, a log or a TOML comment.

    Control characters, line breaks, direction marks and lone surrogates become escapes.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"a key is given twice: {short(name)}")
        found[name] = value
    return found


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:  # Python itself refuses thousands of digits, with another message
        raise ValueError(_TOO_LONG)
    return int(digits)


def _check(data: Any) -> None:
    """Refuse deep nesting and bad values, without recursion: the data may be deeper than Python's stack."""
    level, depth = [data], 0
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                if not is_unicode(value):
                    raise ValueError(f"not valid Unicode: half of a surrogate pair in {short(value)}")
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{value} is not a finite number")
            elif isinstance(value, int) and abs(value) >= 10**_MAX_DIGITS:
                raise ValueError(_TOO_LONG)
        level, depth = below, depth + 1
        if depth > DEEPEST and any(isinstance(value, dict | list) for value in level):
            raise ValueError(_TOO_DEEP)
