"""Which folders a run may use."""

from pathlib import Path

import pytest

from zerojax.errors import ZeroError
from zerojax.run.checkpoints import Checkpoints
from zerojax.run.run_dir import RunFolder


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?", "run\\1"])
def test_a_path_that_is_a_pattern_is_refused(tmp_path: Path, name: str) -> None:
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
