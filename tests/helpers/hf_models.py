"""Tiny models made by transformers, and helpers that look at files without zerojax's own reader."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from zerojax.interop.huggingface import ModelFolder, import_model, run_settings
from zerojax.interop.huggingface.source import model_section
from zerojax.models import GPTConfig
from zerojax.run.build import abstract_model
from zerojax.run.config import (
    LogSection,
    MeshSection,
    OptimizerSection,
    RunConfig,
    TrainSection,
    config_to_dict,
    with_settings,
)
from zerojax.run.run_dir import RunFolder
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.param_tree import to_tree
from zerojax.train.state import TrainState, begin_with
from zerojax.zero_config.config import Preset, ZeroConfig

FIXTURES = Path(__file__).parents[1] / "fixtures" / "huggingface"
NAMES = ("gpt2", "opt", "llama2", "llama3")


def run_config(model: GPTConfig, preset: Preset = "zero++") -> RunConfig:
    """Settings of a run of a model, on 2 x 4 devices."""
    return RunConfig(
        model=model_section(model, GPTConfig()),
        train=TrainSection(steps=4, batch_size=8, sequence_length=16, eval_every=2, eval_batches=2),
        optimizer=OptimizerSection(warmup_steps=2),
        zero=ZeroConfig.preset(preset, compute_dtype="float32"),
        mesh=MeshSection(nodes=2, local=4),
        log=LogSection(trackers=()),
    )


def random_state(config: RunConfig) -> TrainState:
    """A state whose weights are all random."""
    state = abstract_model(config)

    def random(leaf: ParamLayout) -> jax.Array:
        values = np.random.default_rng(leaf.index).standard_normal(leaf.stored_shape, np.float32)
        return jax.device_put(values, state.spec.sharding(state.spec.param_spec(leaf)))

    return begin_with(state, to_tree({leaf.path: random(leaf) for leaf in state.spec.leaves}), 0)


def begin_run(model: Path, folder: RunFolder) -> None:
    """Import a model with its tokenizer."""
    source = ModelFolder.open(model)
    config = run_config(source.model)
    data = replace(config.data, tokenizer=str(folder.tokenizer.absolute()))
    import_model(source, replace(config, data=data), folder)


def with_model(model: Path, config: RunConfig, folder: RunFolder) -> RunConfig:
    """The settings of a run that begins with a model's weights."""
    return with_settings(config, run_settings(ModelFolder.open(model), config_to_dict(config), folder))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, as the safetensors library reads them."""
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def copy_of(
    name: str, folder: Path, config: dict[str, Any] | None = None, **changed: np.ndarray | None
) -> Path:
    """A committed model in one file, with other keys in its config.json and other tensors; None removes."""
    folder.mkdir()
    values = json.loads((FIXTURES / name / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(values))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((FIXTURES / name / file).read_bytes())
    wanted = {key: x for key, x in (tensors(FIXTURES / name) | changed).items() if x is not None}
    save_file(wanted, folder / "model.safetensors")
    return folder
