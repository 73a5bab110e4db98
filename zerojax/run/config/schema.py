"""The JSON schema of a config, and the documentation of its keys, from the sections themselves."""

import dataclasses
import inspect
import re
import types
import typing
from typing import Any, Literal, Union

from zerojax.run.config.run_config import RunConfig

_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string"}


def config_schema() -> dict[str, Any]:
    """The schema (draft 7) of a TOML file that ``load_config`` reads: names, types, choices, defaults."""
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "zerojax", **_table(RunConfig)}


def documentation(section: type[Any]) -> tuple[str, dict[str, str]]:
    """The text of a section before `Attributes:`, and each attribute's meaning on one line."""
    text, _, attributes = (inspect.getdoc(section) or "").partition("\nAttributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n(?:        .*)?)*)", attributes, re.MULTILINE)
    return text.strip(), {name: " ".join(meaning.split()) for name, meaning in found}


def _table(section: type[Any]) -> dict[str, Any]:
    summary, meanings = documentation(section)
    hints, keys = typing.get_type_hints(section), {}
    for field in dataclasses.fields(section):
        keys[field.name] = schema = _value(hints[field.name])
        if field.name in meanings:
            schema["description"] = meanings[field.name]
        if field.default not in (dataclasses.MISSING, None):
            schema["default"] = field.default
    return {"type": "object", "description": summary, "properties": keys, "additionalProperties": False}


def _value(kind: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _table(typing.cast(type[Any], kind))
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        choices = [_value(one) for one in arguments if one is not type(None)]
        return choices[0] if len(choices) == 1 else {"anyOf": choices}
    if origin is tuple and arguments[-1] is ...:
        return {"type": "array", "items": _value(arguments[0])}
    if origin is tuple:
        size = len(arguments)
        return {"type": "array", "items": [*map(_value, arguments)], "minItems": size, "maxItems": size}
    return {"type": _PLAIN[kind]}
