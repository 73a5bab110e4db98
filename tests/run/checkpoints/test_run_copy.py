"""The copy of a run in an object store: what counts as complete, what is fetched, deleted and reported."""

import shutil
from collections.abc import Generator
from pathlib import Path
from unittest import mock

import pytest
from micro_run import losses, micro_config, train
from s3_server import Bucket, s3_bucket

from zerojax.cli import main
from zerojax.cli.run_options import read_run
from zerojax.cli.train import Options
from zerojax.errors import ConfigurationError, RunError
from zerojax.run import object_store
from zerojax.run.checkpoints import DamagedError, Record, Retention, RunCopy, verify
from zerojax.run.checkpoints import select as selection
from zerojax.run.checkpoints.manifest import read_manifests, write_manifest
from zerojax.run.checkpoints.run_copy import Copier
from zerojax.run.run_dir import RunFolder
from zerojax.run.train_run import TrainRun

RETRIES = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Generator[Bucket]:
    monkeypatch.setattr(object_store, "_PATIENT", RETRIES)
    monkeypatch.setattr(object_store, "_QUICK", RETRIES)
    with s3_bucket(monkeypatch) as bucket:
        yield bucket


def save(folder: Path, step: int, part: int = 0, parts: int = 1, base: str = "") -> Path:
    """A checkpoint of one small file, or a host's part of it."""
    path = folder / "checkpoints" / str(step)
    (path / "params").mkdir(parents=True)
    (path / "params" / f"x{part}").write_text(f"{step} {part}")
    (path / "params" / "_METADATA").write_text(f"of host {part}")
    write_manifest(path, step, float(step), Record(base=base), part=part, parts=parts)
    return path


def copy_of(folder: Path) -> RunCopy:
    return RunCopy("s3://bucket/run", RunFolder(folder))


def choose(folder: Path) -> int | None:
    manifest, _ = selection.choose(folder / "checkpoints", copy=copy_of(folder))
    return None if manifest is None else manifest.step


def test_a_start_on_another_disk_takes_the_newest_complete_checkpoint(bucket: Bucket, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    save(here, 0)
    save(here, 4, base="checkpoints/0")
    copy_of(here).push(Retention(), 4)
    save(here, 6)
    bucket.budget = 1  # one of three objects
    with pytest.raises(RunError, match="s3://bucket/run"):
        copy_of(here).push(Retention(), 6)
    bucket.budget = bucket.status = None
    assert (copy_of(there).steps(), choose(there)) == ([0, 4], 4)
    assert [one.step for one in read_manifests(there / "checkpoints")] == [0, 4], "with its base"
    verify(there / "checkpoints" / "4", 4)
    assert choose(here) == 6, "the disk has a newer one"
    copy_of(here).push(Retention(), 6)
    damaged = save(there, 6) / "params" / "x0"
    damaged.write_text("")
    assert choose(there) == 6
    assert damaged.read_text() == "6 0"
    assert (there / "checkpoints" / "6.damaged").exists()


def test_parts_of_two_hosts_are_one_checkpoint(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for rank in (0, 1):
        save(tmp_path / str(rank), 4, rank, 2)
        with monkeypatch.context() as patched:
            patched.setattr("jax.process_index", lambda rank=rank: rank)
            copy_of(tmp_path / str(rank)).push(Retention(), 4)
        assert copy_of(tmp_path).steps() == [4] * rank
    before = dict(bucket.objects)
    copy_of(tmp_path / "0").push(Retention(), 4)
    assert bucket.objects == before, "nothing is sent twice"
    assert choose(tmp_path / "2") == 4
    path = tmp_path / "2" / "checkpoints" / "4"
    assert verify(path, 4).parts == 1
    names = ("x0", "x1", "_METADATA")
    assert [(path / "params" / name).read_text() for name in names] == ["4 0", "4 1", "of host 0"]


def test_changed_objects_are_refused(bucket: Bucket, tmp_path: Path) -> None:
    save(tmp_path / "a", 4)
    copy_of(tmp_path / "a").push(Retention(), 4)
    bucket.objects["run/checkpoints/4/0/params/x0"] = b"4 1"
    with pytest.raises(DamagedError, match="s3://bucket/run/checkpoints/4 is damaged: params/x0 has changed"):
        choose(tmp_path / "b")
    assert not (tmp_path / "b" / "checkpoints" / "4").exists()


def test_surplus_and_interrupted_uploads_are_deleted(bucket: Bucket, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
        copy_of(tmp_path).push(Retention(2), step)
    bucket.objects["run/checkpoints/3/0/params/x0"] = b""
    shutil.rmtree(tmp_path / "checkpoints")
    save(tmp_path, 8)
    save(tmp_path, 20)  # of another run
    copy_of(tmp_path).push(Retention(2), 8)
    assert {key.split("/")[2] for key in bucket.objects if "checkpoints" in key} == {"6", "8"}


def test_a_store_that_fails_is_reported_and_tried_again(bucket: Bucket, tmp_path: Path) -> None:
    lines: list[str] = []
    save(tmp_path, 2)
    copier = Copier(copy_of(tmp_path), Retention(), lines.append)
    bucket.status = 503
    copier.start(2)
    assert copier._worker.wait(60.0)
    assert len(lines) == 1
    assert "its copy is not: s3://bucket/run: aborted (HTTP 503). The next save tries again" in lines[0]
    bucket.status = None
    copier.close()
    assert copy_of(tmp_path).steps() == [2]
    copier = Copier(copy_of(tmp_path), Retention(), lines.append)
    bucket.status = 503
    copier.start(2)
    with pytest.raises(RunError, match="The same command, given again, copies it"):
        copier.close()
    assert len(lines) <= 2, "no save follows the end"


def test_other_errors_of_the_copying_thread_end_the_run(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = Copier(copy_of(tmp_path), Retention(), print)
    monkeypatch.setattr(copier.copy, "push", mock.Mock(side_effect=ZeroDivisionError))
    copier.start(2)
    with pytest.raises(ZeroDivisionError):
        copier.close()


def test_a_run_continues_on_another_host_and_mesh(
    bucket: Bucket, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = {"copy_to": "s3://bucket/run", "every": 3}
    here, there = tmp_path / "here", tmp_path / "there"
    train(micro_config(text, checkpoint=url), here)
    copy_of(here).delete(8)
    assert copy_of(here).steps() == [6]
    settings = micro_config(text, mesh={"nodes": 1, "local": 2}, checkpoint=url)
    train(settings, there, resume="must")
    assert [loss for _, loss, _ in losses(there)] == pytest.approx([loss for _, loss, _ in losses(here)])
    assert read_manifests(there / "checkpoints")[0] == read_manifests(here / "checkpoints")[0]
    fetched = tmp_path / "fetched"
    assert main(["checkpoints", str(fetched), "--fetch", "s3://bucket/run"]) == 0
    assert RunFolder(fetched).read_config().train.steps == 8
    assert main(["checkpoints", str(there), "--rewind", "6"]) == 0
    assert copy_of(there).steps() == [6]

    bucket.status = 503
    monkeypatch.setenv("ZEROJAX_LOST", "1 2 lost rank 1")  # a restart does not need the store

    def fail() -> None:
        with TrainRun.open(settings, RunFolder(there)):
            raise KeyError

    with pytest.raises(KeyError):  # the first error is reported
        fail()


def test_a_wrong_store_is_refused_before_anything_starts(
    bucket: Bucket,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bucket.status = 403
    run = ["train", "gpt-tiny", "--run-dir", str(tmp_path / "a"), "--checkpoint.copy-to"]
    assert main([*run, "s3://bucket/run"]) == 2
    assert (
        "checkpoint.copy_to: s3://bucket/run: permission denied (HTTP 403). Check" in capsys.readouterr().err
    )
    bucket.status = 503
    assert main([*run, "s3://bucket/run"]) == 1
    monkeypatch.setenv("ZEROJAX_LOST", "1 2 lost rank 1")
    read_run(Options, "train", [*run[1:], "s3://bucket/run"])  # a restart may continue from memory
    assert main([*run, "runs/a"]) == 2
    assert main(["checkpoints", str(tmp_path / "a"), "--fetch", "runs/a"]) == 2
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigurationError, match="must be a URL"):
        micro_config(text, checkpoint={"copy_to": "s3:/bucket/run"})
