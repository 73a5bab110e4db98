"""Every notebook runs from its first cell to its last, in a shell that takes itself for a notebook's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from environment import ROOT, for_programs

NOTEBOOKS = sorted([*ROOT.glob("examples/*.ipynb"), *ROOT.glob("docs/*.ipynb")])
# IPython without Jupyter: programs ask for this class to find out whether they are in a notebook.
SHELL = """
import json, sys
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

class ZMQInteractiveShell(InteractiveShell):
    pass

shell = ZMQInteractiveShell.instance()
shell.history_manager.enabled = False
shell.display_pub = CapturingDisplayPublisher(parent=shell)
with open(sys.argv[1]) as file:
    cells = json.load(file)["cells"]
for cell in cells:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"])).raise_error()
with open("shown.json", "w") as file:
    json.dump(shell.display_pub.outputs, file, default=str)
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_progress_is_one_line(path: Path, tmp_path: Path):
    variables = for_programs() | {"IPYTHONDIR": str(tmp_path / "ipython"), "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", SHELL, str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "ipywidgets" not in done.stdout + done.stderr
    shown = json.loads((tmp_path / "shown.json").read_text())
    lines = [one["data"]["text/plain"] for one in shown if one.get("update")]
    assert len({str(one["transient"]) for one in shown if one.get("update")}) == 1
    assert "step 60/60 | loss" in lines[-1]
    logged = (tmp_path / "runs" / "speller" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in logged]
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path: Path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
