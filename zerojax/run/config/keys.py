"""The keys of a config's tables, derived from the dataclasses that they set.

A setting is declared once: as a field of a dataclass, with its meaning below ``Attributes:``. The reader of
TOML files, the JSON schema and the options of the command line follow from that.
"""

import dataclasses
import functools
import inspect
import operator
import re
import types
import typing
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Section = type[DataclassInstance]

Tables = dict[str, dict[str, Any]]
"""Values by section and key, as TOML holds them: of all settings, or only of the settings that are given."""


class Key(NamedTuple):
    """A key of a table.

    Attributes:
        name: the key's name in the table.
        field: the field of the dataclass that holds its value.
        kind: the type of a value that is set.
        optional: whether it may be unset, such as an option that a preset sets.
        meaning: its description for users, on one line.
        override: whether the field is a table of keys that override keys of another section.
    """

    name: str
    field: str
    kind: Any
    optional: bool
    meaning: str
    override: bool = False


@functools.cache
def keys_of(section: "Section") -> tuple[Key, ...]:
    """The keys of a section, in the order of its fields.

    The metadata of a field may give its ``"key"`` another name, or None if the field is not a setting. With
    ``"overrides": (section, dataclass, keys)`` the field is a table of those keys, which override that
    section's. A section with the key "preset" sets no key by default.
    """
    _, meanings = documentation(section)
    hints, found = typing.get_type_hints(section), list[Key]()
    for field in dataclasses.fields(section):
        name, kind = field.metadata.get("key", field.name), hints[field.name]
        if "overrides" in field.metadata:
            other, others, names = field.metadata["overrides"]
            found += [
                Key(key.name, field.name, key.kind, True, f"As `{other}.{key.name}`.", override=True)
                for key in keys_of(others)
                if key.name in names
            ]
        elif name is not None:
            none = type(None) in arms(kind)
            found.append(Key(name, field.name, _written(kind), none, meanings.get(field.name, "")))
    found.sort(key=lambda key: key.name != "preset")
    has_preset = any(key.name == "preset" for key in found)
    return tuple(key._replace(optional=key.optional or has_preset) for key in found)


def documentation(section: type[Any]) -> tuple[str, dict[str, str]]:
    """The text of a section before `Attributes:`, and each attribute's meaning on one line.

    Attributes of the groups are included.
    """
    text, _, attributes = (inspect.getdoc(section) or "").replace("``", "`").partition("\nAttributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n(?:        .*)?)*)", attributes, re.MULTILINE)
    inherited = [documentation(group)[1] for group in groups_of(section)]
    own = {name: _sentence(meaning) for name, meaning in found}
    return text.strip(), functools.reduce(operator.or_, inherited, own)


def groups_of(section: type[Any]) -> list[type[Any]]:
    """The dataclasses whose fields a section inherits, in the order of its fields."""
    return [base for base in reversed(section.__bases__) if dataclasses.is_dataclass(base)]


def section_of(kind: Any) -> "Section | None":
    """The dataclass in a type, alone or in a union with None; None for the type of one value."""
    return next((one for one in arms(kind) if isinstance(one, type) and dataclasses.is_dataclass(one)), None)


def row_of(kind: Any) -> "Section | None":
    """The dataclass of the rows of a list of tables; None for any other type."""
    return section_of(typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else None


def arms(kind: Any) -> tuple[Any, ...]:
    """The types of a union; any other type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _written(kind: Any) -> Any:
    """The type of a field's value as TOML can write it: None, dtypes and classes are left out of a union."""
    if typing.get_origin(kind) is tuple:
        rows = (one if one is ... else _written(one) for one in typing.get_args(kind))
        return types.GenericAlias(tuple, tuple(rows))
    held = [
        one for one in arms(kind) if one not in (type(None), np.dtype) and typing.get_origin(one) is not type
    ]
    return functools.reduce(lambda one, other: one | other, held)


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]
