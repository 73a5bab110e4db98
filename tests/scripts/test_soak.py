"""Runs that are killed come back, and end as if nothing had happened: soak.py, the short way."""

import subprocess
import sys

import pytest
from environment import ROOT

SOAK = ROOT / "scripts" / "acceptance" / "soak.py"


def soak(*options: object) -> str:
    command = [sys.executable, str(SOAK), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow  # accepts a release; test_restore.py, test_preemption.py and test_faults.py hold its parts
def test_three_kills() -> None:
    out = soak("--kills", 4, "--steps", 300, "--save-every", 10)
    assert out.splitlines()[-1].endswith("| equal |")
    assert all(f"{moment} 1" in out for moment in ("start", "step", "save", "snapshot"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_kills_of_three_with_quantized_wires() -> None:
    out = soak("--kills", 10, "--processes", 3, "--steps", 1500, "--runs", "delta")
    assert out.splitlines()[-1].endswith("| equal |")
