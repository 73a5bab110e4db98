"""Damage to valid files, drawn from a seed: bytes, and values of JSON or TOML; and the time each may take."""

import copy
import json
import random
import re
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import tomli_w

# What no encoder writes: put in as a text, and taken out of its quotes in the encoded file.
_RAW = ("NaN", "nan", "Infinity", "-inf", "1e400", "9" * 5000, "0x" + "f" * 5000, "1e", "null", "[", "]")
_DEEP = (
    "[" * 5000 + "]" * 5000,
    '{"a":' * 5000 + "1" + "}" * 5000,
    "{a=" * 5000 + "1" + "}" * 5000,
    "[" * 99_999,
)
_RAW_TEXT = re.compile(r'"<raw (\d+)>"')
_VALUES: tuple[Any, ...] = (
    *(True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**32, 2**53, 2**63, -(2**63), 10**26, 99_999_999, 10**9),
    *(0.0, -0.0, 0.5, 1e26, 5e-324, 1e308, -1e308, 3.0),
    *("", "\0", "\x1b[31m", "a\nb", "ü" * 300, "\u2028", "\ud800", "../../etc/passwd"),
    *("/etc/passwd", "auto", "3", "[x]"),
    *([], {}, [[]], [1, 2], ["int4", "int4"], {"a": 1}, [0] * 100, {"enabled": True}),
    *(f"<raw {number}>" for number in range(len(_RAW + _DEEP))),
)  # fmt: skip


class Damage:
    """A source of damage; equal seeds do equal damage."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def of_bytes(self, raw: bytes) -> bytes:
        """One to four changes: flips, cuts, insertions, copies of other parts."""
        data = bytearray(raw)
        for _ in range(self.random.randint(1, 4)):
            start = self.random.randint(0, len(data))
            stop = min(len(data), start + self.random.choice((0, 1, 1, 2, 8, 64)))
            kind = self.random.randrange(5)
            if kind == 0 and start < len(data):
                data[start] ^= 1 << self.random.randrange(8)
            elif kind == 1:
                data[start:stop] = self.random.choice(
                    (b"", b"\0", b"\xff\xff", b"9" * 30, b'"', b"}", b"[" * 5000)
                )
            elif kind == 2:
                data[start:stop] = self.random.randbytes(stop - start)
            elif kind == 3:
                other = self.random.randint(0, len(data))
                data[start:start] = data[other : other + 40]
            elif self.random.random() < 0.3:
                del data[start:]
        return bytes(data)

    def of_values(self, values: dict[str, Any]) -> dict[str, Any]:
        """A copy with one to three values that are others, missing, renamed, or of another place."""
        values = copy.deepcopy(values)
        for _ in range(self.random.randint(1, 3)):
            places = list(_places(values))
            if not places:
                break
            inside, key = self.random.choice(places)
            kind = self.random.randrange(8)
            if kind == 0:
                del inside[key]
            elif kind == 1 and isinstance(inside, dict):
                inside[self.random.choice(("x", "", "a.b", "ü\n\x1b[1m", str(key) * 50))] = inside.pop(key)
            elif kind == 2:
                other, name = self.random.choice(places)
                inside[key] = copy.deepcopy(other[name])
            elif kind == 3:
                inside[key] = [inside[key]]
            else:
                inside[key] = copy.deepcopy(self.random.choice(_VALUES))
        return values

    def of_file(self, values: dict[str, Any], encode: Callable[[dict[str, Any]], str]) -> bytes:
        """The damaged file of some values: mostly other values, sometimes other bytes, or both."""
        kind = self.random.random()
        text = encode(self.of_values(values) if kind < 0.8 else values)
        text = _RAW_TEXT.sub(lambda found: (_RAW + _DEEP)[int(found[1])], text)
        raw = text.encode("utf-8", "surrogatepass")
        return self.of_bytes(raw) if kind > 0.7 else raw


def json_text(values: Any) -> str:
    """JSON, whatever the values are."""
    return json.dumps(values)


def toml_text(values: dict[str, Any]) -> str:
    """TOML."""
    return tomli_w.dumps(values)


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every key of every dict and every index of every list."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in pairs:
        yield values, key
        if isinstance(value, dict | list):
            yield from _places(value)


@contextmanager
def time_limit(seconds: float = 10) -> Generator[None]:
    """Fail what takes more of this process's time than that; the time of others is not counted."""

    def end(signum: int, frame: object) -> None:
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
