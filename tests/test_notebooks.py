"""Every notebook runs from its first cell to its last, in a shell that takes itself for a notebook's."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from environment import ROOT, for_programs

NOTEBOOKS = sorted([*ROOT.glob("examples/*.ipynb"), *ROOT.glob("docs/*.ipynb")])


def notebook_page() -> Any:
    """The hook of mkdocs that runs the notebook for the site."""
    spec = importlib.util.spec_from_file_location("notebook_page", ROOT / "docs" / "notebook_page.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_progress_is_one_line(path: Path, tmp_path: Path):
    hook = notebook_page()
    ran = hook.execute(path, tmp_path, for_programs())
    assert "ipywidgets" not in json.dumps(ran)
    shown = [one for cell in ran for one in cell["shown"]]
    lines = [one["data"]["text/plain"] for one in shown if one.get("update")]
    assert len({str(one["transient"]) for one in shown if one.get("update")}) == 1
    assert "step 60/60 | loss" in lines[-1]
    logged = (tmp_path / "runs" / "speller" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in logged]
    assert losses[-1] < 0.75 * losses[0]
    text = hook.page(path, ran)
    assert text.startswith("# Train a model of your own in a notebook")
    assert [
        text.count(part) for part in ("━ step 60/60 | loss", 'src="data:image/png', "\nstep 60/60 |")
    ] == [1, 1, 1]
    assert "This licence is " in text.split("```text")[-1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path: Path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
