"""``zerojax posttrain CONFIG [--run-dir DIR] [--section.key value ...]``: train a model by rewards."""

from dataclasses import dataclass
from pathlib import Path

from zerojax.cli import on_config
from zerojax.cli.cluster import JobOptions, facts_of, joined_cluster
from zerojax.interop.huggingface import ModelReader
from zerojax.posttrain.trainer import PostTrainer
from zerojax.run.run_dir import Resume, RunFolder


@dataclass(frozen=True)
class Options(JobOptions, on_config.Options):
    """Train a model by rewards for its own completions, or resume that.

    Started again on the same run folder, training resumes from the last checkpoint. Each setting of the
    config can be overridden; the defaults below are those of the config.

    Attributes:
        run_dir: Folder of the run; runs/NAME by default.
        resume: "auto" resumes if there is a checkpoint, "must" requires one, "never" refuses one.
        init_from: A run's folder or one of its checkpoints, from whose weights a new run starts. Ignored by a
            run that resumes.
    """

    run_dir: Path | None = None
    resume: Resume = "auto"
    init_from: Path | None = None


def run(arguments: list[str]) -> None:
    """Read the config and options, join the other processes, and train."""
    options = on_config.parse(Options, "posttrain", arguments)
    folder = RunFolder(options.run_dir or Path("runs") / Path(options.config).stem)
    settings = options.settings
    facts = facts_of(settings, **{"--resume": options.resume, "--init-from": options.init_from})
    with (
        joined_cluster(settings.mesh, settings.cluster, options, facts) as peers,
        PostTrainer.open(
            settings, folder, options.resume, options.init_from, peers, ModelReader()
        ) as trainer,
    ):
        trainer.train()
