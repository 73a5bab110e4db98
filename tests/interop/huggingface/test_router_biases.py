"""Biases of a router's choice, which are state and no weights, and layers that are left out: GLM-4.5."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from hf_models import FIXTURES, random_state, run_config, tensors
from safetensors.numpy import save_file

from zerojax.errors import ZeroError
from zerojax.interop.huggingface import ModelFolder, import_model, load_weights, plan_export
from zerojax.run.run_dir import RunFolder

FOLDER = FIXTURES / "families" / "glm4-moe"
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


def copy(folder: Path, **changed: np.ndarray | None) -> Path:
    folder.mkdir()
    shutil.copy(FOLDER / "config.json", folder)
    kept = {name: x for name, x in (tensors(FOLDER) | changed).items() if x is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_choice_biases_are_imported_and_exported(tmp_path: Path):
    predicting = {"model.layers.3.eh_proj.weight": np.zeros((16, 32), np.float32)}
    folder = copy(tmp_path / "model", **predicting)
    source, run = ModelFolder.open(folder), RunFolder(tmp_path / "run")
    config = run_config(source.model, "zero3")
    state = import_model(source, config, run)
    wanted = np.stack([tensors(FOLDER)[BIAS.format(layer)] for layer in (1, 2)])
    name = "blocks/1/block/mlp/choice_bias"
    np.testing.assert_array_equal(state.model_state[name], wanted)
    target = plan_export(state, config, run, None)
    assert target.specs.keys() == tensors(FOLDER).keys()
    assert target.specs[BIAS.format(1)].dtype == "F32"
    assert target.values["num_nextn_predict_layers"] == 1
    assert target.carried is not None
    assert target.carried.specs.keys() == predicting.keys()
    loaded = load_weights(random_state(config), folder)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, state.params)
    np.testing.assert_array_equal(loaded.model_state[name], wanted)


def test_choice_biases_must_be_in_the_files(tmp_path: Path):
    folder = copy(tmp_path / "model", **{BIAS.format(2): None})
    source = ModelFolder.open(folder)
    with pytest.raises(ZeroError, match=f"the files lack {BIAS.format(2)}"):
        import_model(source, run_config(source.model), RunFolder(tmp_path / "run"))
