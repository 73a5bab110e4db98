"""Fixtures of finished runs."""

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from micro_run import micro_config

from zerojax.run.run_dir import RunFolder
from zerojax.run.trainer import Trainer


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run; read-only."""
    folder = RunFolder(tmp_path_factory.mktemp("finished") / "run")
    config = micro_config(text, log={"trackers": ["tensorboard"]}, checkpoint={"keep": 2})
    with Trainer.open(config, folder) as trainer:
        trainer.train()
    return folder


@pytest.fixture
def finished_copy(finished: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of the finished run, to resume or change."""
    shutil.copytree(finished.path, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


@pytest.fixture
def leave_nothing_behind() -> Iterator[None]:
    """Collect garbage of failed reads and writes of Orbax, which warns when collected in a later test."""
    yield
    gc.collect()
