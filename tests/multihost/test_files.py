"""Hosts notice that they share no file system, and send each other files."""

from pathlib import Path

import pytest
from thread_hosts import on_hosts

from zerojax.errors import ConfigurationError
from zerojax.multihost import files
from zerojax.multihost.files import exchange_files, on_own_disks, share_folder

FILES = {"a": b"", "b/c": b"bytes", "d": bytes(range(256)) * 1000}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(x.relative_to(folder)): x.read_bytes() for x in folder.rglob("*") if x.is_file()}


def write(folder: Path, names: dict[str, bytes]) -> Path:
    for name, data in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_a_folder_is_shared_by_all_or_by_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not on_own_disks(tmp_path / "absent"), "one process shares with nobody"
    assert on_hosts(monkeypatch, 3, lambda _: on_own_disks(tmp_path / "new")) == [False] * 3
    assert on_hosts(monkeypatch, 3, lambda rank: on_own_disks(tmp_path / str(rank))) == [True] * 3
    assert not contents(tmp_path), "nothing is left"


@pytest.mark.parametrize("sharing", [(0, 1), (0, 2), (1, 2)])
def test_a_folder_of_some_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sharing: tuple[int, int]
) -> None:
    def refusal(rank: int) -> str:
        with pytest.raises(ConfigurationError, match="start one process per host") as refused:
            on_own_disks(tmp_path / ("shared" if rank in sharing else "own"))
        return str(refused.value)

    assert all(f"of processes {[*sharing]}" in line for line in on_hosts(monkeypatch, 3, refusal))


@pytest.mark.parametrize("least", [7, 1 << 16])
def test_every_host_gets_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, least: int) -> None:
    monkeypatch.setattr(files, "_LEAST", least)
    monkeypatch.setattr(files, "_GATHERED", 3 * 5000)
    offered = [["b/c"], ["a", "d"], ["a", "b/c"]]
    for rank, names in enumerate(offered):
        write(tmp_path / str(rank), {name: FILES[name] for name in names})
    wanted = [["a", "d"], [], ["d"]]
    on_hosts(monkeypatch, 3, lambda i: exchange_files(tmp_path / str(i), offered[i], wanted[i]))
    for rank in range(3):
        names = {*offered[rank], *wanted[rank]}
        assert contents(tmp_path / str(rank)) == {name: FILES[name] for name in names}
    with pytest.raises(ConfigurationError, match=r"no host of the job has .*/2/e"):
        on_hosts(monkeypatch, 3, lambda i: exchange_files(tmp_path / str(2), [], ["e"] if i else []))


def test_process_0_shares_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "0", FILES)
    write(tmp_path / "1", {"b/c": b"other", "d": FILES["d"]})
    sent = []
    real = files.exchange_files
    monkeypatch.setattr(files, "exchange_files", lambda *given: sent.append(given[2]) or real(*given))
    on_hosts(monkeypatch, 3, lambda i: share_folder(tmp_path / str(i)))
    assert all(contents(tmp_path / str(rank)) == FILES for rank in range(3))
    assert sorted(map(len, sent)) == [0, 2, 3], "a large file of the same size is there already"
    write(tmp_path / "1", {"e": b"of another run"})
    with pytest.raises(ConfigurationError, match="e is on a host, and not on process 0's"):
        on_hosts(monkeypatch, 3, lambda i: share_folder(tmp_path / str(i)))
