"""Imports the weights of a Hugging Face model as the start of a run."""

import json
from contextlib import closing
from dataclasses import replace

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.load import check_tensors, load_params
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles
from zerojax.interop.huggingface.source import FREE, ModelFolder, model_section
from zerojax.interop.huggingface.tokenizer_files import KEPT, copy_files
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.run.build import abstract_model
from zerojax.run.checkpoints import Checkpoints, Record
from zerojax.run.config import RunConfig, ZeroSection, config_to_dict
from zerojax.run.data.chat_template import TEMPLATE, find_template
from zerojax.run.run_dir import RunFolder
from zerojax.run.run_lock import RunLock
from zerojax.train.state import TrainState, begin_with

TENSORS = "tensors.json"
"""In RUN/huggingface: the dtype of each tensor of the files, by name."""


def import_model(source: ModelFolder, config: RunConfig, folder: RunFolder) -> TrainState:
    """Create a run: its config, its tokenizer, and the weights as a checkpoint at step 0.

    All processes must call it; each reads what its own devices hold.

    Args:
        source: the model.
        config: of the run; its model must be the source's, except for settings such as dropout.
        folder: of the run; must not hold one yet.

    Returns:
        The imported state: parameters without an optimizer, under exact ZeRO-3.

    Raises:
        ConfigurationError: the config has another model, the folder holds a run already, or the files do
            not hold this model.
    """
    if config.model != model_section(source.model, config.model):
        raise ConfigurationError(
            f"the model is that of {source.folder}: only {', '.join(FREE)} of [model] can be set"
        )
    files = SafetensorFiles(source.folder)
    # With dropout, each block has a salt; saving it lets the run turn dropout on later.
    model = replace(config.model, dropout=config.model.dropout or 0.5)
    plain = ZeroSection(compute_dtype=config.zero.compute_dtype)
    state = abstract_model(replace(config.all_trained(), model=model, zero=plain))
    parts = source.family.parts(config.model, source.family.prefix_in(files.specs))
    check_tensors(state.spec, files, source.family, parts)
    with closing(RunLock(folder)) as lock:
        run_on_process_zero(lock.take)
        run_on_process_zero(lambda: _write_files(source, files, folder))
        state = begin_with(state, load_params(state.spec, files, parts), config.train.seed)
        mesh = state.spec.mesh
        record = Record(config=config_to_dict(config), mesh=(mesh.shape["node"], mesh.shape["local"]))
        with Checkpoints(folder.checkpoints) as checkpoints:
            checkpoints.save(0, state, record)
        run_on_process_zero(lambda: _finish(source, config, folder))
    return state


def _write_files(source: ModelFolder, files: SafetensorFiles, folder: RunFolder) -> None:
    """Write the run's tokenizer, and the files that an export needs to write the same model back."""
    if folder.config.exists() or folder.checkpoints.exists():
        raise ConfigurationError(f"{folder.path} holds a run already: choose another --run-dir")
    folder.huggingface.mkdir(exist_ok=True)
    copy_files(source.folder, folder.huggingface, ("config.json", *KEPT))
    dtypes = {name: spec.dtype for name, spec in files.specs.items() if not source.family.is_buffer(name)}
    (folder.huggingface / TENSORS).write_text(json.dumps(dtypes, indent=1) + "\n", encoding="utf-8")
    if source.tokenizer is not None:
        folder.tokenizer.parent.mkdir(exist_ok=True)
        source.tokenizer.save(folder.tokenizer)
        if (template := find_template(source.folder)) is not None:
            folder.tokenizer.with_name(TEMPLATE).write_text(template, encoding="utf-8")


def _finish(source: ModelFolder, config: RunConfig, folder: RunFolder) -> None:
    folder.write_config(config)  # last: a folder with a config.toml is a run
    folder.update_summary(
        status="imported", step=0, source=str(source.folder.absolute()), family=source.family.model_type
    )
