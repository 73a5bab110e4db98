"""Manifests: every kind of damage is detected and named, and the previous checkpoint is chosen."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import jax
import pytest

from zerojax.errors import ZeroError
from zerojax.run.checkpoints import (
    DamagedError,
    Record,
    find,
    newest_valid,
    read_manifest,
    read_manifests,
    step_dirs,
    verify,
)
from zerojax.run.checkpoints.manifest import write_manifest
from zerojax.validation.untrusted import dump_checked, load_checked

RECORD = Record({"train": {"steps": 9}}, {"next": 3}, 2, 61.5, (2, 4), {"validation_loss": 1.25})
FILES = {
    "params/d/a": b"x" * 9_000_000,
    "params/manifest": b"123456789",
    "optimizer/d/b": bytes(1000),
    "_META": b"{}",
}


def make(folder: Path, step: int) -> Path:
    """A folder like a checkpoint, with a manifest."""
    path = folder / str(step)
    for name, data in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    write_manifest(path, step, 1.7e9, RECORD)
    return path


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def forge(path: Path, **values: object) -> None:
    """Change values of a manifest, with the checksum that belongs to them."""
    file = path / "manifest.json"
    file.write_text(dump_checked(load_checked(file.read_text()) | values))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda p: os.truncate(p / "params/d/a", 5), "params/d/a has 5 bytes, not 9000000"),
    "emptied": (lambda p: os.truncate(p / "params/manifest", 0), "params/manifest has 0 bytes, not 9"),
    "flipped": (lambda p: flip(p / "params/d/a", 8_999_999), "params/d/a has changed"),
    "missing": (lambda p: (p / "optimizer/d/b").unlink(), "optimizer/d/b is missing"),
    "extra": (lambda p: (p / "params/d/half.tmp").touch(), "params/d/half.tmp does not belong to it"),
    "two": (
        lambda p: [(p / n).unlink() for n in ("_META", "params/manifest")],
        r"_META is missing \(and 1 more\)",
    ),
    "link": (lambda p: (p / "params/link").symlink_to("/etc/passwd"), "params/link is not a plain file"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "cut manifest": (lambda p: os.truncate(p / "manifest.json", 200), "manifest.json is damaged"),
    "changed manifest": (
        lambda p: (p / "manifest.json").write_text((p / "manifest.json").read_text().replace("61.5", "61.0")),
        "manifest.json is damaged: wrong checksum",
    ),
    "absurd time": (
        lambda p: forge(p, saved_at=1e300),
        r"manifest.json is damaged: saved_at = 1e\+300 is not a time",
    ),
    "absurd seconds": (
        lambda p: forge(p, record=asdict(RECORD) | {"seconds": -1e18}),
        r"manifest.json is damaged: seconds = -1e\+18 is not a time",
    ),
    "binary manifest": (lambda p: (p / "manifest.json").write_bytes(b"\xff\x00"), "manifest.json is damaged"),
}


def test_a_valid_checkpoint_is_found(tmp_path: Path) -> None:
    manifest = verify(make(tmp_path, 400), 400)
    assert (manifest.step, manifest.saved_at, manifest.record) == (400, 1.7e9, RECORD)
    assert manifest.size == sum(map(len, FILES.values()))
    assert manifest.files.keys() == FILES.keys()
    assert manifest.files["params/manifest"] == (
        9,
        0xCBF43926,
    )  # the check value that every list of CRCs gives
    assert read_manifests(tmp_path) == [manifest]
    assert find(tmp_path / "400") == tmp_path / "400"


def test_a_manifest_by_its_name_of_version_0_1_is_read(tmp_path):
    path = make(tmp_path, 400)
    written = read_manifest(path)
    (path / "manifest.json").rename(path / "seal.json")
    assert verify(path) == written
    (path / "manifest.json").write_bytes((path / "seal.json").read_bytes())
    with pytest.raises(DamagedError, match=r"seal\.json does not belong to it"):
        verify(path)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named_and_the_one_before_is_taken(tmp_path: Path, kind: str) -> None:
    make(tmp_path, 300)
    make(tmp_path, 200)
    damage, message = DAMAGES[kind]
    damage(make(tmp_path, 400))
    with pytest.raises(DamagedError, match=message):
        verify(tmp_path / "400", 400)
    choice = newest_valid(tmp_path)
    assert choice.step == 300
    assert choice.damaged.keys() == {400}
    assert step_dirs.steps(tmp_path) == [200, 300, 400], "looking changes nothing"
    with pytest.raises(ZeroError, match=message):
        find(tmp_path / "400")


def test_sizes_alone_are_compared_on_wish(tmp_path: Path) -> None:
    path = make(tmp_path, 400)
    flip(path / "params/d/a", 1)
    assert verify(path, checksums=False).step == 400
    os.truncate(path / "params/d/a", 1)
    with pytest.raises(DamagedError):
        verify(path, checksums=False)


def test_a_checkpoint_under_another_step_s_name(tmp_path: Path) -> None:
    make(tmp_path, 400).rename(tmp_path / "500")
    with pytest.raises(ZeroError, match=r"500 is damaged: manifest\.json belongs to step 400"):
        newest_valid(tmp_path)


def test_all_damaged_is_refused_and_none_is_none(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "nowhere").step is None
    assert newest_valid(tmp_path).step is None
    for step in (1, 2):
        (make(tmp_path, step) / "_META").unlink()
    with pytest.raises(ZeroError, match=r"2 is damaged: _META is missing; .*1 is damaged: .*start over"):
        newest_valid(tmp_path)


def test_names_of_folders_say_what_they_hold(tmp_path: Path) -> None:
    for name in ("400", "0", "0400", "400.unfinished", "400.removed", "400.damaged", "notes", "x400"):
        (tmp_path / name).mkdir()
    (tmp_path / "300").touch()
    assert step_dirs.steps(tmp_path) == [0, 400]
    assert step_dirs.move_aside(tmp_path, 400).name == "400.damaged-2"
    assert [path.name for path in step_dirs.aside(tmp_path)] == ["400.damaged", "400.damaged-2"]
    step_dirs.remove(tmp_path / "400.damaged")
    step_dirs.clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0",
        "0400",
        "300",
        "400.damaged-2",
        "notes",
        "x400",
    ]


def test_find_refuses_what_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # ``--init-from`` is read before devices are emulated, which is too late once JAX has looked for them.
    monkeypatch.setattr(jax, "process_index", lambda: pytest.fail("JAX has looked for devices"))
    with pytest.raises(ZeroError, match="neither a run's folder nor a checkpoint"):
        find(tmp_path / "nothing")
    with pytest.raises(ZeroError, match=r"not a checkpoint, or is damaged: manifest\.json is missing"):
        find(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ZeroError, match="there is no checkpoint yet"):
        find(tmp_path)
    make(tmp_path / "checkpoints", 3)
    assert find(tmp_path) == tmp_path / "checkpoints" / "3"
    assert read_manifest(find(tmp_path)).step == 3
