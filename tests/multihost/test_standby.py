"""zerojax.multihost.standby: a process that has imported everything runs a command when it is told to."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from zerojax.multihost.standby import Standby
from zerojax.multihost.supervisor import Supervisor, Task

MODULE = "small_module"


@pytest.fixture
def standby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that stands by, with ``zerojax.cli`` replaced by a program that shows what it has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small_module.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    package = tmp_path / "zerojax" / "cli"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "import os, sys\n"
        "def program():\n"
        "    print(sys.argv[1:], os.environ.get('BEFORE'), os.environ['NOW'], repr(sys.stdin.read()))\n"
        "    sys.exit(7)\n"
    )
    made = []

    def begin(after: float = 0.0) -> Standby:
        made.append(Standby("rank 0", MODULE, os.environ | {"BEFORE": "1"}, (), after))
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
        standby=lambda: standby.begin(["train", "a b"], {"NOW": "2", "PATH": os.environ["PATH"]}),
    )
    with (tmp_path / "out").open("wb") as out:
        result = Supervisor([task], grace=5, output=out).run()
    return result.code, (tmp_path / "out").read_text()


def test_it_runs_a_command_with_its_environment(standby, tmp_path: Path) -> None:
    waiting = standby()
    wait_for(tmp_path / "imported")
    assert run(waiting, tmp_path) == (7, "[rank 0] ['train', 'a b'] None 2 ''\n")


def test_a_command_that_comes_early_does_not_wait(standby, tmp_path: Path) -> None:
    waiting, begun = standby(after=600.0), time.monotonic()
    assert not (tmp_path / "imported").exists()
    assert run(waiting, tmp_path)[0] == 7
    assert time.monotonic() - begun < 60


def test_a_new_process_takes_its_place_if_it_has_died(standby, tmp_path: Path) -> None:
    waiting = standby()
    wait_for(tmp_path / "imported")
    waiting._process.kill()
    waiting._process.wait()
    assert run(waiting, tmp_path) == (5, "[rank 0] new process\n")


def test_it_ends_unused(standby) -> None:
    waiting = standby()
    process = psutil.Process(waiting._process.pid)
    waiting.close()
    assert not process.is_running()


def test_jax_has_no_backend_after_the_imports() -> None:
    code = (
        "import zerojax.cli.train, zerojax.cli.posttrain, jax._src.xla_bridge as bridge\n"
        "assert not bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
