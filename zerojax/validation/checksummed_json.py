"""Small JSON files that notice when a byte of them has changed.

The checksum is against accidents: whoever can write the file can also write the checksum.
"""

import json
import zlib
from typing import Any


def dump_checked(data: dict[str, Any]) -> str:
    """JSON text of `data` with a checksum of it."""
    return json.dumps({"crc32": _checksum(data), "data": data}, indent=1) + "\n"


def load_checked(text: str) -> dict[str, Any]:
    """The data in a text of `dump_checked`.

    Raises:
        ValueError: no JSON, another layout, or the checksum is wrong; says which.
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
        raise ValueError("no JSON object with a checksum")
    if whole["crc32"] != _checksum(whole["data"]):
        raise ValueError("wrong checksum")
    return whole["data"]


def _checksum(data: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())
