"""Tables of the keys of a config.json: a family's one description for reading and for writing.

A table is a sequence of entries, in the order in which they are read. An entry reads some keys into fields of
a ``GPTConfig``, writes them from those fields, and says which values of the fields the family has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import REQUIRED, ConfigKeys
from zerojax.models import GPTConfig

ANY = object()
"""In ``Entry.allowed``: a family takes any value of this field."""
FREE = ("attention", "dropout", "init_std", "loss_chunk", "scan")
"""The fields of a model that change no logits."""


class Entry:
    """Some keys of a config.json, and the fields of the model that they describe."""

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """Read the keys, and add the fields to ``found``, which has those of the entries before.

        Raises:
            ConfigurationError: a value is not supported.
        """

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """The keys of a model.

        Raises:
            ConfigurationError: the family has no such model; names the field.
        """
        return {}

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """Field or property of a model -> the only value for such a model, a tuple of values, or ANY."""
        return {}


Table = Sequence[Entry]


def read_table(table: Table, keys: ConfigKeys) -> GPTConfig:
    """The model of a config.json.

    Raises:
        ConfigurationError: a value is not supported.
    """
    found: dict[str, Any] = {}
    for entry in table:
        entry.read(keys, found)
    return GPTConfig(**found)


def write_table(table: Table, model: GPTConfig, family: str) -> dict[str, Any]:
    """The config.json of a model.

    Args:
        table: of the family.
        model: to describe.
        family: its name, for the error.

    Raises:
        ConfigurationError: the family has no such model: a field has another value than the table allows, or
            its default where the table does not name it.
    """
    allowed = {name: value for entry in table for name, value in entry.allowed(model).items()}
    off = {field.name: field.default for field in fields(GPTConfig) if field.name not in (*FREE, "outputs")}
    if model.positions == "learned":  # then it does not look at these
        off = {name: value for name, value in off.items() if not name.startswith("rope_")}
    for name, value in (allowed | off | allowed).items():  # those of the table first
        values = value if isinstance(value, tuple) and value else (value,)
        if value is not ANY and (found := getattr(model, name)) not in values:
            raise ConfigurationError(
                f"model.{name} = {found!r}, but {family} has {' or '.join(map(repr, values))}"
            )
    return {name: value for entry in table for name, value in entry.write(model).items()}


@dataclass(frozen=True)
class Key(Entry):
    """A key that is a field.

    Attributes:
        name: of the key.
        field: of the model.
        kind: of its value.
        default: without the key.
        null: whether null is None, and not the default.
        written: the property that is written, if it is not the field.
    """

    name: str
    field: str
    kind: type = int
    default: Any = REQUIRED
    null: bool = False
    written: str | None = None

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        take = keys.nullable if self.null else keys.take
        found[self.field] = take(self.name, self.kind, self.default)

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        return {self.name: getattr(model, self.written or self.field)}

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        return {self.field: ANY}


@dataclass(frozen=True)
class Choice(Entry):
    """A key whose names are values of a field.

    Attributes:
        name: of the key.
        field: of the model.
        values: their name -> ours; the first is the default. Of several names of one value, the first is
            written.
    """

    name: str
    field: str
    values: Mapping[str, str]

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        keys.only(self.name, *self.values)
        found[self.field] = self.values[keys.take(self.name, str, next(iter(self.values)))]

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        ours = getattr(model, self.field)
        return {self.name: next(theirs for theirs, value in self.values.items() if value == ours)}

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        return {self.field: tuple(self.values.values())}


class Only(Entry):
    """A key with values that mean the same; the first is the default, and is written unless that is off."""

    def __init__(self, name: str, *values: Any, written: bool = True):
        self.name, self.values, self.written = name, values, written

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        del found
        keys.only(self.name, *self.values)

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        del model
        return {self.name: self.values[0]} if self.written else {}


class Fixed(Entry):
    """Fields that have one value in a family, and no key."""

    def __init__(self, **values: Any):
        self.values = values

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        del keys
        found |= self.values

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        del model
        return self.values


@dataclass(frozen=True)
class Follows(Entry):
    """A field, without a key, that follows from others.

    Attributes:
        field: of the model.
        value: of it, from the others.
    """

    field: str
    value: Callable[[Mapping[str, Any]], Any]

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        del keys
        found[self.field] = self.value(found)

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        return {self.field: self.value(vars(model))}


class PlainHeads(Entry):
    """Keys and values for every head, which are as wide as the model together."""

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        return {"kv_heads": (None, model.heads), "head_width": (None, model.d_model // model.heads)}


class Dropouts(Entry):
    """Rates of dropout, which are not read; those of ``model.dropout`` are written, the others are zero."""

    def __init__(self, *none: str, dropout: Sequence[str] = ()):
        self.none, self.dropout = none, tuple(dropout)

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        del found
        keys.only_training(*self.none, *self.dropout)

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        return dict.fromkeys(self.none, 0.0) | dict.fromkeys(self.dropout, model.dropout)


class Unused(Entry):
    """Keys that a causal language model does not need."""

    def __init__(self, *names: str):
        self.names = names

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        del found
        keys.unused(*self.names)


@dataclass(frozen=True)
class SameAs(Entry):
    """A key that repeats a field: another value is refused.

    Attributes:
        name: of the key.
        field: of the model.
        checked: False if no value is refused.
    """

    name: str
    field: str
    checked: bool = True

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        keys.only(self.name, found[self.field]) if self.checked else keys.unused(self.name)

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        return {self.name: getattr(model, self.field)}
