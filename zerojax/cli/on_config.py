"""Command lines that name a config and override settings: ``COMMAND CONFIG [--section.key value ...]``."""

from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated

import tyro

from zerojax.cli.options import option_table, read_options
from zerojax.run.config import ConfigError, RunConfig, config_from_dict, find_config, load_config, spelled_out
from zerojax.run.config.keys import Tables
from zerojax.run.config.tables import load_tables, merged


@dataclass(frozen=True)
class Options:
    """Options of every such command; a command's own options are a subclass.

    Attributes:
        config: A TOML file, or the name of one in configs/, such as gpt-tiny.
        settings: The settings that the command line gives, by section.
        help: Show this help, with the defaults of CONFIG if it is named, and exit.
    """

    config: Annotated[
        tyro.conf.Positional[str | None], tyro.conf.arg(metavar="CONFIG", help_behavior_hint="")
    ] = None
    settings: Annotated[Tables, tyro.conf.arg(name="", constructor=option_table(RunConfig))] = field(
        default_factory=dict
    )
    help: Annotated[bool, tyro.conf.arg(aliases=("-h",)), tyro.conf.FlagCreatePairsOff] = False


def parse[Chosen: Options](
    options: type[Chosen],
    command: str,
    arguments: list[str],
    between: Callable[[Chosen, Tables], Tables] = lambda options, tables: {},
    *,
    without_config: bool = False,
) -> tuple[Chosen, RunConfig]:
    """Read the command line, and the config whose settings it overrides.

    Args:
        options: the class of the options, all with defaults; its docstring is the text of --help.
        command: the command's name.
        arguments: the command line, without the program and the command.
        between: returns settings that override the file and are overridden by the command line. It gets the
            options, and the settings of the file and the command line.
        without_config: whether the command may name no config.

    Raises:
        ConfigError: no config is named, it cannot be read, or a setting is wrong.
        SystemExit: wrong options (code 2), or after --help (code 0).
    """
    chosen = read_options(options, command, arguments, helps=False)
    if chosen.help:
        config = RunConfig() if chosen.config is None else load_config(find_config(chosen.config))
        read_options(_showing(options, config), command, ["--help"])
    if chosen.config is None and not without_config:
        raise ConfigError(f"{command}: name a config first: zerojax {command} CONFIG [options]")
    file = None if chosen.config is None else find_config(chosen.config)
    tables = {} if file is None else load_tables(file)
    further = between(chosen, merged(tables, chosen.settings))
    # If only the file can be wrong, the error names it. An error on the command line names the option.
    origin = "" if file is None or any(chosen.settings.values()) else str(file)
    return chosen, config_from_dict(merged(tables, further, chosen.settings), origin)


def _showing(options: type[Options], config: RunConfig) -> type[Options]:
    """The same options for --help, with a config's settings as defaults."""
    table = option_table(RunConfig, spelled_out(config))
    settings = Annotated[Tables, tyro.conf.arg(name="", constructor=table)]
    no_help = Annotated[bool, tyro.conf.arg(name="helps"), tyro.conf.Suppress]  # tyro adds its own
    fields = [("settings", settings, field(default_factory=dict)), ("help", no_help, field(default=False))]
    shown = make_dataclass(options.__name__, fields, bases=(options,), frozen=True)
    shown.__doc__ = options.__doc__
    return shown
