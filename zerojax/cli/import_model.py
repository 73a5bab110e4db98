"""``zerojax import MODEL RUN [CONFIG] [--section.key value ...]``: start a run from a Hugging Face model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from zerojax.cli import on_config
from zerojax.cli.cluster import joined_cluster
from zerojax.interop.huggingface import ModelFolder, import_model, run_settings
from zerojax.models import describe_parameters
from zerojax.run.build import is_first
from zerojax.run.config import ConfigError, TrainSection
from zerojax.run.config.keys import Tables
from zerojax.run.config.tables import merged
from zerojax.run.data.formats import DataError
from zerojax.run.run_dir import RunFolder

_NO_TOKENIZER = ""


def _required(name: str) -> object:
    """Makes --help show a folder as required, because the command refuses to run without it."""
    return tyro.conf.arg(metavar=name, help_behavior_hint="(required)")


@dataclass(frozen=True)
class Places:
    """The folders of an import, which come first.

    Attributes:
        model: The model's folder: config.json, safetensors files, tokenizer.json.
        run: Folder of the new run.
    """

    model: Annotated[tyro.conf.Positional[Path | None], _required("MODEL")] = None
    run: Annotated[tyro.conf.Positional[Path | None], _required("RUN")] = None


@dataclass(frozen=True)
class Options(on_config.Options, Places):
    """Start a run from the weights of a Hugging Face model: GPT-2, OPT, LLaMA, Qwen, Gemma and others.

    `zerojax train RUN/config.toml --run-dir RUN` trains it further; `zerojax sample RUN` and `zerojax eval
    RUN` use it. Architecture and tokenizer come from the model. All other settings come from CONFIG or the
    defaults, and each can be overridden.

    Attributes:
        config: Settings of the new run: a TOML file, or the name of one in configs/, such as gpt-tiny.
    """

    config: Annotated[
        tyro.conf.Positional[str | None],
        tyro.conf.arg(metavar="[CONFIG]", help_behavior_hint="(optional)"),
    ] = None


def run(arguments: list[str]) -> None:
    """Read the model's config and the command line, and import the weights."""
    source: ModelFolder | None = None

    def of_model(chosen: Options, tables: Tables) -> Tables:
        nonlocal source
        if chosen.model is None or chosen.run is None:
            raise ConfigError(
                "import: name the model's folder and the run's: zerojax import MODEL RUN [CONFIG]"
            )
        source = ModelFolder.open(chosen.model)
        length = min(TrainSection.sequence_length, source.model.max_seq_len)
        without = {"data": {"tokenizer": _NO_TOKENIZER}, "train": {"sequence_length": length}}
        found = run_settings(source, tables, RunFolder(chosen.run))
        return merged({} if chosen.config else without, found)

    options, settings = on_config.parse(Options, "import", arguments, of_model, without_config=True)
    assert source is not None
    assert options.run is not None
    folder = RunFolder(options.run)
    if settings.data.tokenizer == _NO_TOKENIZER:
        raise DataError(
            f"{source.folder} has no tokenizer: choose one with --data.tokenizer (byte, bpe, or the path of "
            "a tokenizer.json)"
        )
    with joined_cluster(settings.mesh, settings.cluster):
        state = import_model(source, settings, folder)
        if is_first():
            for note in source.notes:
                print(note)
            mesh = state.spec.mesh
            print(
                f"{folder.path}: {source.family.model_type}, {describe_parameters(settings.model)}, "
                f"read into the shards of {mesh.shape['node']} x {mesh.shape['local']} devices; "
                f"train it with: zerojax train {folder.config} --run-dir {folder.path}"
            )
