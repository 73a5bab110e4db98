"""Imported runs of the committed models."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hf_models import FIXTURES, NAMES, begin_run

from zerojax.cli.trained import TrainedRun, open_trained
from zerojax.run.config import MeshSection
from zerojax.run.run_dir import RunFolder
from zerojax.zero_config import ZeroConfig


@dataclass(frozen=True)
class Imported:
    """A committed model as a run, opened again under exact ZeRO-3."""

    model: Path
    folder: RunFolder
    trained: TrainedRun


@pytest.fixture(scope="session", params=NAMES)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """Each committed model in turn."""
    folder = RunFolder(tmp_path_factory.mktemp(request.param) / "run")
    begin_run(FIXTURES / request.param, folder)
    config = replace(folder.read_config(), zero=ZeroConfig(compute_dtype="float32"))
    trained = open_trained(folder, config, MeshSection(nodes=2, local=4))
    return Imported(FIXTURES / request.param, folder, trained)
