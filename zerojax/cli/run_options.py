"""The common part of ``zerojax train`` and ``zerojax posttrain``: the run's folder and first weights."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zerojax.analysis.plan import describe_plan
from zerojax.cli import on_config
from zerojax.cli.cluster import JobOptions
from zerojax.cli.trained import emulated_setup
from zerojax.errors import ConfigurationError, RunError
from zerojax.interop.huggingface import (
    ModelFolder,
    ModelReader,
    check_template,
    is_model,
    run_settings,
    save_tokenizer,
)
from zerojax.models.config import GPTConfig
from zerojax.multihost import standby
from zerojax.run import checkpoints, recovery
from zerojax.run.config import RunConfig, find_config, saved_config
from zerojax.run.config.keys import Tables
from zerojax.run.config.tables import merged, table_of
from zerojax.run.data.dataset import open_tokenizer, tokenizer_file
from zerojax.run.data.formats import DataError, user_path
from zerojax.run.data.tokenizer import ByteTokenizer
from zerojax.run.inputs import check_inputs
from zerojax.run.run_dir import Resume, RunFolder, check_same_model, check_start
from zerojax.run.weights import changes_since


@dataclass(frozen=True)
class RunOptions(JobOptions, on_config.Options):
    """A run's folder, and its first weights.

    Attributes:
        run_dir: Folder of the run; runs/NAME by default.
        resume: "auto" resumes if there is a checkpoint, "must" requires one, "never" refuses one.
        init_from: Start a new run from the weights of a run, a checkpoint, or the folder of a Hugging Face
            model. The model's shape and tokenizer come with them; optimizer and step start afresh. A run that
            resumes takes only the shape and tokenizer from a Hugging Face model.
        dry_run: Check the settings and files, show what the run would do, and stop; uses no device and writes
            nothing.
    """

    run_dir: Path | None = None
    resume: Resume = "auto"
    init_from: Path | None = None
    dry_run: bool = False

    @property
    def folder(self) -> RunFolder:
        """The run's folder: the named one, or the default for its config."""
        assert self.config is not None  # ``on_config.parse`` refuses that
        return RunFolder(self.run_dir or Path("runs") / find_config(self.config).stem)


def read_run[O: RunOptions](
    options: type[O], command: str, arguments: list[str], further: Callable[[O, Tables], Tables] | None = None
) -> tuple[O, RunConfig, ModelFolder | None]:
    """Read the config and the options of a run, and the Hugging Face model that --init-from names, if any.

    ``further`` returns settings that the command's own options imply. It gets the options and the settings so
    far.
    """
    source: ModelFolder | None = None

    def between(chosen: O, tables: Tables) -> Tables:
        nonlocal source
        named, found = chosen.init_from, Tables()
        if named is not None and not named.exists():
            found = _as_started(named, chosen.folder)
        elif named is not None and is_model(named):
            source = ModelFolder.open(named)
            found = run_settings(source, tables, chosen.folder)
        elif named is not None:
            found = _as_trained(named, tables, chosen.folder)
        return found if further is None else merged(found, further(chosen, merged(tables, found)))

    read, settings = on_config.parse(options, command, arguments, between)
    settings = read.folder.here(settings)
    # A restart continues from memory even while the store fails.
    restarts = any(name in os.environ for name in (recovery.VARIABLE, standby.VARIABLE))
    if settings.checkpoint.copy_to and not (read.dry_run or restarts):
        checkpoints.check_copy(settings.checkpoint.copy_to)
    return read, settings, source


def _as_started(named: Path, folder: RunFolder) -> Tables:
    """The shape and the tokenizer of a run that resumes, if the --init-from that gave them is gone.

    Refuses a new run.
    """
    if folder.config.is_file():
        before = folder.read_config()
        return {"model": _shape(before.model), "data": {"tokenizer": before.data.tokenizer}}
    hub = re.fullmatch(r"[\w-]+/[\w.-]+", str(named))
    raise ConfigurationError(
        f"--init-from {named}: no such folder"
        + f". zerojax downloads nothing: get a model from Hugging Face's hub by `hf download {named} "
        f"--local-dir {named.name}`, and pass --init-from {named.name}" * (hub is not None)
    )


def _shape(model: GPTConfig, *more: str) -> dict[str, Any]:
    """The settings of [model], without the ones that another run may have otherwise, and ``more``."""
    own = {"attention", "loss_chunk", "token_tile", "dropout", *more}
    return {key: value for key, value in table_of(model).items() if key not in own}


def _as_trained(named: Path, tables: Tables, folder: RunFolder) -> Tables:
    """The shape and the tokenizer of the run that --init-from names, which replace the ones in ``tables``."""
    try:
        path = checkpoints.find(named)
        before = checkpoints.read_manifest(path).record.config
    except (ConfigurationError, RunError):  # a run that needs the weights reports this later
        return {}
    if "model" not in before:  # a custom loop wrote the checkpoint
        return {}
    theirs, outputs = saved_config(before), tables.get("model", {}).get("outputs")
    more = () if outputs is None else ("outputs",) if outputs == theirs.model.outputs else ("outputs", "tied")
    if folder.config.is_file():
        tokenizer = folder.read_config().data.tokenizer
    else:
        tokenizer = _their_tokenizer(theirs, path, tables.get("data", {}).get("tokenizer"))
    return {"model": _shape(theirs.model, *more), "data": {"tokenizer": tokenizer}}


def _their_tokenizer(theirs: RunConfig, checkpoint: Path, given: str | None) -> str:
    """The value of data.tokenizer for the tokenizer of a checkpoint's run; ``given`` if that is gone."""
    folder = RunFolder(checkpoint.parent.parent)
    data = folder.here(theirs).data
    if (file := tokenizer_file(data, folder.data)).is_file():
        return str(file.absolute())
    try:
        found = open_tokenizer(data, folder.data)
    except DataError as error:
        if given is not None:
            return given
        raise ConfigurationError(
            f"--init-from {checkpoint}: its tokenizer is gone; name one in data.tokenizer. {error}"
        ) from error
    return "byte" if isinstance(found, ByteTokenizer) else str(user_path(data.tokenizer).absolute())


def show_plan(
    options: RunOptions,
    settings: RunConfig,
    source: ModelFolder | None,
    check: Callable[[RunConfig, checkpoints.Manifest | None], RunConfig] = lambda settings, _: settings,
) -> None:
    """Print what a run would do, after checking its settings, files and sources; for --dry-run.

    ``source`` is the Hugging Face model with the run's first weights, if any. ``check`` is the command's own
    check. It gets the settings and the manifest of the run's newest checkpoint, and returns the settings that
    the run would have.
    """
    folder, setup = options.folder, emulated_setup(settings)
    setup.check_settings()
    folder.check()
    latest = checkpoints.newest_valid(folder.checkpoints, checksums=settings.checkpoint.verify).step
    check_start(latest, options.resume, folder)
    folder.check_config()
    manifest = None if latest is None else checkpoints.read_manifest(folder.checkpoints / str(latest))
    settings = check(settings, manifest)
    with TemporaryDirectory() as place:
        data, own = settings.data, folder.tokenizer
        if source is not None and data.tokenizer == str(own.absolute()) and not own.is_file():
            # The run would write it first.
            check_template(source, settings, folder)
            save_tokenizer(source, Path(place) / own.name)
            data = replace(data, tokenizer=str(Path(place) / own.name))
        check_inputs(replace(settings, data=data), folder, manifest)
    begins = _beginning(options, settings, manifest)
    print(describe_plan(setup.abstract_state))
    print(f"{folder.path}: {begins}, and train until step {settings.train.steps:,}; nothing was written")


def _beginning(options: RunOptions, settings: RunConfig, manifest: checkpoints.Manifest | None) -> str:
    """A description of how a run would begin."""
    folder = options.folder
    if manifest is not None and manifest.record.position:
        changes_since(manifest, settings, folder)
        return f"would resume from step {manifest.step}"
    if options.init_from is not None:
        return f"would begin with the weights of {ModelReader().find(options.init_from)}"
    if manifest is None:
        return "would begin with random weights"
    check_same_model(saved_config(manifest.record.config), settings, folder)
    return f"would begin with the weights of {folder.checkpoints / str(manifest.step)}"
