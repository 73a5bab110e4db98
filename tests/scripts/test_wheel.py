"""The wheel: it has all that a user needs, and trains in an empty folder."""

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from environment import ROOT, for_programs

from zerojax.versions import VERSION

TINY = {
    "--model.layers": 1, "--model.d-model": 16, "--model.heads": 2, "--mesh.nodes": 1, "--mesh.local": 1,
    "--train.steps": 1, "--train.batch-size": 2, "--train.sequence-length": 8, "--train.eval-batches": 1,
}  # fmt: skip


def test_a_wheel_trains_in_an_empty_folder(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("hatchling", reason="the extra zerojax[dev] is not installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    unpacked, empty = tmp_path / "unpacked", tmp_path / "empty"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(unpacked)
    for name in ("zerojax/py.typed", "pallas_kernels/py.typed", "zerojax/run/html_report/page.html"):
        assert (unpacked / name).is_file(), name
    assert {path.name for path in (unpacked / "zerojax/configs").iterdir()} == {
        path.name for path in (ROOT / "configs").iterdir() if path.is_file()
    }
    assert {path.name for path in (unpacked / "zerojax/docs").iterdir()} == {
        path.name for path in (ROOT / "docs").glob("*.md")
    }
    metadata = Parser().parsestr((unpacked / f"zerojax-{VERSION}.dist-info/METADATA").read_text())
    assert metadata["Version"] == VERSION
    assert {"gpu", "gpu-cuda12"} <= set(metadata.get_all("Provides-Extra") or ())
    requires = metadata.get_all("Requires-Dist") or []
    for extra, cuda in {"gpu": "cuda13", "gpu-cuda12": "cuda12"}.items():
        assert [one for one in requires if f"jax[{cuda}]" in one and one.endswith(f"extra == '{extra}'")]

    empty.mkdir()
    usage = subprocess.run(
        [sys.executable, "-m", "zerojax", "--help"],
        env=for_programs() | {"PYTHONPATH": str(unpacked)},
        cwd=empty,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(unpacked / "zerojax/docs/index.md") in usage.stdout
    options = [str(word) for pair in {**TINY, "--data.source": text}.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "zerojax", "train", "gpt-tiny", *options],
        env=for_programs() | {"PYTHONPATH": str(unpacked)},
        cwd=empty,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(empty) == ["runs"]
    find = "from importlib.util import find_spec; print(find_spec('zerojax').origin)"
    where = [sys.executable, "-c", find]
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    found = subprocess.run(where, env=environment, cwd=empty, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(unpacked / "zerojax/__init__.py")
