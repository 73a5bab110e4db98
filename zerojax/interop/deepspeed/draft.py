"""A draft of a translation that loses no key: keys that were never read are listed at the end."""

from collections.abc import Iterator
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.validation.untrusted import printable, short

TRAIN, MICRO, ACCUMULATE = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
"""DeepSpeed's batch sizes: train = micro x accumulation x devices."""
AUTO = "auto"
FILLED_IN = "Hugging Face's Trainer would fill it in"


class Draft:
    """A translation in progress: nested JSON whose leaves are marked as they are read, and the settings.

    Attributes:
        sections: the settings so far: section -> key -> value.
        differs: a line for each translated key whose meaning differs in a detail.
        remarks: lines on choices that the config leaves open.
        origins: pairs of a setting, "section.key", and the path of its key in the config.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data
        self._left = dict(_leaves(data))
        self._notes: dict[str, str] = {}
        self.sections: dict[str, dict[str, Any]] = {}
        self.differs: list[str] = []
        self.remarks: list[str] = []
        self.origins: list[tuple[str, str]] = []

    def take(self, path: str, kind: type | tuple[type, ...], default: Any = None, *, auto: Any = None) -> Any:
        """Read a value and mark it as read.

        Args:
            path: keys joined by ".".
            kind: the allowed types; an int is accepted as a float.
            default: DeepSpeed's default, for a missing or null value.
            auto: the result for "auto".
        """
        value = self._look_up(path)
        self._tick_off(path)
        if value == AUTO:
            self._notes[path] = f"{FILLED_IN}: zerojax's own default applies"
            return auto
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        # In Python bool is a subclass of int. Unlike DeepSpeed's parser, this one does not read "3" as a
        # number.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(_WORDS.get(k, k.__name__) for k in kinds)
            raise ConfigurationError(f"{path} = {short(value)} should be {wanted}")
        return value

    def quote(self, path: str) -> str:
        """A key with its value, for a message."""
        return f"{path} = {short(self._look_up(path))}"

    def set(self, section: str, **values: Any) -> None:
        """Add settings."""
        self.sections.setdefault(section, {}).update(values)

    def adopt(self, name: str, path: str, kind: type, default: Any = None) -> Any:
        """Copy a key, or DeepSpeed's default, to a setting "section.key"; a default of None sets nothing.

        Returns:
            The value that was set; None if nothing was set, as for "auto".
        """
        self.origins.append((name, path))
        value = self.take(path, kind, default)
        if value is not None:
            section, key = name.split(".")
            self.set(section, **{key: value})
        return value

    def given(self, path: str) -> bool:
        """Whether a key has a value other than "auto" and null."""
        return self._look_up(path) not in (None, AUTO)

    def is_auto(self, path: str) -> bool:
        """Whether a key is "auto"."""
        return self._look_up(path) == AUTO

    def note(self, path: str, why: str) -> None:
        """Note why a key has no counterpart; marks the key and all keys below it as read."""
        value = self._look_up(path)
        if value is not None:
            self._tick_off(path)
            self._notes[path] = why

    def notes(self) -> list[str]:
        """A line for every key without a counterpart, including keys that were never read."""
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
        path = prefix + key.replace(".", "\\.")  # a dot within a key is no separator
        if isinstance(value, dict) and value:
            yield from _leaves(value, path + ".")
        else:
            yield path, value
