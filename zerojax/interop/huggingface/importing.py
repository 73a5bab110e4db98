"""Starts runs from Hugging Face models: imports a model as a run, or trains directly from its files."""

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from zerojax.errors import ConfigurationError, disk_errors
from zerojax.formatting import size
from zerojax.interop.huggingface.families import is_left_out
from zerojax.interop.huggingface.load import check_tensors, load_base, load_params, load_state, load_weights
from zerojax.interop.huggingface.safetensors_files import SafetensorWriter
from zerojax.interop.huggingface.source import (
    CARRIED,
    FREE,
    TENSORS,
    ModelFolder,
    is_model,
    model_section,
    open_files,
)
from zerojax.interop.huggingface.tokenizer_files import KEPT
from zerojax.interop.huggingface.weight_files import WeightFiles
from zerojax.log import warn
from zerojax.models.config import GPTConfig
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.run.build import abstract_model
from zerojax.run.checkpoints import Checkpoints, Record, step_dirs
from zerojax.run.config import RunConfig, spelled_out
from zerojax.run.config.keys import Tables
from zerojax.run.config.tables import table_of
from zerojax.run.data import prepare
from zerojax.run.data.chat_template import TEMPLATE, find_template
from zerojax.run.data.tokenizer import Tokenizer
from zerojax.run.run_dir import RunFolder, RunLock, copy_files
from zerojax.run.weights import WeightReader
from zerojax.train.state import TrainState, begin_with
from zerojax.zero_config import ZeroConfig


class ModelReader(WeightReader):
    """Reads weights from Hugging Face folders and from checkpoints."""

    def find(self, path: Path) -> Path:
        """The folder of a model, a checkpoint, or the newest one of a run."""
        return path if is_model(path) else super().find(path)

    def outputs(self, path: Path) -> int | None:
        """None for a Hugging Face model, which has no outputs setting."""
        return None if is_model(path) else super().outputs(path)

    def tokenizer(self, path: Path) -> Tokenizer | None:
        """None for a Hugging Face model, whose tokenizer is read with it."""
        return None if is_model(path) else super().tokenizer(path)

    def weights(self, path: Path, state: TrainState, *, new: str | None = None) -> TrainState:
        """Load weights by ``load_weights``, or from a checkpoint by ``checkpoints.restore_weights``."""
        return load_weights(state, path, new=new) if is_model(path) else super().weights(path, state, new=new)

    def base(self, path: Path, state: TrainState, *, new: str | None = None) -> TrainState:
        """Load frozen weights by ``load_base``, or from a checkpoint by ``checkpoints.restore_base``."""
        return load_base(state, path, new=new) if is_model(path) else super().base(path, state, new=new)


def run_settings(source: ModelFolder, tables: Tables, folder: RunFolder) -> Tables:
    """The settings that a model gives a run: its shape, and its tokenizer if it has one.

    ``tables`` are the run's own settings. Settings of [model] that do not change the logits stay.
    """
    outputs = tables.get("model", {}).get("outputs")
    shape = table_of(model_section(source.model, GPTConfig(outputs=outputs, tied=outputs is None)))
    found = {"model": {key: value for key, value in shape.items() if key not in FREE}}
    if source.tokenizer is not None:
        found["data"] = {"tokenizer": str(folder.tokenizer.absolute())}
    return found


def begin_run(source: ModelFolder, config: RunConfig, folder: RunFolder) -> None:
    """Write a run's copies of a model's small files, unless the run has started.

    All processes must call it. The config's model must be the source's, except for settings such as dropout.

    Raises:
        ConfigurationError: the config has another model, the files are damaged, or another process trains in
            the folder.
        RunError: the disk is full.
    """
    _check_model(source, config)

    def write() -> None:
        if not folder.config.exists():
            check_template(source, config, folder)
            with disk_errors(folder.path), closing(RunLock(folder)) as lock:
                lock.take()
                _write_files(source, open_files(source.folder), folder)

    run_on_process_zero(write)


def import_model(source: ModelFolder, config: RunConfig, folder: RunFolder) -> TrainState:
    """Create a run: its config, its tokenizer, and the weights as a checkpoint at step 0.

    All processes must call it; each reads only what its devices hold. The config's model must be the
    source's, except for settings such as dropout.

    Returns:
        The imported state: parameters without an optimizer, under exact ZeRO-3.

    Raises:
        ConfigurationError: the config has another model, the folder already holds a run, or the files do not
            hold this model.
        RunError: the disk is full.
    """
    _check_model(source, config)
    files = open_files(source.folder)
    plain = ZeroConfig(compute_dtype=config.zero.compute_dtype)
    state = abstract_model(replace(config.all_trained(), zero=plain))
    parts = source.family.parts(config.model, files.specs)
    check_tensors(state.spec, files, source, parts)
    with disk_errors(folder.path), closing(RunLock(folder)) as lock:
        run_on_process_zero(lock.take)
        run_on_process_zero(lambda: _write_new(source, files, folder))
        state = begin_with(state, load_params(state.spec, files, parts), config.train.seed)
        state = load_state(state, files, parts)
        mesh = state.spec.mesh
        record = Record(config=spelled_out(config), mesh=(mesh.shape["node"], mesh.shape["local"]))
        with Checkpoints(folder.checkpoints) as checkpoints:
            checkpoints.save(0, state, record)
        run_on_process_zero(lambda: _finish(source, config, folder))
    return state


def _check_model(source: ModelFolder, config: RunConfig) -> None:
    if config.model != model_section(source.model, config.model):
        raise ConfigurationError(
            f"[model] differs from the model in {source.folder}: set only {', '.join(FREE)}, and leave the "
            "rest out"
        )


def _write_new(source: ModelFolder, files: WeightFiles, folder: RunFolder) -> None:
    if folder.config.exists() or step_dirs.steps(folder.checkpoints):
        raise ConfigurationError(f"{folder.path} already holds a run: choose another folder, or delete it")
    _write_files(source, files, folder)


def _write_files(source: ModelFolder, files: WeightFiles, folder: RunFolder) -> None:
    """Write the run's tokenizer, and the files from which an export writes the same model back."""
    folder.huggingface.mkdir(exist_ok=True)
    copy_files(source.folder, folder.huggingface, ("config.json", *KEPT))
    family, model = source.family, source.model
    carried = {name: spec for name, spec in files.specs.items() if family.carries(name, model)}
    read = {name: spec for name, spec in files.specs.items() if name not in carried and not is_left_out(name)}
    dtypes = {name: spec.dtype for name, spec in read.items()}
    (folder.huggingface / TENSORS).write_text(json.dumps(dtypes, indent=1) + "\n", encoding="utf-8")
    if source.tokenizer is not None:
        folder.tokenizer.parent.mkdir(exist_ok=True)
        save_tokenizer(source, folder.tokenizer)
    if carried:
        writer = SafetensorWriter(folder.huggingface, carried, sys.maxsize, CARRIED)
        for name in carried:
            writer.write(name, files.read(name))
        writer.close()
        names = ", ".join(sorted({_stem(name) for name in carried}))
        total = size(sum(spec.nbytes for spec in carried.values()))
        kept = f"{len(carried)} tensors ({total}) of {source.folder}"
        warn(f"{kept} are kept for exports, and not trained: {names}")


def _stem(name: str) -> str:
    """The beginning of a tensor's name, which tells a vision tower from a projector."""
    first, second, *_ = [*name.split("."), ""]
    return f"{first}.{second}" if first == "model" else first


def save_tokenizer(source: ModelFolder, path: Path) -> None:
    """Write a model's tokenizer, if it has one, and its chat template beside it."""
    if source.tokenizer is not None:
        source.tokenizer.save(path)
        if (found := find_template(source.folder)) is not None:
            path.with_name(TEMPLATE).write_text(found.source, encoding="utf-8")


def check_template(source: ModelFolder, config: RunConfig, folder: RunFolder) -> None:
    """Check the chat template that a run in ``folder`` would copy from a model.

    Raises:
        DataError: the template cannot be used; names the model's file.
    """
    if source.tokenizer is not None and config.data.tokenizer == str(folder.tokenizer.absolute()):
        theirs = replace(config.data, tokenizer=str(source.folder / folder.tokenizer.name))
        prepare.check_template(theirs, folder.data, source.tokenizer)


def _finish(source: ModelFolder, config: RunConfig, folder: RunFolder) -> None:
    folder.write_config(config)  # last: a folder with a config.toml is a run
    folder.update_summary(
        status="imported", step=0, source=str(source.folder.absolute()), family=source.family.model_type
    )
