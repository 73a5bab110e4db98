"""``zerojax train CONFIG [--run-dir DIR] [--section.key value ...]``: train a model or resume a run."""

from dataclasses import dataclass
from pathlib import Path

from zerojax.analysis.profile import parse_steps
from zerojax.cli import on_config
from zerojax.cli.cluster import JobOptions, facts_of, joined_cluster
from zerojax.run.run_dir import Resume, RunFolder
from zerojax.run.trainer import Trainer


@dataclass(frozen=True)
class Options(JobOptions, on_config.Options):
    """Train a model, or resume its training.

    Started again on the same run folder, training resumes from the last checkpoint. Each setting of the
    config can be overridden; the defaults below are those of the config.

    Attributes:
        run_dir: Folder of the run; runs/NAME by default.
        resume: "auto" resumes if there is a checkpoint, "must" requires one, "never" refuses one.
        init_from: A run's folder or one of its checkpoints, from whose weights a new run starts, with a new
            optimizer state at step 0. Ignored by a run that resumes.
        profile: Steps to trace into RUN/profile, as start:stop, such as 10:12 for three steps.
    """

    run_dir: Path | None = None
    resume: Resume = "auto"
    init_from: Path | None = None
    profile: str | None = None


def run(arguments: list[str]) -> None:
    """Read the config and options, join the other processes, and train."""
    options = on_config.parse(Options, "train", arguments)
    folder = RunFolder(options.run_dir or Path("runs") / Path(options.config).stem)
    settings = options.settings
    profile = None if options.profile is None else parse_steps(options.profile)
    with (
        joined_cluster(
            settings.mesh,
            settings.cluster,
            options,
            facts_of(settings, **{"--resume": options.resume, "--init-from": options.init_from}),
        ) as peers,
        Trainer.open(settings, folder, options.resume, options.init_from, peers, profile) as trainer,
    ):
        trainer.train()
