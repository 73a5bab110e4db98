"""Command lines that name a config and override settings: ``COMMAND CONFIG [--section.key value ...]``."""

from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated

import tyro

from zerojax.cli.options import option_table, read_options
from zerojax.run.config import ConfigError, RunConfig, config_from_dict, find_config, load_config
from zerojax.run.config.keys import Tables
from zerojax.run.config.tables import complete, merged
from zerojax.run.config.toml import load_tables


@dataclass(frozen=True)
class Options:
    """Options of every such command; a command's own options are a subclass.

    Attributes:
        config: A TOML file, or the name of one in configs/, such as gpt-tiny.
        given: The settings that the command line gives, by section.
        help: Show this help, with the defaults of CONFIG if it is named, and exit.
    """

    config: Annotated[
        tyro.conf.Positional[str | None], tyro.conf.arg(metavar="CONFIG", help_behavior_hint="")
    ] = None
    given: Annotated[Tables, tyro.conf.arg(name="", constructor=option_table(RunConfig))] = field(
        default_factory=dict
    )
    help: Annotated[bool, tyro.conf.arg(aliases=("-h",)), tyro.conf.FlagCreatePairsOff] = False


def parse[Chosen: Options](
    options: type[Chosen],
    command: str,
    arguments: list[str],
    between: Callable[[Chosen, Tables], Tables] = lambda options, tables: {},
) -> tuple[Chosen, RunConfig]:
    """Read the command line, and the config whose settings it overrides.

    Args:
        options: the class of the command's options, all with defaults, documented for --help.
        command: name of the command.
        arguments: of the command line.
        between: settings that override those of the file, and are overridden by those of the command line;
            from the options, and the settings without these.

    Raises:
        ConfigError: no config is named, it cannot be read, or a setting is wrong.
        SystemExit: wrong options (code 2), or after --help (code 0).
    """
    chosen = read_settings(options, command, arguments)
    if chosen.config is None:
        raise ConfigError(f"{command}: name a config first: zerojax {command} CONFIG [options]")
    path = find_config(chosen.config)
    return chosen, settings_of(load_tables(path), chosen, lambda tables: between(chosen, tables), str(path))


def read_settings[Chosen: Options](options: type[Chosen], command: str, arguments: list[str]) -> Chosen:
    """Read the options and settings of a command line; arguments and errors as for ``parse``."""
    chosen = read_options(options, command, arguments, helps=False)
    if chosen.help:
        config = RunConfig() if chosen.config is None else load_config(find_config(chosen.config))
        table = option_table(RunConfig, complete(config))
        given = Annotated[Tables, tyro.conf.arg(name="", constructor=table)]
        no_help = Annotated[bool, tyro.conf.arg(name="helps"), tyro.conf.Suppress]  # tyro adds its own
        shown = make_dataclass(
            options.__name__,
            [("given", given, field(default_factory=dict)), ("help", no_help, field(default=False))],
            bases=(options,),
            frozen=True,
        )
        shown.__doc__ = options.__doc__
        read_options(shown, command, ["--help"])
    return chosen


def settings_of(
    tables: Tables, chosen: Options, between: Callable[[Tables], Tables], origin: str
) -> RunConfig:
    """The settings of a file, overridden by those of a command line; see ``parse``.

    Args:
        tables: of the file.
        chosen: the options of the command line.
        between: as for ``parse``.
        origin: the file, for errors; what the command line gives has its name in them.

    Raises:
        ConfigError: a setting is wrong.
    """
    given = merged(chosen.given)
    middle = between(merged(tables, chosen.given))
    return config_from_dict(merged(tables, middle, chosen.given), "" if any(given.values()) else origin)
