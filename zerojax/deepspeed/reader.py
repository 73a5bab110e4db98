"""Reading a config so that no key of it is lost: what nobody asked for is listed in the end."""

from collections.abc import Iterator
from typing import Any

from zerojax.errors import ZeroError

AUTO = "auto"


class Reader:
    """Nested JSON whose leaves are ticked off as they are read."""

    def __init__(self, data: dict[str, Any]) -> None:
        """Nothing is ticked off yet.

        Args:
            data: the config.
        """
        self._data = data
        self._left = dict(_leaves(data))
        self._notes: dict[str, str] = {}

    def take(self, path: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value, ticked off; the default where it is missing, null or "auto".

        Args:
            path: keys joined by ".".
            kind: the types that it may have; a whole number is a number, too.
            default: for what is not given.

        Raises:
            ZeroError: it has another type.
        """
        value = self._look_up(path)
        self._tick_off(path)
        if value == AUTO:
            self._notes[path] = "Hugging Face's Trainer would fill it in: zerojax's own default stands"
        if value is None or value == AUTO:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        # bool is a kind of int in Python, and "3" is a number to DeepSpeed's own parser, but not to JSON.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(_WORDS.get(k, k.__name__) for k in kinds)
            raise ZeroError(f"{path} = {value!r} should be {wanted}")
        return value

    def given(self, path: str) -> bool:
        """Whether a key is there with a value of its own, not "auto" or null."""
        return self._look_up(path) not in (None, AUTO)

    def note(self, path: str, why: str) -> None:
        """Say of a key that it has no counterpart, and why; ticks it and what is below it off."""
        value = self._look_up(path)
        if value is not None:
            self._tick_off(path)
            self._notes[path] = why

    def notes(self) -> list[str]:
        """A line for every key without counterpart, those that nobody read among them."""
        noted = {path: (self._look_up(path), why) for path, why in self._notes.items()}
        unread = {path: (value, "no counterpart") for path, value in self._left.items()}
        lines = sorted((noted | unread).items())
        return [f"{path} = {_short(value)}: {why}" for path, (value, why) in lines]

    def _tick_off(self, path: str) -> None:
        for key, value in list(self._left.items()):
            around = value == {} and path.startswith(key + ".")
            if key == path or key.startswith(path + ".") or around:
                del self._left[key]

    def _look_up(self, path: str) -> Any:
        value: Any = self._data
        for key in path.split("."):
            if not isinstance(value, dict):
                return None
            value = value.get(key)
        return value


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", dict: "a table"}


def _leaves(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, path + ".")
        else:
            yield path, value


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
