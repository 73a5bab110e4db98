"""``zerojax train CONFIG [--run-dir DIR] [--section.key value ...]``: train a model or resume a run."""

from dataclasses import dataclass, replace
from pathlib import Path

from zerojax.analysis.profile import parse_steps
from zerojax.cli import on_config
from zerojax.cli.cluster import JobOptions, facts_of, joined_cluster
from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import (
    ModelFolder,
    ModelReader,
    adapter_lora,
    begin_run,
    is_model,
    load_adapter,
    run_settings,
)
from zerojax.run.config import LoRASection, RunConfig
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
            optimizer state at step 0; or the folder of a Hugging Face model, which also sets [model] and the
            tokenizer. Ignored by a run that resumes, but for the last two.
        adapter: The folder of a PEFT adapter, with whose matrices those of a new run start; sets [lora] if
            lora.rank is 0. The run's base is an imported model, or from --init-from.
        profile: Steps to trace into RUN/profile, as start:stop, such as 10:12 for three steps.
    """

    run_dir: Path | None = None
    resume: Resume = "auto"
    init_from: Path | None = None
    adapter: Path | None = None
    profile: str | None = None


def run(arguments: list[str]) -> None:
    """Read the config and options, join the other processes, and train."""
    source = named_model(arguments)
    options = on_config.parse(
        Options,
        "train",
        arguments,
        lambda settings: (
            settings
            if source is None
            else run_settings(source, settings, folder_of(arguments[0], value_of("--run-dir", arguments)))
        ),
    )
    folder = folder_of(options.config, options.run_dir)
    settings = options.settings
    if settings.posttrain.method != "none":
        raise ConfigurationError(
            f'posttrain.method = "{settings.posttrain.method}" is for zerojax posttrain: run that, or leave '
            "it out"
        )
    check_source(options.init_from, settings, folder)
    if options.adapter is not None and not settings.lora.rank:
        settings = replace(settings, lora=LoRASection(**vars(adapter_lora(options.adapter, settings.model))))
    from_files = {"--init-from": options.init_from, "--adapter": options.adapter}
    profile = None if options.profile is None else parse_steps(options.profile)
    facts = facts_of(settings, **{"--resume": options.resume} | from_files)
    with joined_cluster(settings.mesh, settings.cluster, options, facts) as peers:
        if source is not None:
            begin_run(source, settings, folder)
        with Trainer.open(
            settings, folder, options.resume, options.init_from, peers, profile, ModelReader()
        ) as trainer:
            if trainer.step == 0:
                for note in () if source is None else source.notes:
                    trainer.log.say(note)
                if options.adapter is not None:
                    start_from(options.adapter, trainer)
            trainer.train()


def folder_of(config: str, run_dir: Path | None) -> RunFolder:
    """The folder of a run: the one that is named, or that of its config."""
    return RunFolder(run_dir or Path("runs") / Path(config).stem)


def named_model(arguments: list[str]) -> ModelFolder | None:
    """The Hugging Face model that --init-from names, if it names one.

    Raises:
        ConfigurationError: the model is one that zerojax does not support.
    """
    path = value_of("--init-from", arguments)
    return ModelFolder.open(path) if path is not None and is_model(path) else None


def value_of(option: str, arguments: list[str]) -> Path | None:
    """The path that follows an option, before the command line is read as a whole; None without it."""
    found = None
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            found = Path(value if equals else following)
    return found


def check_source(init_from: Path | None, settings: RunConfig, folder: RunFolder) -> None:
    """Refuse to resume from a config whose [model] came from a folder that is gone.

    Raises:
        ConfigurationError: says how to resume.
    """
    if init_from is None or init_from.exists() or not folder.config.is_file():
        return
    if folder.read_config().model != settings.model:
        raise ConfigurationError(
            f"--init-from {init_from} is gone, which gave this run its [model]: "
            f"resume it by zerojax train {folder.config} --run-dir {folder.path}"
        )


def start_from(adapter: Path, trainer: Trainer) -> None:
    """Replace the adapters of a new run by those of PEFT's files.

    Raises:
        ConfigurationError: they do not fit the run, or its other weights are random.
    """
    if not trainer.base:
        raise ConfigurationError(
            f"--adapter {adapter}: the other weights of this run are random: import the model that the "
            "adapter belongs to by zerojax import, and train that run, or name one in --init-from"
        )
    trainer.state = load_adapter(trainer.state, adapter, trainer.config.model)
    trainer.log.say(f"beginning with the adapters of {adapter}")
