"""Hosts without a shared file system find and complete a checkpoint of which each has a part."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from thread_hosts import on_hosts

from zerojax.cli import main
from zerojax.errors import ConfigurationError
from zerojax.run.checkpoints import DamagedError, Record, read_manifest, verify
from zerojax.run.checkpoints import select as selection
from zerojax.run.checkpoints.manifest import write_manifest


def store(folder: Path) -> ts.KvStore:
    base = {"driver": "file", "path": f"{folder}/"}
    return ts.KvStore.open({"driver": "ocdbt", "base": base}).result()


def save(host: Path, step: int, part: int, parts: int = 2, at: float = 1.0) -> Path:
    """What a process saves on its own disk: here one chunk of an array, and the array's metadata."""
    path = host / str(step)
    own = store(path / "params" / f"ocdbt.process_{part}")
    for key in ("x/zarr.json", *(f"x/c/{i}" for i in range(parts) if i == part)):
        own.write(key, f"{step} {key}".encode()).result()
    (path / "params" / "_METADATA").write_text(f"of {host.name}")
    write_manifest(path, step, at, Record(seconds=float(part)), part=part, parts=parts)
    return path


def choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hosts: int = 3) -> tuple[Any, list[str]]:
    """What a start of the run chooses on all hosts."""
    found = on_hosts(monkeypatch, hosts, lambda i: selection.choose(tmp_path / str(i)))
    (one, *others) = [(manifest and manifest.step, lines) for manifest, lines in found]
    assert all(other == one for other in others)
    return one


def chunks(path: Path) -> dict[str, str]:
    verify(path, int(path.name))
    whole = store(path / "params")
    keys = [key.decode() for key in whole.list().result()]
    return {key: whole.read(key).result().value.decode() for key in keys}


def test_parts_and_an_empty_disk_become_whole_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = save(tmp_path / "0", 4, 0)
    save(tmp_path / "1", 4, 1)
    with pytest.raises(DamagedError, match="only part 1 of 2"):
        verify(part)
    (part / "params" / "ocdbt.process_1").mkdir()
    (part / "params" / "ocdbt.process_1" / "left").touch()  # by a start that was interrupted
    assert choose(monkeypatch, tmp_path) == (4, [])
    assert not (part / "params" / "ocdbt.process_1" / "left").exists()
    for host in "012":
        found = chunks(tmp_path / host / "4")
        assert found == {key: f"4 {key}" for key in ("x/zarr.json", "x/c/0", "x/c/1")}
        assert sorted(x.name for x in (tmp_path / host).iterdir()) == ["4"]
    before = [x.stat().st_mtime_ns for x in tmp_path.rglob("*") if x.is_file()]
    assert choose(monkeypatch, tmp_path) == (4, [])
    assert before == [x.stat().st_mtime_ns for x in tmp_path.rglob("*") if x.is_file()], "nothing was sent"


def test_what_is_incomplete_or_of_another_save_is_set_aside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for rank in (0, 1):
        save(tmp_path / str(rank), 4, rank)
        save(tmp_path / str(rank), 6, rank, at=2.0 + rank)
    save(tmp_path / "1", 8, 1)
    step, lines = choose(monkeypatch, tmp_path)
    assert step == 4
    assert [line.partition(":")[0] for line in lines] == ["process 0", *["process 1"] * 2]
    assert all("do not have all of its parts; it is now called" in line for line in lines)
    assert sorted(x.name for x in (tmp_path / "1").iterdir()) == ["4", "6.damaged", "8.damaged"]


def test_a_damaged_checkpoint_is_replaced_by_another_hosts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for rank in (0, 1):
        save(tmp_path / str(rank), 4, 0, parts=1, at=2.0)  # each node has the whole state
    damaged, *_ = (tmp_path / "0" / "4" / "params" / "ocdbt.process_0" / "d").iterdir()
    damaged.write_bytes(b"")
    step, (line,) = choose(monkeypatch, tmp_path, hosts=2)
    assert step == 4
    assert line.startswith("process 0: checkpoint")
    assert line.endswith("it is now called 4.damaged")
    assert chunks(tmp_path / "0" / "4") == {"x/zarr.json": "4 x/zarr.json", "x/c/0": "4 x/c/0"}


def test_commands_on_one_host_do_not_read_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "checkpoints", 4, 1)
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert "part 2 of 2, verified" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="this host has only part 2 of 2"):
        selection.find(tmp_path)


def test_a_run_does_not_begin_anew_without_a_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save(tmp_path / "1", 4, 1)
    with pytest.raises(ConfigurationError, match=r"of steps \[4\].*do not have all of its parts.*Bring back"):
        choose(monkeypatch, tmp_path)
    assert read_manifest(tmp_path / "1" / "4").part == 1, "nothing is renamed"
    shutil.rmtree(tmp_path / "1" / "4")
    found = on_hosts(monkeypatch, 3, lambda i: selection.choose(tmp_path / str(i)))
    assert found == [(None, [])] * 3
