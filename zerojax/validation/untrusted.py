"""Strict readers of untrusted JSON and TOML, and quoting of their values in messages.

They refuse values that the formats leave to their readers: unbounded nesting, duplicate keys, NaN and
infinities, whole numbers of hundreds of digits, and text that is not valid Unicode.

The small JSON files of zerojax itself have a checksum, which detects accidents but not tampering.
"""

import json
import math
import tomllib
import zlib
from pathlib import Path
from typing import Any

from zerojax.errors import ConfigurationError, file_errors

DEEPEST = 64
"""The most levels of nested tables and lists. A settings file has four or five."""
MAX_SETTINGS_CHARS = 1 << 20
"""The most characters of a settings file."""
_MAX_DOTS = 200  # per line
_MAX_DIGITS = 300  # every whole number then fits a float; transformers writes one of 31 digits
_TOO_LONG = f"a whole number of more than {_MAX_DIGITS} digits"
_TOO_DEEP = f"nested too deeply: more than {DEEPEST} tables and lists inside each other"


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or has a value that this module refuses. The message is one line.
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
        kind: the file cannot be read, or is no object.
    """
    with file_errors(path, kind, content="not JSON"):
        values = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise kind(f"{path}: not a JSON object")
    return values


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        ValueError: as for ``parse_json``, or the text is too long.
    """
    if len(text) > MAX_SETTINGS_CHARS:
        raise ValueError(f"{len(text):,} characters, but a settings file has at most {MAX_SETTINGS_CHARS:,}")
    # tomllib's time is quadratic in the parts of a dotted key.
    if any(line.count(".") > _MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"nested too deeply: a line has more than {_MAX_DOTS} dots. Break long lines")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check(data)
    return data


def dump_checked(data: dict[str, Any]) -> str:
    """The JSON text of ``data`` with its checksum."""
    return json.dumps({"crc32": _checksum(data), "data": data}, indent=1) + "\n"


def load_checked(text: str) -> dict[str, Any]:
    """The data in a text of ``dump_checked``.

    Raises:
        ValueError: the text is not JSON, or has another layout or a wrong checksum. The message says which.
    """
    try:
        whole = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if (
        not isinstance(whole, dict)
        or whole.keys() != {"crc32", "data"}
        or not isinstance(whole["data"], dict)
    ):
        raise ValueError("not a JSON object with a checksum")
    if whole["crc32"] != _checksum(whole["data"]):
        raise ValueError("wrong checksum")
    return whole["data"]


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which Python puts into file names and options not in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def short(value: Any) -> str:
    """A value as one line of at most 80 characters for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str) -> str:
    """The text as one line that is safe in a terminal, a log or a TOML comment.

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
    if len(digits) > _MAX_DIGITS:  # before Python refuses thousands of digits with another message
        raise ValueError(_TOO_LONG)
    return int(digits)


def _check(data: Any) -> None:
    """Refuse deep nesting and bad values. No recursion: the data may be deeper than Python's stack."""
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


def _checksum(data: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())
