"""Finds, reads and writes configs: TOML files, and the tables in them.

Errors say what to change. TOML is data: nothing in a file is executed, imported or expanded.
"""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomli_w

from zerojax.documentation import page
from zerojax.errors import ConfigurationError, file_errors
from zerojax.matmul.lora import LoRA
from zerojax.run.config.keys import Tables, arms, keys_of, row_of, section_of
from zerojax.run.config.sections import RunConfig
from zerojax.validation.bounds import all_at_once, require
from zerojax.validation.untrusted import parse_toml, printable, short
from zerojax.zero_config import PRESETS, ZeroConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from zerojax.run.config.keys import Section

_TORCHTITAN = {"job", "training", "parallelism", "activation_checkpoint", "lr_scheduler", "profiling"}
"""Tables of torchtitan's configs."""


class ConfigError(ConfigurationError):
    """A config cannot be used; the message names the file, the key and the way out."""


def config_from_dict(data: Mapping[str, Any], origin: str = "config") -> RunConfig:
    """Build a ``RunConfig`` from nested dicts, as TOML and JSON give them.

    Missing keys get their defaults.
    """
    tables = checked(data, origin)
    sections = {key.name: section_of(key.kind) for key in keys_of(RunConfig)}
    try:
        with all_at_once():
            found = {
                name: _section(section, tables.get(name, {}))
                for name, section in sections.items()
                if section is not None and name != "zero"
            }
            frozen = _frozen_by_default(found["lora"], found["model"].outputs)
            zero: dict[str, Any] = {"preset": ZeroConfig.base, "frozen": frozen} | tables.get("zero", {})
            return RunConfig(**found, zero=ZeroConfig.preset(zero.pop("preset"), **zero))
    except (ValueError, TypeError) as error:
        raise ConfigError(_labelled(origin, printable(str(error)))) from error


def saved_config(data: Mapping[str, Any]) -> RunConfig:
    """The settings in a checkpoint, perhaps of an earlier zerojax; errors as ``config_from_dict``."""
    zero = data.get("zero", {})
    # Early checkpoints have only the preset's name, and "zero++" then was the published form.
    if zero.get("preset") == "zero++" and not PRESETS["zero++"].keys() <= zero.keys():
        return config_from_dict({**data, "zero": {**zero, "preset": "zero++-paper"}})
    return config_from_dict(data)


def with_settings(config: RunConfig, tables: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The config with some settings replaced by ``tables``; errors as ``config_from_dict``."""
    return config_from_dict(merged(config_to_dict(config), tables), "")


def merged(*tables: Mapping[str, Mapping[str, Any]]) -> Tables:
    """Merges tables: later ones override earlier ones, and None unsets a key."""
    result: Tables = {}
    for one in tables:
        for name, table in one.items():
            result.setdefault(name, {}).update(table)
    return result


def config_to_dict(config: RunConfig) -> Tables:
    """The inverse of ``config_from_dict``. Options that are None, or equal to the preset's, are left out."""
    tables = spelled_out(config)
    preset = zero_to_table(ZeroConfig.preset(config.zero.base))
    preset["frozen"] = _plain(_frozen_by_default(config.lora, config.model.outputs))
    zero = tables["zero"].items()
    return tables | {"zero": {key: x for key, x in zero if key == "preset" or x != preset[key]}}


def spelled_out(config: RunConfig) -> Tables:
    """The settings in the form of checkpoints.

    It has every option of the preset, because presets may change.
    """
    tables = {key.name: table_of(getattr(config, key.field) or LoRA()) for key in keys_of(RunConfig)}
    tables["zero"] = zero_to_table(config.zero)
    if config.lora is None:
        tables["lora"]["rank"] = 0
    return {name: _set_only(table) for name, table in tables.items()}


def table_of(section: "DataclassInstance") -> dict[str, Any]:
    """The values of a section by key."""
    table = {}
    for key in keys_of(type(section)):
        value = getattr(section, key.field)
        table[key.name] = _plain(value.get(key.name) if key.override else value)
    return table


def zero_to_table(zero: ZeroConfig) -> dict[str, Any]:
    """[zero] with every key; "compute" stands for None."""
    table = table_of(zero) | {"grads": [fmt or "compute" for fmt in zero.grads]}
    return {key: "compute" if value is None else value for key, value in table.items()}


def _section(section: "Section", table: Mapping[str, Any]) -> Any:
    if issubclass(section, LoRA):
        rank = table.get("rank", 0)
        require(rank >= 0, f"lora.rank = {rank} must be 0 (no adapters) or more")
        given: dict[str, Any] = {**table, "rank": max(rank, 1)}
        lora = LoRA(**given)  # validates the other keys even if the rank is 0
        return lora if rank else None
    own: dict[str, Any] = {}
    for key in keys_of(section):
        if key.name in table and key.override:
            own.setdefault(key.field, {})[key.name] = table[key.name]
        elif key.name in table:
            value, row = table[key.name], row_of(key.kind)
            own[key.field] = value if row is None else tuple(row(**one) for one in value)
    return section(**own)


def _frozen_by_default(lora: LoRA | None, outputs: int | None) -> tuple[str, ...]:
    """The default of zero.frozen: with adapters, all other weights except a reward model's new head."""
    if lora is None:
        return ()
    return ("*",) if outputs is None else ("*", "!head/*")


def checked(data: Mapping[str, Any], origin: str) -> Tables:
    """The tables of a config with values of the right types: tuples for lists, floats for whole numbers.

    Raises:
        ConfigError: a key is unknown, or has another type; the message names ``origin``.
    """
    try:
        return _value(RunConfig, data, "")
    except _WrongError as error:
        raise ConfigError(_labelled(origin, str(error))) from None


class _WrongError(Exception):
    """A key is unknown or missing, or its value has another type."""


def _value(kind: Any, value: Any, path: str) -> Any:
    """A value of a TOML file, at a path of keys, converted to a type."""
    for arm in arms(kind):
        parts, fits = typing.get_args(arm), isinstance(value, list | tuple)
        if dataclasses.is_dataclass(arm) and isinstance(value, Mapping):
            return _table(typing.cast("Section", arm), value, path)
        if typing.get_origin(arm) is Literal:
            if any(value == one and type(value) is type(one) for one in parts):
                return value
        elif typing.get_origin(arm) is tuple:
            if fits and parts[-1] is ...:
                return tuple(_value(parts[0], one, path) for one in value)
            if fits and len(parts) == len(value):
                return tuple(_value(part, one, path) for part, one in zip(parts, value, strict=True))
        elif arm is float and type(value) is int:
            return float(value)
        elif type(value) is arm:  # bool is a subclass of int, but "true" is not a number
            return value
    shown = str(value).lower() if isinstance(value, bool) else short(value)
    raise _WrongError(f"{path} = {shown} should be {_type_name(kind, path)}")


def _table(section: "Section", data: Mapping[str, Any], path: str) -> dict[str, Any]:
    keys, found = {key.name: key for key in keys_of(section)}, {}
    for name, value in data.items():
        dotted = f"{path}.{name}" if path else name
        if name not in keys:
            if not path and len(_TORCHTITAN & data.keys()) > 1:
                raise _WrongError(
                    f"this is a config of torchtitan: translate it by the table of keys in {page('migrate')}"
                )
            raise _WrongError(f"unknown key {printable(dotted[:100])}{_suggest_key(dotted[:100])}")
        if value is not None:
            found[name] = _value(keys[name].kind, value, dotted)
    for field in dataclasses.fields(section):
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in found:
            raise _WrongError(f"{path}: each table needs the key {field.name}")
    return found


def _labelled(origin: str, message: str) -> str:
    return f"{origin}: {message}" if origin else message


def _suggest_key(dotted: str) -> str:
    """A suggestion of the nearest valid key: in this section, or the same name in another section."""
    section, _, key = dotted.rpartition(".")
    names = {
        top.name: [one.name for one in keys_of(inner)]
        for top in keys_of(RunConfig)
        if (inner := section_of(top.kind)) is not None
    }
    elsewhere = [f"{name}.{key}" for name, keys in names.items() if key in keys]
    if elsewhere:
        return f" (did you mean {elsewhere[0]}?)"
    nearest = difflib.get_close_matches(key, names.get(section, list(names)), n=1, cutoff=0.5)
    return f" (did you mean {'.'.join(filter(None, (section, *nearest)))}?)" if nearest else ""


def _set_only(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def _plain(value: Any) -> Any:
    """Lists for tuples, and tables without None for dataclasses."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _set_only(table_of(value))
    return value


def _type_name(kind: Any, path: str) -> str:
    """A type's description for messages: "a whole number", "one of full, attention, none"."""
    arguments = typing.get_args(kind)
    if section_of(kind) is not None:
        return f"a table, [{path}]"
    if row_of(kind) is not None:
        return f"a list of tables, [[{path}]]"
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if typing.get_origin(kind) is tuple:
        return "a list: " + "; ".join(_type_name(one, path) for one in arguments if one is not ...)
    if arguments:
        return " or ".join(_type_name(one, path) for one in arguments)
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[kind]


_OF_MAXTEXT = f"For MaxText and other programs, translate it by the tables in {page('migrate')}."
_OTHERS = {
    **dict.fromkeys((".yml", ".yaml"), _OF_MAXTEXT),
    ".json": "`zerojax from-deepspeed` converts a DeepSpeed config.",
}
"""The advice for another program's config, by the suffix of its file."""


def find_config(name: str) -> Path:
    """The file of a config, given by its path or by a bare name.

    A bare name such as ``gpt-tiny`` is looked up as ``./gpt-tiny.toml``, ``./configs/gpt-tiny.toml`` and
    among the configs that come with zerojax.
    """
    path = Path(name)
    if path.suffix in _OTHERS and path.is_file():
        raise ConfigError(f"{name}: configs are TOML files. {_OTHERS[path.suffix]}")
    if path.suffix == ".toml" or len(path.parts) > 1:
        if path.is_file():
            return path
        raise ConfigError(f"{name}: {'a folder, not a file' if path.is_dir() else 'no such file'}")
    for place in _places():
        if (place / f"{name}.toml").is_file():
            return place / f"{name}.toml"
    known = known_configs()
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    suggestion = f" (did you mean {nearest[0]}?)" if nearest else ""
    raise ConfigError(f"{name}: no such config{suggestion}; there are: {known}")


def known_configs() -> list[str]:
    """The names of the configs in ./configs and of the configs that come with zerojax."""
    return sorted({file.stem for place in _places()[1:] for file in place.glob("*.toml")})


def _places() -> list[Path]:
    # Beside the package in a source tree, inside it in a wheel.
    return [Path(), Path("configs"), *(parent / "configs" for parent in Path(__file__).parents[2:4])]


def load_config(path: Path | str) -> RunConfig:
    """Read a TOML file."""
    return config_from_dict(load_tables(path), origin=str(path))


def load_tables(path: Path | str) -> Tables:
    """Read the settings that a TOML file sets."""
    path = Path(path)
    with file_errors(path, ConfigError, content="not valid TOML"):
        data = parse_toml(path.read_text(encoding="utf-8-sig"))  # as editors on Windows write it
    return checked(data, origin=str(path))


def dump_config(config: RunConfig) -> str:
    """The config as TOML text; ``load_config`` returns an equal config."""
    return tomli_w.dumps(config_to_dict(config))
