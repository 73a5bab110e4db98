"""Tables of config.json's keys: one description of a family for reading and writing.

A table is a sequence of entries in the order in which they are read. An entry reads some keys into fields of
a ``GPTConfig``, writes them from those fields, and lists the fields' values in the family.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import REQUIRED, ConfigKeys
from zerojax.models.config import GPTConfig

ANY = object()
"""In ``Entry.allowed``: the family supports any value of this field."""
FREE = ("attention", "balance_loss", "dropout", "init_std", "loss_chunk", "token_tile", "scan", "z_loss")
"""The fields of a model that do not change the logits."""
_OF_EXPERTS = ("experts_", "shared_", "dense_", "router")
_OF_RECURRENCE = ("recurrent", "conv_width")
Fields = Mapping[str, Any]
"""The fields of a model, by name."""


def _nothing(*_: object) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Entry:
    """Some keys of a config.json, and the fields of the model that they describe.

    Attributes:
        read: the fields, from the keys and the fields of earlier entries; None means no fields. Raises
            ConfigurationError for a value that is not supported.
        write: the keys of a model. Raises ConfigurationError, naming the field, if the family has no such
            model.
        allowed: field or property of a model -> the only value in the family, a tuple of values, or ANY.
    """

    read: Callable[[ConfigKeys, Fields], Fields | None] = _nothing
    write: Callable[[GPTConfig], Mapping[str, Any]] = _nothing
    allowed: Callable[[GPTConfig], Mapping[str, object]] = _nothing


Table = Sequence[Entry]


def read_fields(table: Table, keys: ConfigKeys, before: Fields) -> dict[str, Any]:
    """The fields that a table reads, added to ``before``."""
    found = dict(before)
    for entry in table:
        found |= entry.read(keys, found) or {}
    return found


def write_keys(table: Table, model: GPTConfig) -> dict[str, Any]:
    """The table's keys for a model."""
    return {name: value for entry in table for name, value in entry.write(model).items()}


def key_names(table: Table) -> frozenset[str]:
    """The names of the keys that a table reads, and of harmless keys."""
    keys, found = ConfigKeys({"max_position_embeddings": 1}, ""), vars(GPTConfig(ffn=1))
    for entry in table:
        with suppress(ConfigurationError):  # a key without a default is missing
            entry.read(keys, found)
    return keys.seen


def differences(table: Table, model: GPTConfig, family: str) -> list[str]:
    """How a model differs from a family: a line for each field.

    A field differs if its value is not one that the table allows, or, for fields outside the table, not the
    default.
    """
    allowed = {name: value for entry in table for name, value in entry.allowed(model).items()}
    off = {field.name: field.default for field in fields(GPTConfig) if field.name not in (*FREE, "outputs")}
    if model.positions == "learned":  # the model does not read these fields
        off = {name: value for name, value in off.items() if not name.startswith("rope_")}
    if not model.experts:  # nor these
        off = {name: value for name, value in off.items() if not name.startswith(_OF_EXPERTS)}
    if not model.recurrent_layers:
        layers = {"recurrent_layers": off["recurrent_layers"]}
        off = {name: value for name, value in off.items() if not name.startswith(_OF_RECURRENCE)} | layers
    found = []
    for name, value in (allowed | off | allowed).items():  # the table's fields first
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
    same: str | None = None,
) -> Entry:
    """A key with the value of a field.

    Args:
        name: the key.
        field: the model's field.
        kind: the value's type.
        default: the value without the key, or a function of the keys and the fields so far.
        null: whether null means None instead of the default.
        decode: computes the field from the value and the fields so far, if they differ.
        written: the property to write, or a function of the model, if it is not the field.
        same: a key that must have the same value, or may be left out if there is no default.
    """

    def read(keys: ConfigKeys, found: Fields) -> Fields:
        missing = default(keys, found) if callable(default) else default
        value = (keys.nullable if null else keys.take)(name, kind, missing)
        other = value if same is None else keys.take(same, kind, value if default is REQUIRED else default)
        if other != value:
            raise ConfigurationError(
                f"{name} = {value} and {same} = {other} are supported only if they are equal"
            )
        return {field: value if decode is None else decode(value, found)}

    def write(model: GPTConfig) -> Mapping[str, Any]:
        value = written(model) if callable(written) else getattr(model, written or field)
        return {name: value} if same is None else {name: value, same: value}

    return Entry(read, write, lambda _: {field: ANY})


def choice(name: str, field: str, values: Mapping[str, str]) -> Entry:
    """A key whose words are values of a field.

    ``values`` maps their words to ours; the first is the default. If several words mean the same value, the
    first of them is written.
    """
    theirs = {ours: word for word, ours in reversed(list(values.items()))}

    def read(keys: ConfigKeys, found: Fields) -> Fields:
        keys.only(name, *values)
        return {field: values[keys.take(name, str, next(iter(values)))]}

    return Entry(
        read, lambda model: {name: theirs[getattr(model, field)]}, lambda _: {field: tuple(values.values())}
    )


def only(name: str, *values: Any, written: bool = True) -> Entry:
    """A key with the only supported values. The first is the default, and is written if ``written``."""
    return Entry(lambda keys, _: keys.only(name, *values), lambda _: {name: values[0]} if written else {})


def fixed(**values: Any) -> Entry:
    """Fields that have one value in a family, and no key."""
    return Entry(lambda *_: values, allowed=lambda _: values)


def follows(field: str, value: Callable[[Fields], Any]) -> Entry:
    """A field without a key, computed from other fields."""
    return Entry(lambda _, found: {field: value(found)}, allowed=lambda model: {field: value(vars(model))})


def dropouts(*none: str, dropout: Sequence[str] = ()) -> Entry:
    """Dropout rates.

    Import ignores them. Export writes ``model.dropout`` to the keys of ``dropout``, and zeros.
    """
    return Entry(
        lambda keys, _: keys.only_training(*none, *dropout),
        lambda model: dict.fromkeys(none, 0.0) | dict.fromkeys(dropout, model.dropout),
    )


def ignored(name: str) -> Entry:
    """A key that transformers ignores, although the logits seem to depend on it."""
    return Entry(lambda keys, _: keys.ignored(name))


def unused(*names: str, written: str | None = None) -> Entry:
    """Keys that a causal language model does not need; written as a field, or not at all."""
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
"""As many key and value heads as query heads, and heads of width d_model / heads."""
