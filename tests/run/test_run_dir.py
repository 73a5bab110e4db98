"""Which folders a run may use, and which settings it resumes with."""

import errno
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from zerojax.errors import ZeroError
from zerojax.run.checkpoints import Checkpoints
from zerojax.run.config import config_from_dict, saved_config, spelled_out
from zerojax.run.config.keys import Tables
from zerojax.run.inputs import prepare_data
from zerojax.run.run_dir import RunFolder, check_same_run, sessions
from zerojax.zero_config.config import PRESETS, Preset


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?", "run\\1", "caf\udce9"])
def test_a_path_that_checkpoints_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ZeroError, match="checkpoints cannot be written in"):
        RunFolder(tmp_path / name / "a").create()
    assert not (tmp_path / name).exists()
    with pytest.raises(ZeroError, match="checkpoints cannot be written in"):
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


ZERO_PP = {"zero.grads: ['int4', 'int4'] -> ['int8', 'int4']", "zero.rotation: 0 -> 32"}


@pytest.mark.parametrize(
    ("saved", "now", "changes"),
    [
        ({"preset": "zero++"}, {"preset": "zero++"}, {*ZERO_PP, "zero.preset: zero++-paper -> zero++"}),
        ({"preset": "zero++"}, {"preset": "zero++-paper"}, set()),
        ({"preset": "zero++", "grads": ["int8", "int8"]}, {"preset": "zero++-paper"}, {"zero.grads"}),
        ({"preset": "delta"}, {"preset": "delta"}, set()),
        ({"preset": "delta"}, {"preset": "delta", "block_size": 128}, set()),
    ],
)
def test_a_checkpoint_that_names_a_preset_only_is_of_what_the_name_stood_for(
    tmp_path: Path, saved: dict[str, Any], now: dict[str, Any], changes: set[str]
) -> None:
    """Checkpoints once stored what was set, and "zero++" was the published form."""
    before, after = saved_config({"zero": saved}), config_from_dict({"zero": now})
    found = check_same_run(before, after, RunFolder(tmp_path))
    assert {line if line in changes else line.partition(":")[0] for line in found} == changes


@pytest.mark.parametrize("preset", PRESETS)
def test_a_checkpoint_keeps_what_its_preset_stood_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: Preset
) -> None:
    now: Tables = {"zero": {"preset": preset, "grads": ["int8", "int8"], "rounding": "nearest"}}
    config = config_from_dict(now)
    record = spelled_out(config)
    assert saved_config(record) == config
    assert check_same_run(saved_config(record), config, RunFolder(tmp_path)) == []
    monkeypatch.setitem(PRESETS, preset, {**PRESETS[preset], "block_size": 512, "rounding": "stochastic"})
    found = check_same_run(saved_config(record), config_from_dict(now), RunFolder(tmp_path))
    assert found == [f"zero.block_size: {config.zero.block_size} -> 512"]


def test_a_session_ends_when_its_run_did_and_not_when_the_next_one_writes(tmp_path, monkeypatch) -> None:
    folder, clock = RunFolder(tmp_path / "run"), [0.0]
    folder.create()
    monkeypatch.setattr(time, "time", lambda: clock[0])
    folder.begin_session(0)
    clock[0] = 10.0
    folder.update_summary(status="finished", step=4)
    clock[0] = 5000.0
    folder.update_summary(communication={})
    folder.begin_session(4)
    first, second = sessions(folder.read_summary())
    assert (first["began"], first["ended"], first["status"]) == (0.0, 10.0, "finished")
    assert (second["began"], second["status"]) == (5000.0, "running")
