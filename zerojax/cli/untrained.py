"""The state of a config that is not going to be trained: what `zerojax plan` and `zerojax comm` look at."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any

import jax
import tyro

from zerojax.cli.cluster import emulate_devices
from zerojax.config import ConfigError, RunConfig, find_config, load_config
from zerojax.errors import ZeroError


@dataclass(frozen=True)
class Options:
    """Options of a command that looks at a config.

    Attributes:
        config: A TOML file, or the name of one in configs/, such as gpt-tiny. Comes first.
        json: Print JSON instead of tables.
    """

    config: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG")]
    json: bool = False
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def parse[Chosen: Options](
    command: str, description: str, arguments: list[str], options: type[Chosen] = Options
) -> Chosen:
    """Read the command line on top of the config that it names.

    Args:
        command: its name, for the help.
        description: for the help.
        arguments: of the command line.
        options: the class of the command's options, all but the config with defaults.

    Raises:
        ConfigError: no config is named, or it cannot be read.
        SystemExit: wrong options (code 2), or after --help (code 0).
    """
    settings = RunConfig()
    if arguments and not arguments[0].startswith("-"):
        settings = load_config(find_config(arguments[0]))
    elif not {"-h", "--help"} & set(arguments):
        raise ConfigError(f"{command}: name a config first: zerojax {command} CONFIG [options]")
    default = options(config=tyro.MISSING, settings=settings)
    return tyro.cli(
        options, default=default, args=arguments, prog=f"zerojax {command}", description=description
    )


def abstract_run(config: RunConfig) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """A run's state and batch without values, on emulated CPU devices: as many as its mesh asks for.

    Raises:
        ZeroError: the config does not say how large the mesh is, or its settings contradict each other.
    """
    mesh = config.mesh
    if not (mesh.nodes and mesh.local):
        raise ZeroError("which cluster? Give --mesh.nodes and --mesh.local; no device has to be there")
    jax.config.update("jax_platforms", "cpu")
    emulated = dataclasses.replace(mesh, emulate=True)
    emulate_devices(emulated, processes=1)

    from zerojax.parts import abstract_batch, abstract_state

    state = abstract_state(dataclasses.replace(config, mesh=emulated))
    return state, abstract_batch(config)
