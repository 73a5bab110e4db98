"""Runs whose rows are shared by the devices of a node, in one process and in two."""

from pathlib import Path

import numpy as np
import pytest
from environment import zerojax
from micro_run import micro_config

from zerojax.run.config import dump_config
from zerojax.run.metrics.files import read_metrics

pytestmark = pytest.mark.slow

SHARED = ("--zero.sequence-parallel", 2)


def run_through(*arguments: object) -> str:
    done = zerojax(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(folder: Path) -> np.ndarray:
    names = ("loss", "grad_norm", "validation_loss", "step")
    return np.array(
        [[line.get(name, 0) for name in names] for line in read_metrics(folder / "metrics.jsonl")]
    )


def test_a_run_is_that_of_devices_with_rows_of_their_own(text: Path, tmp_path: Path) -> None:
    """The second is one of two processes with a device each, which read the same rows."""
    config = tmp_path / "micro.toml"
    mesh, train = {"nodes": 1, "local": 2, "emulate": True}, {"steps": 3, "eval_every": 2, "accumulate": 2}
    settings = micro_config(text, mesh=mesh, train=train, data={"packing": "documents"})
    config.write_text(dump_config(settings))
    run_through("train", config, "--run-dir", tmp_path / "apart")
    run_through("train", config, *SHARED, "--run-dir", tmp_path / "one")
    launch = ("launch", "--nodes", 2, "--devices-per-node", 1)
    mesh_options = ("--mesh.nodes", 1, "--mesh.local", 2)
    run_through(*launch, config, *mesh_options, *SHARED, "--run-dir", tmp_path / "two")
    for name in ("one", "two"):
        np.testing.assert_allclose(metrics(tmp_path / name), metrics(tmp_path / "apart"), rtol=1e-5)
    last = read_metrics(tmp_path / "one" / "metrics.jsonl")[-1]["validation_loss"]
    for local in (1, 2):  # on one device no rows are shared
        printed = run_through("eval", tmp_path / "one", "--mesh.local", local)
        assert float(printed.split("validation loss ")[1].split()[0]) == pytest.approx(last, rel=1e-6)
    assert run_through("sample", tmp_path / "one", "--prompt", "all", "--tokens", 4)
