"""The mutation runner on a project of one function and one test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from environment import ROOT

SCRIPT = ROOT / "scripts" / "acceptance" / "mutants.py"

CODE = """\
def double(x):
    y = 2 * x
    return y + 0
"""
TEST = """\
import code_under_test

def test_double():
    assert code_under_test.double(3) == 6
"""
LIST = """\
file = "code_under_test.py"
tests = ["test_code.py -k double"]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "code_under_test.py").write_text(CODE)
    (tmp_path / "test_code.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "scripts" / "acceptance" / "mutants").mkdir(parents=True)
    return tmp_path


def mutant(breaks: str, old: str, new: str, equivalent: str = "") -> str:
    lines = {"breaks": breaks, "old": old, "new": new, "equivalent": equivalent}
    return "[[mutants]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())


def run(project: Path, *mutants: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (project / "scripts" / "acceptance" / "mutants" / "code.toml").write_text(LIST + "".join(mutants))
    command = [sys.executable, str(SCRIPT), "--root", str(project), "--jobs", "2", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


KILLED = mutant("triples", "2 * x", "3 * x")
SURVIVOR = mutant("doubles small numbers only", "2 * x", "2 * x if x < 9 else x")
EQUIVALENT = mutant("adds one less", "y + 0", "y - 0", "zero has no sign")


@pytest.mark.slow
def test_verdicts_and_what_is_kept_of_them(project):
    mistaken = mutant("doubles nothing", "2 * x", "0", "said so")
    misspelt = mutant("misspells", "2 * x", "2 * z")
    done = run(project, KILLED, SURVIVOR, EQUIVALENT, mistaken, misspelt)
    assert done.returncode == 1, done.stderr
    table = done.stdout.split("\n\n")[-1]
    lines = {line.split("  ")[-2 if "(" in line else -1]: line for line in table.splitlines()[:-1]}
    verdicts = {name: line[:14].strip() for name, line in lines.items()}
    assert verdicts == {
        "code: triples": "killed",
        "code: doubles small numbers only": "survived",
        "code: adds one less": "equivalent",
        "code: doubles nothing": "not equivalent",
        "code: misspells": "broken",
    }
    assert "(test_code.py::test_double)" in lines["code: triples"]
    assert "(zero has no sign)" in lines["code: adds one less"]
    assert (project / "code_under_test.py").read_text() == CODE

    # What is settled is not run again; a survivor is, and its new test kills it.
    (project / "test_code.py").write_text(TEST + "    assert code_under_test.double(10) == 20\n")
    done = run(project, KILLED, SURVIVOR, EQUIVALENT)
    assert done.returncode == 0, done.stdout + done.stderr
    worked_on, _ = done.stdout.split("\n\n")
    assert "triples" not in worked_on
    assert "small numbers" in worked_on


def test_lists_that_do_not_fit_the_code_are_refused(project):
    gone = mutant("halves", "x / 2", "x / 3")
    twice = mutant("renames", "x", "z")
    wrong = mutant("cannot be parsed", "2 * x", "2 *")
    done = run(project, gone, twice, wrong, KILLED, KILLED, options=("--check",))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "code: halves: its text occurs 0 times in code_under_test.py, not once",
        "code: renames: its text occurs 2 times in code_under_test.py, not once",
        "code: cannot be parsed: line 2: invalid syntax",
        "code: triples: this name is given twice",
    ]


def test_nothing_is_judged_by_a_test_that_fails_anyway(project):
    (project / "test_code.py").write_text(TEST.replace("6", "7"))
    done = run(project, KILLED)
    assert done.returncode == 2
    assert "without any mutant, test_code.py" in done.stderr
    assert "assert 6 == 7" in done.stderr
