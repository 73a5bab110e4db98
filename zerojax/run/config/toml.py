"""Reads and writes a ``RunConfig`` as TOML, with errors that say what to change.

TOML is data: nothing in a file is executed, imported or expanded.
"""

import dataclasses
import difflib
import typing
from pathlib import Path
from typing import Any

import dacite
import tomli_w

from zerojax.errors import ConfigurationError
from zerojax.run.config.run_config import RunConfig
from zerojax.validation.bounds import all_at_once
from zerojax.validation.untrusted import parse_toml, printable, short


class ConfigError(ConfigurationError):
    """A settings file cannot be used; the message names the file, the key and the way out."""


def find_config(name: str) -> Path:
    """The file of a config, given by its path or by a bare name.

    A bare name such as ``gpt-tiny`` is looked up as ``./gpt-tiny.toml``, ``./configs/gpt-tiny.toml`` and
    among the configs that come with zerojax.

    Raises:
        ConfigError: there is no such file; lists the known names.
    """
    path = Path(name)
    if path.suffix == ".toml" or len(path.parts) > 1:
        if path.is_file():
            return path
        raise ConfigError(f"{name}: no such file")
    for place in _places():
        if (place / f"{name}.toml").is_file():
            return place / f"{name}.toml"
    known = known_configs()
    raise ConfigError(f"{name}: no such config{_suggest(name, known)}; there are: {known}")


def known_configs() -> list[str]:
    """The names of the configs in ./configs and of those that come with zerojax."""
    return sorted({file.stem for place in _places()[1:] for file in place.glob("*.toml")})


def _places() -> list[Path]:
    # Beside the package in a source tree, inside it in a wheel.
    return [Path(), Path("configs"), *(parent / "configs" for parent in Path(__file__).parents[2:4])]


def load_config(path: Path | str) -> RunConfig:
    """Read a TOML file.

    Raises:
        ConfigError: it is not readable, not TOML, or has an unknown key or a value of wrong type or range.
    """
    path = Path(path)
    try:
        data = parse_toml(path.read_text(encoding="utf-8-sig"))  # as editors on Windows write it
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return config_from_dict(data, origin=str(path))


def config_from_dict(data: dict[str, Any], origin: str = "config") -> RunConfig:
    """Build a ``RunConfig`` from nested dicts, as TOML and JSON give them.

    Args:
        data: section -> key -> value; missing keys take their defaults.
        origin: of the data, for error messages.

    Raises:
        ConfigError: naming ``origin``, the key and the nearest valid one.
    """
    _check_table(RunConfig, data, origin, ())
    # Accept a TOML integer for a float, and turn lists into tuples.
    hooks = {float: lambda value: float(value) if type(value) is int else value}
    try:
        with all_at_once():
            return dacite.from_dict(RunConfig, _tuples(data), dacite.Config(strict=True, type_hooks=hooks))
    except dacite.WrongTypeError as error:
        raise ConfigError(
            f"{origin}: {error.field_path} = {short(_look_up(data, error.field_path))} should be "
            f"{_type_name(error.field_type)}"
        ) from error
    except (dacite.DaciteError, ValueError, TypeError) as error:
        raise ConfigError(f"{origin}: {printable(str(error))}") from error


def config_to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The inverse of ``config_from_dict``; options that are None are left out."""
    return _plain(dataclasses.asdict(config))


def dump_config(config: RunConfig) -> str:
    """The config as TOML text; ``load_config`` returns an equal config."""
    return tomli_w.dumps(config_to_dict(config))


def _check_table(cls: Any, data: Any, origin: str, path: tuple[str, ...]) -> None:
    if not isinstance(data, dict):
        raise ConfigError(f"{origin}: {'.'.join(path)} should be a table, [{'.'.join(path)}]")
    types = typing.get_type_hints(cls)
    for key, value in data.items():
        dotted = ".".join((*path, key))
        if key not in types:
            raise ConfigError(f"{origin}: unknown key {printable(dotted[:100])}{_suggest_key(dotted[:100])}")
        kind = types[key]
        parts = typing.get_args(kind)
        if dataclasses.is_dataclass(kind):
            _check_table(kind, value, origin, (*path, key))
        elif parts and dataclasses.is_dataclass(parts[0]):
            if not isinstance(value, list):
                raise ConfigError(f"{origin}: {dotted} should be a list of tables, [[{dotted}]]")
            for table in value:
                _check_table(typing.cast(type, parts[0]), table, origin, (*path, key))
        elif isinstance(value, bool) and bool not in (kind, *parts):
            # In Python bool is a subclass of int, but a TOML ``true`` in place of a number is a mistake.
            raise ConfigError(f"{origin}: {dotted} = {str(value).lower()} should be {_type_name(kind)}")


def _suggest_key(dotted: str) -> str:
    """A suggestion of the nearest valid key: in this section, or of the same name in another."""
    section, _, key = dotted.rpartition(".")
    sections = typing.get_type_hints(RunConfig)
    keys = {name: [f.name for f in dataclasses.fields(cls)] for name, cls in sections.items()}
    elsewhere = [f"{name}.{key}" for name, names in keys.items() if key in names]
    if elsewhere:
        return f" (did you mean {elsewhere[0]}?)"
    nearest = difflib.get_close_matches(key, keys.get(section, list(keys)), n=1, cutoff=0.5)
    return f" (did you mean {'.'.join(filter(None, (section, *nearest)))}?)" if nearest else ""


def _suggest(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _look_up(data: Any, dotted: str | None) -> Any:
    for key in (dotted or "").split("."):
        data = data[key] if isinstance(data, dict) and key in data else data
    return data


def _plain(value: Any) -> Any:
    """Lists instead of tuples, without None, as TOML and JSON need it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _type_name(kind: Any) -> str:
    """A type in words: "a whole number", "one of full, attention, none"."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(str(argument) for argument in arguments)
    if typing.get_origin(kind) is tuple:
        return "a list: " + "; ".join(_type_name(a) for a in arguments if a is not ...)
    if arguments:
        return " or ".join(_type_name(a) for a in arguments if a is not type(None))
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))
