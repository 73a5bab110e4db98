"""Two runs in one folder: the second is refused, in one line that names the first."""

import errno
import fcntl
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from environment import for_programs
from micro_run import micro_config

from zerojax.cli import main
from zerojax.errors import ZeroError
from zerojax.run.run_dir import RunFolder, RunLock
from zerojax.run.train_run import TrainRun

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
