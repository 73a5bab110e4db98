"""``zerojax schema``: prints the JSON schema of configs, with which editors complete and check them."""

import json
import typing
from typing import TYPE_CHECKING, Any, Literal

from zerojax.errors import ConfigurationError
from zerojax.run.config.keys import arms, documentation, keys_of, section_of
from zerojax.run.config.sections import RunConfig
from zerojax.run.config.tables import config_to_dict

if TYPE_CHECKING:
    from zerojax.run.config.keys import Section

_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string"}


def config_schema() -> dict[str, Any]:
    """The schema (draft 7) of a TOML file that ``load_config`` reads: names, types, choices, defaults."""
    table = _table(RunConfig, config_to_dict(RunConfig()))
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "zerojax", **table}


def _table(section: "Section", defaults: dict[str, Any]) -> dict[str, Any]:
    keys = {}
    for key in keys_of(section):
        default = defaults.get(key.name)
        if (inner := section_of(key.kind)) is not None:
            keys[key.name] = _table(inner, default or {})
            continue
        keys[key.name] = schema = _value(key.kind)
        if key.meaning:
            schema["description"] = key.meaning
        if default is not None:
            schema["default"] = default
    summary, _ = documentation(section)
    return {"type": "object", "description": summary, "properties": keys, "additionalProperties": False}


def _value(kind: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if (section := section_of(kind)) is not None:
        return _table(section, {})
    if origin is Literal:
        return {"enum": list(arguments)}
    if len(arms(kind)) > 1:
        return {"anyOf": [_value(one) for one in arms(kind)]}
    if origin is tuple and arguments[-1] is ...:
        return {"type": "array", "items": _value(arguments[0])}
    if origin is tuple:
        size = len(arguments)
        return {"type": "array", "items": [*map(_value, arguments)], "minItems": size, "maxItems": size}
    return {"type": _PLAIN[kind]}


def run(arguments: list[str]) -> None:
    """Print the JSON schema of configs."""
    if arguments:
        raise ConfigurationError(
            "zerojax schema takes no arguments; write it to a file: > zerojax.schema.json"
        )
    print(json.dumps(config_schema(), indent=1))
