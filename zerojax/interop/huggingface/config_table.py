"""Tables of the keys of a config.json: a family's one description for reading and for writing.

A table is a sequence of entries, in the order in which they are read. An entry reads some keys into fields of
a ``GPTConfig``, writes them from those fields, and says which values of the fields the family has.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import REQUIRED, ConfigKeys
from zerojax.models import GPTConfig

ANY = object()
"""In ``Entry.allowed``: a family takes any value of this field."""
FREE = ("attention", "balance_loss", "dropout", "init_std", "loss_chunk", "token_tile", "scan", "z_loss")
"""The fields of a model that change no logits."""
_OF_EXPERTS = ("experts_", "shared_", "dense_", "router")
Fields = Mapping[str, Any]
"""The fields of a model, by name."""


def _nothing(*_: object) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Entry:
    """Some keys of a config.json, and the fields of the model that they describe.

    Attributes:
        read: the fields, from the keys and the fields of the entries before; None is no fields. Raises
            ConfigurationError for a value that is not supported.
        write: the keys of a model. Raises ConfigurationError, naming the field, if the family has no such
            model.
        allowed: field or property of a model -> the only value for such a model, a tuple of values, or ANY.
    """

    read: Callable[[ConfigKeys, Fields], Fields | None] = _nothing
    write: Callable[[GPTConfig], Mapping[str, Any]] = _nothing
    allowed: Callable[[GPTConfig], Mapping[str, object]] = _nothing


Table = Sequence[Entry]


def read_fields(table: Table, keys: ConfigKeys, before: Fields) -> dict[str, Any]:
    """The fields that a table reads, added to those of others.

    Raises:
        ConfigurationError: a value is not supported.
    """
    found = dict(before)
    for entry in table:
        found |= entry.read(keys, found) or {}
    return found


def write_keys(table: Table, model: GPTConfig) -> dict[str, Any]:
    """The keys of a model, which the table has.

    Raises:
        ConfigurationError: the family has no such model.
    """
    return {name: value for entry in table for name, value in entry.write(model).items()}


def key_names(table: Table) -> frozenset[str]:
    """The names of the keys that a table reads, and of harmless ones."""
    keys, found = ConfigKeys({"max_position_embeddings": 1}, ""), vars(GPTConfig(ffn=1))
    for entry in table:
        with suppress(ConfigurationError):  # a key without a default is missing
            entry.read(keys, found)
    return keys.seen


def differences(table: Table, model: GPTConfig, family: str) -> list[str]:
    """In what a model differs from those of a family, in words.

    Each is a field that has another value than the table allows, or than its default where the table does not
    name it.
    """
    allowed = {name: value for entry in table for name, value in entry.allowed(model).items()}
    off = {field.name: field.default for field in fields(GPTConfig) if field.name not in (*FREE, "outputs")}
    if model.positions == "learned":  # then it does not look at these
        off = {name: value for name, value in off.items() if not name.startswith("rope_")}
    if not model.experts:  # likewise
        off = {name: value for name, value in off.items() if not name.startswith(_OF_EXPERTS)}
    found = []
    for name, value in (allowed | off | allowed).items():  # those of the table first
        values = value if isinstance(value, tuple) and value else (value,)
        if value is not ANY and (own := getattr(model, name)) not in values:
            found.append(f"model.{name} = {own!r}, but {family} has {' or '.join(map(repr, values))}")
    return found


def key(
    name: str,
    field: str,
    kind: type = int,
    default: Any = REQUIRED,
    *,
    null: bool = False,
    decode: Callable[[Any, Fields], Any] | None = None,
    written: str | Callable[[GPTConfig], Any] | None = None,
    twin: str | None = None,
) -> Entry:
    """A key that is a field.

    Args:
        name: of the key.
        field: of the model.
        kind: of its value.
        default: without the key, or a function that gives it, of the keys and the fields so far.
        null: whether null is None, and not the default.
        decode: the field, from the value and the fields so far, if they differ.
        written: the property that is written, or a function of the model, if it is not the field.
        twin: a key that must have the same value, or without a default may be left out.
    """

    def read(keys: ConfigKeys, found: Fields) -> Fields:
        missing = default(keys, found) if callable(default) else default
        value = (keys.nullable if null else keys.take)(name, kind, missing)
        other = value if twin is None else keys.take(twin, kind, value if default is REQUIRED else default)
        if other != value:
            raise ConfigurationError(
                f"{name} = {value} and {twin} = {other} are supported only if they are equal"
            )
        return {field: value if decode is None else decode(value, found)}

    def write(model: GPTConfig) -> Mapping[str, Any]:
        value = written(model) if callable(written) else getattr(model, written or field)
        return {name: value} if twin is None else {name: value, twin: value}

    return Entry(read, write, lambda _: {field: ANY})


def choice(name: str, field: str, values: Mapping[str, str]) -> Entry:
    """A key whose names are values of a field.

    ``values`` are their name -> ours; the first is the default. Of several names of one value, the first is
    written.
    """
    theirs = {ours: word for word, ours in reversed(list(values.items()))}

    def read(keys: ConfigKeys, found: Fields) -> Fields:
        keys.only(name, *values)
        return {field: values[keys.take(name, str, next(iter(values)))]}

    return Entry(
        read, lambda model: {name: theirs[getattr(model, field)]}, lambda _: {field: tuple(values.values())}
    )


def only(name: str, *values: Any, written: bool = True) -> Entry:
    """A key with values that mean the same; the first is the default, and is written unless that is off."""
    return Entry(lambda keys, _: keys.only(name, *values), lambda _: {name: values[0]} if written else {})


def fixed(**values: Any) -> Entry:
    """Fields that have one value in a family, and no key."""
    return Entry(lambda *_: values, allowed=lambda _: values)


def follows(field: str, value: Callable[[Fields], Any]) -> Entry:
    """A field, without a key, that follows from others."""
    return Entry(lambda _, found: {field: value(found)}, allowed=lambda model: {field: value(vars(model))})


def dropouts(*none: str, dropout: Sequence[str] = ()) -> Entry:
    """Rates of dropout, which are not read; those of ``model.dropout`` are written, the others are zero."""
    return Entry(
        lambda keys, _: keys.only_training(*none, *dropout),
        lambda model: dict.fromkeys(none, 0.0) | dict.fromkeys(dropout, model.dropout),
    )


def ignored(name: str) -> Entry:
    """A key that transformers does not read, although it sounds as if the logits depended on it."""
    return Entry(lambda keys, _: keys.ignored(name))


def unused(*names: str, written: str | None = None) -> Entry:
    """Keys that a causal language model does not need; they are written as a field, or not at all."""
    return Entry(
        lambda keys, _: keys.unused(*names),
        lambda model: {} if written is None else dict.fromkeys(names, getattr(model, written)),
    )


PLAIN_HEADS = Entry(
    allowed=lambda model: {
        "kv_heads": (None, model.heads),
        "head_width": (None, model.d_model // model.heads),
    }
)
"""Keys and values for every head, which are as wide as the model together."""
