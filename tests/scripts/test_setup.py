"""scripts/setup.sh: it installs tested versions, once; pyproject.toml also takes the newest."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from environment import ROOT, for_programs
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILES = ("pyproject.toml", "constraints.txt", "scripts/setup.sh", "scripts/install_cuda_compiler.sh")
# An interpreter that notes how it is called.
PYTHON = f"""#!/bin/sh
echo "$PIP_CONSTRAINT|$*" >>"$0.calls"
[ "$1" = -m ] || exec {sys.executable} "$@"
"""


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pattern = re.compile(r"([a-z0-9-]+)==([0-9][^ ;]*)( ; [^:/]+)?")
    found = [pattern.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found), "constraints.txt has more than names, versions and markers"
    return {match[1]: match[2] for match in found if match}


def test_every_dependency_has_a_tested_version_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = itertools.chain(*project["optional-dependencies"].values())
    tested = constraints()
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        assert tested[canonicalize_name(requirement.name)] in requirement.specifier, str(requirement)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files for set-up, with an interpreter in .venv that only notes its calls."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def calls(checkout: Path, script: str, *arguments: str, **variables: str) -> list[str]:
    """The calls of the interpreter while a script runs."""
    noted = checkout / ".venv/bin/python.calls"
    noted.write_text("")
    environment = {"PYTHON": sys.executable, "PATH": os.environ["PATH"], **variables}
    subprocess.run([checkout / "scripts" / script, *arguments], env=environment, cwd=checkout, check=True)
    return noted.read_text().splitlines()


UV = """#!/bin/sh
echo "$UV_CONSTRAINT|uv $*" >>"$(dirname "$0")/python.calls"
"""


def test_setup_installs_again_only_if_bounds_or_tested_versions_changed(checkout: Path) -> None:
    of_uv, of_pip = calls(checkout, "setup.sh", "dev", PIP_CONSTRAINT="mine.txt")  # uv cannot be installed
    for call, wanted in ((of_uv, " uv"), (of_pip, "--editable .[dev]")):
        assert call.startswith("mine.txt constraints.txt|-m pip install")
        assert call.endswith(wanted)
    uv = checkout / ".venv/bin/uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    assert calls(checkout, "setup.sh", "dev") == []
    *_, call = calls(checkout, "setup.sh")
    assert call.startswith("constraints.txt|uv pip install")
    for name in FILES[:2]:
        with (checkout / name).open("a") as file:
            file.write("# renewed\n")
        assert len(calls(checkout, "setup.sh", "dev")) == 2, name


def test_the_compiler_for_absent_gpus_has_a_tested_version(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "compiler"
    folder.mkdir()
    python = str(checkout / ".venv/bin/python")
    *_, call = calls(checkout, "install_cuda_compiler.sh", str(folder), PYTHON=python)
    assert call.endswith(f" nvidia-cuda-nvcc-cu12=={constraints()['nvidia-cuda-nvcc-cu12']}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_newest_versions_take_steps(tmp_path: Path, text: Path) -> None:
    python = tmp_path / "venv/bin/python"
    environment = {k: v for k, v in for_programs().items() if k not in ("PIP_CONSTRAINT", "PYTHONPATH")}

    def run(*command: object) -> str:
        options = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
        done = subprocess.run([*map(str, command)], **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(python, "-m", "pip", "install", "--quiet", ROOT)
    settings = "--mesh.nodes 2 --mesh.local 2 --model.layers 2 --model.d-model 16 --model.heads 2"
    steps = "--train.steps 3 --train.batch-size 4 --train.sequence-length 8 --train.eval-batches 1"
    for preset in ("zero3", "zero++", "delta", "local"):
        options = f"{settings} {steps} --zero.preset {preset} --run-dir {preset}".split()
        run(python, "-m", "zerojax", "train", "gpt-tiny", *options, "--data.source", text)
