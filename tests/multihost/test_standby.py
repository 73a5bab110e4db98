"""zerojax.multihost.standby: a process waits until its launcher lets it begin."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from zerojax.multihost.standby import COMPILE, Standby
from zerojax.multihost.supervisor import Supervisor, Task

# A process with something to do before it waits, and a look at what it has afterwards.
PROGRAM = """
import os, sys
from pathlib import Path
from zerojax.multihost import standby
Path(sys.argv[1]).touch()
print(standby.waits(0))
standby.wait()
print(os.environ["BEFORE"], os.environ.get("NOW"), os.environ.get(standby.VARIABLE), repr(sys.stdin.read()))
print(standby.waits(0), flush=True)
sys.exit(7)
"""


@pytest.fixture
def standby(tmp_path: Path):
    """Starts a process that stands by."""
    made = []

    def begin(after: float = 0.0) -> Standby:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "ready")]
        made.append(Standby(command, os.environ | {"BEFORE": "1"}, (), after))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def run(standby: Standby, tmp_path: Path) -> tuple[int, str]:
    """Run a task that a standby process may begin: its exit code and output."""
    task = Task(
        "rank 0",
        ["sh", "-c", "echo new process; exit 5"],
        os.environ,
        standby=lambda: standby.begin({"NOW": "2"}),
    )
    with (tmp_path / "out").open("wb") as out:
        result = Supervisor([task], grace=5, output=out).run()
    return result.code, (tmp_path / "out").read_text()


def test_it_goes_on_with_more_variables(standby, tmp_path: Path) -> None:
    waiting = standby()
    wait_for(tmp_path / "ready")
    assert waiting.waits
    wanted = "[rank 0] True\n[rank 0] 1 2 None ''\n[rank 0] False\n"
    assert run(waiting, tmp_path) == (7, wanted)


def test_one_that_begins_early_does_not_wait(standby, tmp_path: Path) -> None:
    waiting, begun = standby(after=600.0), time.monotonic()
    assert not (tmp_path / "ready").exists()
    assert run(waiting, tmp_path)[0] == 7
    assert time.monotonic() - begun < 60


PREPARES = """
from pathlib import Path
import sys
from zerojax.multihost import standby
folder = Path(sys.argv[1])
works = lambda: (folder / "ready").touch() or not (folder / "broken").exists()
standby.wait(works=works, meanwhile=(folder / "prepared").touch)
sys.exit(7)
"""


@pytest.fixture
def prepares(tmp_path: Path):
    """A process with work to do once the job before it is lost."""
    one = Standby([sys.executable, "-c", PREPARES, str(tmp_path)], os.environ, (), 0.0)
    wait_for(tmp_path / "ready")
    yield one
    one.close()


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_it_prepares_once_a_process_of_the_job_is_lost(prepares, tmp_path: Path, told: bool) -> None:
    if told:
        prepares.prepare()
        wait_for(tmp_path / "prepared")
        assert prepares.waits
    assert run(prepares, tmp_path)[0] == 7
    assert (tmp_path / "prepared").exists() == told


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_it_ends_when_it_can_no_longer_begin(prepares, tmp_path: Path, told: bool) -> None:
    if told:
        prepares.prepare()
    (tmp_path / "broken").touch()
    assert prepares._process.wait(60) == 1
    assert not prepares.waits
    prepares.prepare()  # which finds nobody
    assert run(prepares, tmp_path) == (5, "[rank 0] new process\n")


def test_a_new_process_takes_its_place_if_it_has_died(standby, tmp_path: Path) -> None:
    waiting = standby()
    waiting._process.kill()
    waiting._process.wait()
    assert not waiting.waits
    assert run(waiting, tmp_path) == (5, "[rank 0] new process\n")


def test_it_ends_if_its_launcher_needs_it_no_more(standby, tmp_path: Path) -> None:
    waiting = standby()
    wait_for(tmp_path / "ready")
    assert waiting._process.stdin is not None
    waiting._process.stdin.close()
    assert waiting._process.wait(60) == 0


def test_one_that_only_compiles_has_the_lowest_priority(tmp_path: Path) -> None:
    line = "import os; from zerojax.multihost import standby; print(standby.only_compiles(), os.nice(0))"
    found = []
    for value in (COMPILE, "1"):
        one = Standby([sys.executable, "-c", line], os.environ, (), 0.0, value)
        assert one._process.stdout is not None
        found.append(one._process.stdout.read().decode().split())
        one.close()
    assert found == [["True", "19"], ["False", str(os.nice(0))]]


def test_it_ends_unused(standby) -> None:
    waiting = standby()
    process = psutil.Process(waiting._process.pid)
    waiting.close()
    assert not process.is_running()
