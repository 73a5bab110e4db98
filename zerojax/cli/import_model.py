"""``zerojax import MODEL RUN [CONFIG] [--section.key value ...]``: start a run from a Hugging Face model."""

from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import tyro

from zerojax.cli.cluster import joined_cluster
from zerojax.cli.options import read_options
from zerojax.interop.huggingface import ModelFolder, import_model, run_settings
from zerojax.models import parameter_count
from zerojax.run.build import is_first
from zerojax.run.config import ConfigError, RunConfig, TrainSection, find_config, load_config
from zerojax.run.data.formats import DataError
from zerojax.run.run_dir import RunFolder

_NO_TOKENIZER = ""


@dataclass(frozen=True)
class Options:
    """Start a run from the weights of a Hugging Face model: GPT-2, OPT, LLaMA, Qwen, Gemma and others.

    `zerojax train RUN/config.toml --run-dir RUN` trains it further; `zerojax sample RUN` and `zerojax eval
    RUN` use it. Architecture and tokenizer are the model's; all other settings are CONFIG's or the defaults,
    and each can be overridden.

    Attributes:
        model: The model's folder: config.json, safetensors files, tokenizer.json. Comes first.
        run: Folder of the new run. Comes second.
        config: A TOML file, or the name of one in configs/; its [model] is replaced by the model's.
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    config: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CONFIG]")] = None
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def run(arguments: list[str]) -> None:
    """Read the model's config and the command line, and import the weights."""
    named = list(takewhile(lambda word: not word.startswith("-"), arguments))
    if len(named) < 2:
        if {"-h", "--help"} & set(arguments):
            read_options(Options, "import", ["--help"])
        raise ConfigError("import: name the model's folder and the run's: zerojax import MODEL RUN [CONFIG]")
    source, folder = ModelFolder.open(Path(named[0])), RunFolder(Path(named[1]))
    default = Options(
        model=tyro.MISSING,
        run=tyro.MISSING,
        settings=_default_settings(source, folder, named[2] if len(named) > 2 else None),
    )
    settings = read_options(Options, "import", arguments, default).settings
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
                f"{folder.path}: {source.family.model_type}, {parameter_count(settings.model):,} parameters, "
                f"read into the shards of {mesh.shape['node']} x {mesh.shape['local']} devices; "
                f"train it with: zerojax train {folder.config} --run-dir {folder.path}"
            )


def _default_settings(source: ModelFolder, folder: RunFolder, config: str | None) -> RunConfig:
    """The settings before those of the command line."""
    if config is not None:
        return run_settings(source, load_config(find_config(config)), folder)
    settings = RunConfig()
    length = min(settings.train.sequence_length, source.model.max_seq_len)
    settings = replace(
        settings,
        data=replace(settings.data, tokenizer=_NO_TOKENIZER),
        train=TrainSection(sequence_length=length),
    )
    return run_settings(source, settings, folder)
