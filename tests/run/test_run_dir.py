"""The folders that a run may use and locks, and the settings with which it resumes."""

import errno
import fcntl
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from environment import for_programs
from micro_run import micro_config

from zerojax.cli import main
from zerojax.errors import ZeroError
from zerojax.run.checkpoints import Checkpoints
from zerojax.run.config import config_from_dict, saved_config, spelled_out
from zerojax.run.config.keys import Tables
from zerojax.run.inputs import prepare_data
from zerojax.run.run_dir import RunFolder, RunLock, check_same_run, sessions
from zerojax.run.train_run import TrainRun
from zerojax.zero_config.config import PRESETS, Preset


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?", "run\\1", "caf\udce9"])
def test_a_path_that_checkpoints_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ZeroError, match="checkpoints cannot be written in"):
        RunFolder(tmp_path / name / "a").create()
    assert not (tmp_path / name).exists()
    with pytest.raises(ZeroError, match="checkpoints cannot be written in"):
        Checkpoints(tmp_path / name)


def test_odd_names_are_allowed(tmp_path: Path) -> None:
    RunFolder(tmp_path / "a b %41 é#{x}~ 'q'").create()


def test_settings_that_no_run_has_written_are_not_replaced(tmp_path: Path, text: Path) -> None:
    folder, mine = RunFolder(tmp_path), "[train]\nsteps = 3  # few\n"
    folder.config.write_text(mine)
    with pytest.raises(ZeroError, match="would replace this file by its complete settings, without comments"):
        TrainRun.open(micro_config(text), folder)
    assert folder.config.read_text() == mine
    assert main(["train", str(folder.config), "--run-dir", str(tmp_path), "--dry-run"]) == 2
    folder.write_config(micro_config(text))  # as by a start that was killed
    folder.check_config()


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


HOLD = """
import sys, time
from pathlib import Path
from zerojax.run.run_dir import RunFolder
from zerojax.run.run_dir import RunLock
lock = RunLock(RunFolder(Path(sys.argv[1])))
lock.take()
print("taken", flush=True)
time.sleep(600)
"""


def test_two_threads_write_the_summary(tmp_path: Path) -> None:
    """As the main thread and the one that watches the other processes, when a run fails."""
    folder = RunFolder(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda number: folder.update_summary(**{str(number): number}), range(30)))
    assert len(folder.read_summary()) == 30


def test_a_second_run_is_refused_and_changes_nothing(finished_copy: RunFolder, text: Path) -> None:
    longer = micro_config(text, train={"steps": 9})
    with TrainRun.open(longer, finished_copy) as first:
        (finished_copy.checkpoints / "9.unfinished").mkdir()  # which the first is writing
        before = {path: path.stat().st_mtime_ns for path in finished_copy.path.rglob("*")}
        with pytest.raises(ZeroError, match=f"in use by process {os.getpid()} on {platform.node()} since 2"):
            TrainRun.open(longer, finished_copy)
        assert {path: path.stat().st_mtime_ns for path in finished_copy.path.rglob("*")} == before
        assert first.step == 8
    with TrainRun.open(longer, finished_copy, "must") as again:
        assert again.step == 8


def test_a_run_that_cannot_start_leaves_no_lock(finished_copy: RunFolder, text: Path) -> None:
    with pytest.raises(ZeroError, match=r"model\.d_model"):
        TrainRun.open(micro_config(text, model={"d_model": 32}), finished_copy)
    with RunLock(finished_copy):
        pass


def test_writing_commands_need_the_lock_and_reading_ones_do_not(
    finished_copy: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(finished_copy.path)
    with RunLock(finished_copy):
        assert main(["checkpoints", run]) == 0
        assert main(["report", run]) == 0
        capsys.readouterr()
        for verb in ("--delete", "--rewind"):
            assert main(["checkpoints", run, verb, "6"]) == 2
            assert capsys.readouterr().err.startswith(f"zerojax: {run} is in use by process {os.getpid()} ")
    assert sorted(path.name for path in finished_copy.checkpoints.iterdir()) == ["6", "8"]
    assert main(["checkpoints", run, "--delete", "6"]) == 0


def test_a_dead_process_holds_no_lock(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-c", HOLD, str(folder.path)]
    with subprocess.Popen(command, env=for_programs(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        with pytest.raises(ZeroError, match=rf"process {process.pid} on .* \(-c {folder.path}\)"):
            RunLock(folder).take()
        process.send_signal(signal.SIGKILL)
    with RunLock(folder):
        assert f'"pid": {os.getpid()}' in folder.lock.read_text()


@pytest.mark.parametrize(
    ("said", "who"),
    [
        (b"", "another process"),
        (b"[1, 2]", "another process"),
        (b"\x00\xff nonsense", "another process"),
        (
            json.dumps({"pid": 1, "host": "a\x1b[2J", "since": "now", "command": "b\n\u202e"}).encode(),
            "process 1 on a?[2J since now (b??)",
        ),
    ],
)
def test_any_content_of_the_file_gives_one_line(said: bytes, who: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with RunLock(folder):
        folder.lock.write_bytes(said)
        with pytest.raises(ZeroError, match=f"in use by {re.escape(who)}: wait"):
            RunLock(folder).take()


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(RunFolder(tmp_path)):
        assert "this file system has no locks: let no second run use the folder" in capsys.readouterr().err
