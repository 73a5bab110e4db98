"""Command lines that name a config and override settings: ``COMMAND CONFIG [--section.key value ...]``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from zerojax.cli.options import read_options
from zerojax.run.config import ConfigError, RunConfig, find_config, load_config


@dataclass(frozen=True)
class Options:
    """Options of every such command; a command's own options are a subclass.

    Attributes:
        config: A TOML file, or the name of one in configs/, such as gpt-tiny. Comes first.
        settings: Those of the config, overridden by the command line.
    """

    config: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG")]
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def parse[Chosen: Options](
    options: type[Chosen],
    command: str,
    arguments: list[str],
    change: Callable[[RunConfig], RunConfig] = lambda settings: settings,
) -> Chosen:
    """Read the config and the command line that overrides it.

    Args:
        options: the class of the command's options, all but the config with defaults, documented for --help.
        command: name of the command.
        arguments: of the command line.
        change: of the config's settings, before the command line overrides them.

    Raises:
        ConfigError: no config is named, or it cannot be read.
        SystemExit: wrong options (code 2), or after --help (code 0).
    """
    settings = RunConfig()
    if arguments and not arguments[0].startswith("-"):
        settings = change(load_config(find_config(arguments[0])))
    elif not {"-h", "--help"} & set(arguments):
        raise ConfigError(f"{command}: name a config first: zerojax {command} CONFIG [options]")
    default = options(config=tyro.MISSING, settings=settings)
    return read_options(options, command, arguments, default)
