"""`zerojax train CONFIG [--run-dir DIR] [--section.key value ...]`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from zerojax.cli.cluster import facts_of, joined_cluster
from zerojax.config import ConfigError, RunConfig, find_config, load_config
from zerojax.profile import parse_steps
from zerojax.run_folder import Resume, RunFolder


@dataclass(frozen=True)
class Options:
    """Train a model, or go on training it.

    Started again on the same run folder, training goes on from the last checkpoint. Each setting of
    the config can be overridden; the defaults below are those of the config.

    Attributes:
        config: A TOML file, or the name of one in configs/, such as gpt-tiny. Comes first.
        run_dir: Folder of the run; runs/NAME by default.
        resume: "auto" goes on where there is a checkpoint, "must" insists on one, "never" refuses to.
        init_from: A run's folder or one of its checkpoints, whose weights a new run begins with; its
            optimizer and its steps start afresh. A run that goes on ignores it.
        profile: Steps to trace into RUN/profile, as start:stop, such as 10:12 for three steps.
        coordinator: host:port of process 0, where no cluster manager starts the processes.
        process_id: Which of the processes this is.
        num_processes: How many processes there are.
    """

    config: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG")]
    run_dir: Path | None = None
    resume: Resume = "auto"
    init_from: Path | None = None
    profile: str | None = None
    coordinator: str | None = None
    process_id: int | None = None
    num_processes: int | None = None
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def parse(arguments: list[str]) -> Options:
    """Read the command line on top of the config that it names.

    Raises:
        ConfigError: no config is named, or it cannot be read.
        SystemExit: wrong options (code 2), or after --help (code 0).
    """
    settings = RunConfig()
    if arguments and not arguments[0].startswith("-"):
        settings = load_config(find_config(arguments[0]))
    elif not {"-h", "--help"} & set(arguments):
        raise ConfigError("train: name a config first: zerojax train CONFIG [options]")
    default = Options(config=tyro.MISSING, settings=settings)
    return tyro.cli(Options, default=default, args=arguments, prog="zerojax train")


def run(arguments: list[str]) -> None:
    """Parse, join the cluster, train."""
    options = parse(arguments)
    folder = RunFolder(options.run_dir or Path("runs") / Path(options.config).stem)
    settings = options.settings
    profile = None if options.profile is None else parse_steps(options.profile)
    with joined_cluster(
        settings.mesh,
        settings.cluster,
        coordinator=options.coordinator,
        process_id=options.process_id,
        num_processes=options.num_processes,
        facts=facts_of(settings, **{"--resume": options.resume, "--init-from": options.init_from}),
    ) as peers:
        from zerojax.trainer import Trainer  # only now may devices be touched

        with Trainer.open(settings, folder, options.resume, options.init_from, peers, profile) as trainer:
            trainer.train()
