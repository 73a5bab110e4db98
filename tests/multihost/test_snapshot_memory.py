"""zerojax.multihost.snapshot_memory: what survives a process, and who can read it."""

import os
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest

from zerojax.errors import ConfigurationError, RunError
from zerojax.multihost import snapshot_memory
from zerojax.multihost.snapshot_memory import VARIABLE, Checksums, Intervals, SnapshotMemory, copy_bytes

ARRAYS = {"a": np.arange(7, dtype=np.float32), "b": np.zeros(0), "c": np.arange(12).reshape(3, 4).T}
SIZES = {name: x.nbytes for name, x in ARRAYS.items()}
BYTES = sum(SIZES.values())


def fill(places: Mapping[str, np.ndarray]) -> None:
    for name, place in places.items():
        copy_bytes(ARRAYS[name], place)


def write(memory: SnapshotMemory, which: int, text: str = "text") -> Checksums:
    found: Checksums = {}
    held = memory.generations[which].write(SIZES, fill, lambda sums: found.update(sums) or text)
    assert held == BYTES
    return found


@pytest.fixture
def memory() -> SnapshotMemory:
    made = SnapshotMemory(snapshot_memory.create())
    made.resize(BYTES, 3)
    return made


def test_a_later_process_reads_what_an_earlier_one_wrote(memory: SnapshotMemory) -> None:
    sums = write(memory, 1, "ä description")
    memory.touch()
    memory.let_go()
    later = SnapshotMemory(os.dup(memory._descriptor))
    assert [one.text() for one in later.generations] == [None, "ä description"]
    assert later.generations[1].is_intact(sums)
    for name, part in later.generations[1].arrays(sums).items():
        assert part.tobytes() == ARRAYS[name].tobytes()
    assert not memory.update()
    later.resize(BYTES + 5000, 3)
    assert [one.text() for one in later.generations] == [None, None], "of another size, it is lost"
    assert memory.update()
    assert memory.size == later.size


def test_an_interrupted_write_leaves_the_other_generation(memory: SnapshotMemory) -> None:
    sums = write(memory, 0, "older")
    write(memory, 1, "oldest")

    def dies(places: Mapping[str, np.ndarray]) -> None:
        copy_bytes(ARRAYS["a"], places["a"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        memory.generations[1].write(SIZES, dies, lambda _: "newer")
    assert [one.text() for one in memory.generations] == ["older", None]
    assert memory.generations[0].is_intact(sums)


@pytest.mark.parametrize("array", ["a", "c"])
def test_a_changed_byte_is_noticed(memory: SnapshotMemory, array: str) -> None:
    sums = write(memory, 0)
    memory.generations[0].arrays(sums)[array][5] ^= 1
    assert memory.generations[0].text() == "text"
    assert not memory.generations[0].is_intact(sums)


def test_chunks_are_all_copied_and_checked(monkeypatch: pytest.MonkeyPatch, memory: SnapshotMemory) -> None:
    monkeypatch.setattr(snapshot_memory, "_CHUNK", 10)
    sums = write(memory, 0)
    assert memory.generations[0].arrays(sums)["c"].tobytes() == ARRAYS["c"].tobytes()
    memory.generations[0].arrays(sums)["c"][-1] ^= 1
    assert not memory.generations[0].is_intact(sums)


def test_too_much_is_refused(memory: SnapshotMemory) -> None:
    with pytest.raises(RunError, match="outgrows its memory"):
        memory.generations[0].write({"a": 72000}, fill, lambda _: "")
    with pytest.raises(RunError, match="room for"):
        write(memory, 0, "x" * (2 << 20))
    assert memory.generations[0].text() is None


def test_only_its_user_can_open_it(memory: SnapshotMemory) -> None:
    """And no program that the process starts has it."""
    path = f"/proc/{os.getpid()}/fd/{memory._descriptor}"
    assert os.fstat(memory._descriptor).st_mode & 0o777 == 0o600
    assert "(deleted)" in os.readlink(path), "it has no name"
    assert not os.get_inheritable(memory._descriptor)
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    stranger = f"import os; os.setgid(65534); os.setuid(65534); open({path!r}, 'rb')"
    done = subprocess.run([sys.executable, "-c", stranger], capture_output=True, text=True)
    assert "PermissionError" in done.stderr


def test_a_process_finds_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SnapshotMemory.find() is None
    monkeypatch.setenv(VARIABLE, f"{snapshot_memory.create()} 2.5 60 4")
    found = SnapshotMemory.find()
    assert found is not None
    assert found[1] == Intervals(2.5, 60, 4)
    assert len(found[0].generations) == 5
    assert SnapshotMemory.find() is None, "a program that this one starts has none"


@pytest.mark.parametrize("given", ["", "7", "a 1 0 0", "999 5 0 0", "0 x 0 0", "0 1"])
def test_a_variable_from_elsewhere_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ConfigurationError, match="is not from `zerojax launch`"):
        SnapshotMemory.find()
