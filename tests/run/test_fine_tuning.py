"""A run that trains adapters, on a base that stays where it is, is found on resuming, and never another."""

import dataclasses
import functools
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from micro_run import Stop, die_at, losses, micro_config, train

import zerojax
from zerojax.cli import main
from zerojax.cli.sample import SamplingOptions
from zerojax.cli.trained import open_trained
from zerojax.errors import ZeroError
from zerojax.run.build import RunSetup
from zerojax.run.checkpoints import read_manifest, restore, step_dirs
from zerojax.run.checkpoints.manifest import write_manifest
from zerojax.run.config import MeshSection
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import base_of
from zerojax.sharding.param_tree import from_tree
from zerojax.train import initial
from zerojax.train.state import initial_base

LORA = {
    "lora": {"rank": 2, "dropout": 0.1},
    "zero": {"frozen_weights": "int8", "block_size": 64},
    "optimizer": {"name": "adamw"},
    "train": {"steps": 4, "eval_every": 2},
    "checkpoint": {"every": 2},
    "mesh": {"nodes": 1, "local": 2},
}


def params_bytes(folder: Path, step: int) -> int:
    files = read_manifest(folder / "checkpoints" / str(step)).files
    return sum(size for name, (size, _) in files.items() if name.startswith("params/"))


def test_a_run_that_resumes_draws_the_same_base(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a user's programs are compiled: in several parts, which round a weight in different ways.
    compiled = functools.partial(jax.jit, compiler_options={"xla_cpu_parallel_codegen_split_count": 32})
    monkeypatch.setattr(initial, "in_portions", lambda init, places: compiled(init, out_shardings=places))
    setup = RunSetup(micro_config(text, **LORA | {"zero": {}}))
    first, again = setup.initial_state(), initial_base(setup.abstract_state, seed=0)
    assert jax.tree.leaves(first.frozen)
    jax.tree.map(np.testing.assert_array_equal, again.frozen, first.frozen)
    assert int(again.base["fingerprint"]) == int(first.base["fingerprint"])


@pytest.mark.slow
def test_adapters_of_a_trained_run(
    finished: RunFolder,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = tmp_path / "base"
    shutil.copytree(finished.path, base)
    config = micro_config(text, **LORA)
    whole = train(config, tmp_path / "whole", init_from=base)
    last = losses(finished.path)[-1][1]
    assert losses(whole.folder.path)[0][1] == pytest.approx(last, abs=0.2)  # it begins where the base ended
    assert {leaf.path[-1] for leaf in whole.state.spec.leaves} == {"lora_a", "lora_b"}
    manifest = read_manifest(whole.folder.checkpoints / "4")
    assert manifest.record.base == str((base / "checkpoints/8").resolve())
    assert params_bytes(whole.folder.path, 4) < params_bytes(finished.path, 8) / 4

    with monkeypatch.context() as patch:
        die_at(patch, 3)
        with pytest.raises(Stop):
            train(config, tmp_path / "again", init_from=base)
    (tmp_path / "again").rename(tmp_path / "moved")
    resumed = train(config, tmp_path / "moved")
    needing = {str(run.folder.path) for run in (whole, resumed)}
    assert needing <= {*step_dirs.needed_by(base / "checkpoints/8")}
    assert losses(resumed.folder.path) == losses(whole.folder.path)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, whole.state.params)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.frozen, whole.state.frozen)

    trained = open_trained(whole.folder, config, MeshSection(2, 1))  # on another mesh
    ours, theirs = (zerojax.gather_params(state) for state in (trained.state, whole.state))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    # and by sample and chat, on one device
    model = SamplingOptions(run=whole.folder.path).open_model(whole.folder)
    found = from_tree(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    for path, weight in from_tree(theirs).items():
        np.testing.assert_array_equal(found[path], weight)

    with pytest.raises(
        ZeroError, match="holds only what its run trained beside frozen weights: `zerojax export`"
    ):
        train(config, tmp_path / "on-adapters", init_from=whole.folder.path)

    # The base's run goes on, and keeps only its newest checkpoints and the one that is needed.
    longer = dataclasses.replace(RunFolder(base).read_config().train, steps=10)
    train(dataclasses.replace(RunFolder(base).read_config(), train=longer), base)
    assert {8, 10} <= {*step_dirs.steps(base / "checkpoints")}
    assert main(["checkpoints", str(base), "--delete", "8"]) == 2
    refused = capsys.readouterr().err
    assert "other runs need: " in refused
    assert str(whole.folder.path) in refused

    base.rename(tmp_path / "moved-base")
    with pytest.raises(ZeroError, match="is gone: put it back"):
        open_trained(whole.folder, config, MeshSection(1, 2))


def test_the_base_stays_where_checkpoints_are_a_link(
    finished: RunFolder, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.checkpoints, tmp_path / "disk")
    folder.create()
    folder.checkpoints.symlink_to(tmp_path / "disk")
    assert (
        base_of(folder, folder.checkpoints / "8") == base_of(folder, tmp_path / "disk/8") == "checkpoints/8"
    )
    manifest = read_manifest(tmp_path / "disk/8")
    record = dataclasses.replace(manifest.record, base="checkpoints/6")
    write_manifest(tmp_path / "disk/8", 8, 0.0, record)
    assert main(["checkpoints", str(folder.path), "--delete", "6"]) == 2
    assert "holds weights that the checkpoints of steps 8 need" in capsys.readouterr().err


def test_a_needed_checkpoint_stays_needed_when_its_run_is_rewound(
    finished_copy: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = str(finished_copy.path), finished_copy.checkpoints
    step_dirs.note_need(path / "8", tmp_path)
    assert main(["checkpoints", run, "--rewind", "6"]) == 0
    assert f"8.undone holds weights that other runs need and can no longer find: {tmp_path}" in (
        capsys.readouterr().out
    )
    assert main(["checkpoints", run, "--delete", "8.undone"]) == 2
    assert "delete 8.undone.needed-by beside it" in capsys.readouterr().err
    assert step_dirs.needed_by(path / "8") == []  # of the step that is saved again


@pytest.mark.slow
def test_an_adapter_does_not_load_beside_another_base(text: Path, tmp_path: Path) -> None:
    config = micro_config(text, **LORA)
    run = train(config, tmp_path / "run")
    assert read_manifest(run.folder.checkpoints / "4").record.base == ""
    state = initial_base(RunSetup(config).abstract_state, seed=1)
    with pytest.raises(ZeroError, match="trained on another base"):
        restore(run.folder.checkpoints / "4", state)
