"""A disk that is full or not writable: one clear line, and saved checkpoints stay."""

import functools
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from micro_run import hang, micro_config

import zerojax
from zerojax.errors import RunError, ZeroError
from zerojax.multihost.background import is_stuck
from zerojax.run import loop
from zerojax.run.checkpoints import newest_valid, step_dirs
from zerojax.run.metrics import log
from zerojax.run.metrics.files import MetricsFile
from zerojax.run.run_dir import RunFolder
from zerojax.run.train_run import TrainRun

# Orbax closes its event loop while abandoned writes are still running.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("leave_nothing_behind"),
]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def before_step(monkeypatch: pytest.MonkeyPatch, number: int, happen: Any) -> None:
    """Call a function before a given step."""
    real, step = zerojax.train_step, iter(range(1, 100))

    def train_step(state: Any, batch: Any) -> Any:
        if next(step) == number:
            happen()
        return real(state, batch)

    monkeypatch.setattr(loop, "train_step", train_step)


@pytest.mark.parametrize(
    ("free", "message"),
    [
        (24 << 10, r"cannot save checkpoint .*/6: No space left on device; older ones are intact"),
        (0, "cannot "),
    ],
)
def test_a_disk_that_fills_up_ends_the_run_in_one_line(
    small_disk: Path, text: Path, monkeypatch: pytest.MonkeyPatch, free: int, message: str
) -> None:
    """At a checkpoint, and at the next line of metrics."""
    folder = RunFolder(small_disk / "run")

    def fill() -> None:
        trainer.checkpoints.wait()
        left = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        (small_disk / "filler").write_bytes(bytes(left - free))

    config = micro_config(text, train={"eval_every": 0})
    with TrainRun.open(config, folder) as trainer:
        before_step(monkeypatch, 5, fill)
        with pytest.raises(RunError, match=message):
            trainer.train()
    assert step_dirs.steps(folder.checkpoints) == [3]
    assert newest_valid(folder.checkpoints).step == 3
    (small_disk / "filler").unlink()
    assert [path.name for path in folder.checkpoints.iterdir()] == ["3"]


def test_a_disk_that_is_full_at_the_start_is_reported(small_disk: Path, text: Path) -> None:
    folder = RunFolder(small_disk / "run")
    with TrainRun.open(micro_config(text), folder):
        pass
    left = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "filler").write_bytes(bytes(left))
    with pytest.raises(RunError, match=r"cannot write to .*: No space left on device"):
        TrainRun.open(micro_config(text), folder)
    (small_disk / "filler").unlink()
    with TrainRun.open(micro_config(text), folder) as trainer:
        assert trainer.step == 0


@pytest.mark.parametrize("most", [3, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_disk_that_hangs_ends_the_run(
    most: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noticed by unwritten lines or at the next checkpoint; the end of the run does not wait for the disk."""
    folder = RunFolder(tmp_path / "run")
    impatient = functools.partial(MetricsFile, most=most, patience=0.5)
    monkeypatch.setattr(log, "MetricsFile", impatient)
    config = micro_config(text, train={"steps": 30, "eval_every": 0}, checkpoint={"every": 8})
    trainer = TrainRun.open(config, folder)
    files = trainer.log._file
    assert files is not None
    before_step(monkeypatch, 3, lambda: hang(files))
    message = (
        rf"cannot write to {folder.metrics}: the disk has not responded for 0\.5 s; checkpoints are intact"
    )
    with pytest.raises(RunError, match=message), trainer:
        trainer.train()
    assert trainer.step == 8 if most > 8 else trainer.step < 8
    assert folder.read_summary()["status"] == "running", "what would hang is not written"
    assert is_stuck()


def test_files_may_grow_no_more(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a quota; the run continues when there is room."""
    folder, config = RunFolder(tmp_path / "run"), micro_config(text, train={"eval_every": 0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def run() -> None:
        def forbid() -> None:
            trainer.checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, limits[1]))

        with TrainRun.open(config, folder) as trainer:
            before_step(monkeypatch, 5, forbid)
            trainer.train()

    try:
        with pytest.raises(RunError, match=r"cannot save checkpoint .*/6: File too large"):
            run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folder.read_summary()["status"] == "failed"
    with TrainRun.open(config, folder, "must") as trainer:
        assert trainer.step == 3


def test_a_folder_that_cannot_be_written_to(text: Path, tmp_path: Path) -> None:
    """Refused at the start; /proc is one, even to root."""
    with pytest.raises(ZeroError, match="cannot"):
        TrainRun.open(micro_config(text), RunFolder(Path("/proc/run")))
    if os.geteuid() == 0:
        folder = Path("/proc/self")
    else:
        folder = tmp_path / "run"
        folder.mkdir(mode=0o500)
    with pytest.raises(ZeroError, match="the run cannot write here"):
        TrainRun.open(micro_config(text), RunFolder(folder))
