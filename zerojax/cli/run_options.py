"""What ``zerojax train`` and ``zerojax posttrain`` share: the run's folder, and its first weights."""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from zerojax.cli import on_config
from zerojax.cli.cluster import JobOptions
from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import ModelFolder, is_model, run_settings
from zerojax.run.config import RunConfig, find_config
from zerojax.run.run_dir import Resume, RunFolder


@dataclass(frozen=True)
class RunOptions(JobOptions, on_config.Options):
    """Where a run is, and what it begins with.

    Attributes:
        run_dir: Folder of the run; runs/NAME by default.
        resume: "auto" resumes if there is a checkpoint, "must" requires one, "never" refuses one.
        init_from: Start a new run from the weights of a run, a checkpoint, or the folder of a Hugging Face
            model, which also sets [model] and the tokenizer (a run that resumes uses only these two).
            Optimizer and step start afresh.
    """

    run_dir: Path | None = None
    resume: Resume = "auto"
    init_from: Path | None = None

    @property
    def folder(self) -> RunFolder:
        """The folder of the run: the one that is named, or that of its config."""
        return folder_of(self.config, self.run_dir)


def read_run[O: RunOptions](
    options: type[O], command: str, arguments: list[str]
) -> tuple[O, ModelFolder | None]:
    """Read the config and the options of a run, and the Hugging Face model that --init-from names, if any.

    Raises:
        ConfigurationError: an invalid setting, a model that zerojax does not support, or one that is gone.
    """
    named = path_of("--init-from", arguments)
    source = ModelFolder.open(named) if named is not None and is_model(named) else None

    def with_model(settings: RunConfig) -> RunConfig:
        if source is None:
            return settings
        # Read early: the config's own length may be too long for the model, which it did not know.
        length = value_of("--train.sequence-length", arguments) or ""
        folder = folder_of(arguments[0], path_of("--run-dir", arguments))
        return run_settings(source, settings, folder, int(length) if length.isdecimal() else None)

    read = on_config.parse(options, command, arguments, with_model)
    read = replace(read, settings=read.folder.here(read.settings))
    check_source(read.init_from, read.settings, read.folder, command)
    return read, source


def folder_of(config: str, run_dir: Path | None) -> RunFolder:
    """The folder of a run: the one that is named, or that of its config."""
    return RunFolder(run_dir or Path("runs") / find_config(config).stem)


def path_of(option: str, arguments: list[str]) -> Path | None:
    """As ``value_of``, of a path."""
    found = value_of(option, arguments)
    return None if found is None else Path(found)


def value_of(option: str, arguments: list[str]) -> str | None:
    """The word that follows an option, before the command line is read as a whole; None without it."""
    found = None
    for word, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            found = value if equals else following
    return found


def check_source(init_from: Path | None, settings: RunConfig, folder: RunFolder, command: str) -> None:
    """Refuse to resume from a config whose [model] came from a folder that is gone.

    Raises:
        ConfigurationError: says how to resume.
    """
    if init_from is None or init_from.exists() or not folder.config.is_file():
        return
    if folder.read_config().model != settings.model:
        raise ConfigurationError(
            f"--init-from {init_from} gave this run its [model], and is gone: "
            f"resume it by zerojax {command} {folder.config} --run-dir {folder.path}"
        )
