"""Which folders a run may use."""

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest

from zerojax.errors import ZeroError
from zerojax.run.checkpoints import Checkpoints
from zerojax.run.inputs import prepare_data
from zerojax.run.run_dir import RunFolder


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?", "run\\1", "caf\udce9"])
def test_a_path_that_checkpoints_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ZeroError, match="no checkpoint can be written below"):
        RunFolder(tmp_path / name / "a").create()
    assert not (tmp_path / name).exists()
    with pytest.raises(ZeroError, match="no checkpoint can be written below"):
        Checkpoints(tmp_path / name)


def test_odd_names_are_taken(tmp_path: Path) -> None:
    RunFolder(tmp_path / "a b %41 é#{x}~ 'q'").create()


def test_checkpoints_on_a_disk_that_is_not_there_are_not_begun_again(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "unmounted")
    with pytest.raises(ZeroError, match="checkpoints: the run cannot write here: No such file"):
        RunFolder(tmp_path).create()


def test_prepared_data_are_read_from_a_folder_that_cannot_be_written_to(
    finished: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ZeroError, match="the run cannot write here: Read-only"):
        finished.create()
    assert prepare_data(finished.read_config(), finished).parts
