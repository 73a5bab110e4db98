"""Finds, reads and writes the TOML files of configs.

TOML is data: nothing in a file is executed, imported or expanded.
"""

import difflib
from pathlib import Path

import tomli_w

from zerojax.documentation import page
from zerojax.errors import file_errors
from zerojax.run.config.keys import Tables
from zerojax.run.config.run_config import RunConfig
from zerojax.run.config.tables import ConfigError, checked, config_from_dict, config_to_dict
from zerojax.validation.untrusted import parse_toml

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
    """Read a TOML file.

    Raises:
        ConfigError: it is not readable, not TOML, or has an unknown key or a value of wrong type or range.
    """
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
