"""Fixtures of the program's tests."""

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
    """A run that was trained to its end; not to be written to."""
    folder = RunFolder(tmp_path_factory.mktemp("finished") / "run")
    config = micro_config(text, log={"trackers": ["tensorboard"]}, checkpoint={"keep": 2})
    with Trainer.open(config, folder) as trainer:
        trainer.train()
    return folder


@pytest.fixture
def finished_copy(finished: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of that run, to go on with."""
    shutil.copytree(finished.path, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


@pytest.fixture
def leave_nothing_behind() -> Iterator[None]:
    """What Orbax leaves of a failed read or write complains when it is collected: here, in no later test."""
    yield
    gc.collect()
