"""A model of scores begins with a language model's weights, all but its head."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hf_models import FIXTURES, with_model
from micro_run import micro_config

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import ModelReader, load_weights
from zerojax.run.build import RunSetup
from zerojax.run.checkpoints import Checkpoints, Record, restore
from zerojax.run.config import RunConfig, config_to_dict, with_settings
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import CHECKPOINTS, first_weights, start_run, with_base

MESH = {"nodes": 1, "local": 2}


def scoring(text: Path, **model: Any) -> RunConfig:
    return micro_config(text, mesh=MESH, model={"tied": False, "outputs": 1} | model)


def same_but_the_head(found: Any, wanted: Any) -> None:
    shapes = {name: x for name, x in found.items() if name != "head"}
    jax.tree.map(np.testing.assert_array_equal, shapes, {k: v for k, v in wanted.items() if k != "head"})


def test_the_head_alone_is_new(text: Path, finished: RunFolder) -> None:
    config, source = scoring(text), CHECKPOINTS.find(finished.path)
    state, notes = first_weights(RunSetup(config), source, CHECKPOINTS)
    assert "model.outputs = 1: the head is new, drawn by train.seed" in notes
    found = zerojax.gather_params(state)
    plain = RunSetup(replace(config, model=finished.read_config().model))
    same_but_the_head(found, zerojax.gather_params(restore(source, plain.abstract_state)))
    head = found["head"]["embedding"]
    assert head.shape == (1, 16)
    np.testing.assert_array_equal(
        head, zerojax.gather_params(RunSetup(config).initial_state())["head"]["embedding"]
    )


@pytest.mark.slow
def test_a_saved_head_is_kept_and_no_other_difference_is_allowed(
    text: Path, finished: RunFolder, tmp_path: Path
) -> None:
    config = scoring(text)
    first = RunSetup(replace(config, train=replace(config.train, seed=7))).initial_state()
    with Checkpoints(tmp_path) as saved:
        saved.save(1, first, Record(config=config_to_dict(config)))
    state, notes = first_weights(RunSetup(config), tmp_path / "1", CHECKPOINTS)
    assert len(notes) == 1
    jax.tree.map(np.testing.assert_array_equal, zerojax.gather_params(state), zerojax.gather_params(first))
    source = CHECKPOINTS.find(finished.path)
    with pytest.raises(ConfigurationError, match=r"does not fit this run: params: .*norm"):
        first_weights(RunSetup(scoring(text, norm="rms")), source, CHECKPOINTS)
    language = micro_config(text, mesh=MESH, model={"tied": False})
    with pytest.raises(ConfigurationError, match="head/embedding is float32"):
        first_weights(RunSetup(language), tmp_path / "1", CHECKPOINTS)


@pytest.mark.slow
def test_beside_adapters_the_head_is_trained(text: Path, finished: RunFolder, tmp_path: Path) -> None:
    config = with_settings(scoring(text), {"lora": {"rank": 2}})
    folder, setup = RunFolder(tmp_path), RunSetup(config)
    start = start_run(setup, folder, None, finished.path)
    assert {leaf.path[-1] for leaf in start.state.spec.leaves} == {"lora_a", "lora_b", "embedding"}
    again = with_base(setup.abstract_state, folder, start.base, config, CHECKPOINTS)
    jax.tree.map(np.testing.assert_array_equal, again.frozen, start.state.frozen)
    frozen = replace(config, zero=config.zero.replace(frozen=("*",)))
    with pytest.raises(ConfigurationError, match="includes the head, which is new: add '!head/\\*'"):
        start_run(RunSetup(frozen), folder, None, finished.path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama2", "llama3"])  # of which one has a head of its own
def test_a_hugging_face_model_gets_a_new_head(name: str, text: Path, tmp_path: Path) -> None:
    model, folder = FIXTURES / name, RunFolder(tmp_path)
    config = with_model(model, scoring(text), folder)
    assert (config.model.outputs, config.model.tied) == (1, False)
    start = start_run(RunSetup(config), folder, None, model, ModelReader())
    assert "model.outputs = 1: the head is new, drawn by train.seed" in start.notes
    whole = with_model(model, micro_config(text, mesh=MESH), folder)
    wanted = load_weights(RunSetup(whole).initial_state(), model)
    same_but_the_head(zerojax.gather_params(start.state), zerojax.gather_params(wanted))
