"""Small JSON files with a checksum of their data, which detects accidents but not tampering."""

import json
import zlib
from typing import Any


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


def _checksum(data: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())
