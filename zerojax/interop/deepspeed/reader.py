"""Reading a config so that no key of it is lost: what nobody asked for is listed in the end."""

from collections.abc import Iterator
from typing import Any

from zerojax.errors import ZeroError
from zerojax.validation.untrusted import printable, short

AUTO = "auto"
FILLED_IN = "Hugging Face's Trainer would fill it in"


class Reader:
    """Nested JSON whose leaves are ticked off as they are read.

    Attributes:
        remarks: lines on what the config leaves open.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        """Nothing is ticked off yet.

        Args:
            data: the config.
        """
        self._data = data
        self._left = dict(_leaves(data))
        self._notes: dict[str, str] = {}
        self.remarks: list[str] = []

    def take(self, path: str, kind: type | tuple[type, ...], default: Any = None, *, auto: Any = None) -> Any:
        """A value, ticked off.

        Args:
            path: keys joined by ".".
            kind: the types that it may have; a whole number is a number, too.
            default: DeepSpeed's, for what is missing or null.
            auto: for "auto"; by default None.

        Raises:
            ZeroError: it has another type.
        """
        value = self._look_up(path)
        self._tick_off(path)
        if value == AUTO:
            self._notes[path] = f"{FILLED_IN}: zerojax's own default stands"
            return auto
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        # bool is a kind of int in Python, and "3" is a number to DeepSpeed's own parser, but not to JSON.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(_WORDS.get(k, k.__name__) for k in kinds)
            raise ZeroError(f"{path} = {short(value)} should be {wanted}")
        return value

    def quote(self, path: str) -> str:
        """A key with its value, for a message."""
        return f"{path} = {short(self._look_up(path))}"

    def given(self, path: str) -> bool:
        """Whether a key is there with a value of its own, not "auto" or null."""
        return self._look_up(path) not in (None, AUTO)

    def is_auto(self, path: str) -> bool:
        """Whether a key is "auto"."""
        return self._look_up(path) == AUTO

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
        return [f"{printable(path)} = {short(value)}: {why}" for path, (value, why) in lines]

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
        path = prefix + key.replace(".", "\\.")  # such a key is none of those below another
        if isinstance(value, dict) and value:
            yield from _leaves(value, path + ".")
        else:
            yield path, value
