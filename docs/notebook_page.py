"""Writes the page of the notebook at each build: its cells, with what they print and draw when they run.

With ``NOTEBOOK_RESULTS=off`` the cells do not run: scripts/test.sh runs them in a test.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOK = Path(__file__).parents[1] / "examples" / "trainer.ipynb"

# IPython without Jupyter: programs ask for this class to find out whether they are in a notebook.
_SHELL = """
import base64, contextlib, io, json, sys
import matplotlib.pyplot as plt
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

class ZMQInteractiveShell(InteractiveShell):
    pass

shell = ZMQInteractiveShell.instance()
shell.history_manager.enabled = False
ran = []
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] != "code":
        continue
    shell.display_pub = CapturingDisplayPublisher(parent=shell)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = shell.run_cell("".join(cell["source"]))
    result.raise_error()
    figures = []
    for number in plt.get_fignums():
        plt.figure(number).savefig(picture := io.BytesIO(), dpi=80)
        figures.append(base64.b64encode(picture.getvalue()).decode())
    plt.close("all")
    ran.append({"printed": out.getvalue(), "shown": shell.display_pub.outputs, "figures": figures})
with open("ran.json", "w") as file:
    json.dump(ran, file, default=str)
"""

# Seconds. Beside the tests, at a lower priority on two cores, a minute's work has taken more than five.
_LIMIT = 1800


def execute(path: Path, folder: Path, variables: dict[str, str]) -> list[dict[str, Any]]:
    """Run a notebook in a folder, and return what each of its code cells printed, displayed and drew.

    Raises:
        RuntimeError: a cell failed; with its output.
    """
    environment = variables | {"IPYTHONDIR": str(folder / "ipython"), "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", _SHELL, str(path)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LIMIT
    )
    if done.returncode:
        raise RuntimeError(f"{path}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads((folder / "ran.json").read_text())


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site."""
    ran: Iterable[dict[str, Any]] = itertools.repeat({"printed": "", "shown": [], "figures": []})
    if os.environ.get("NOTEBOOK_RESULTS") != "off":
        with TemporaryDirectory() as folder:
            ran = execute(NOTEBOOK, Path(folder), dict(os.environ))
    files.append(File.generated(config, "notebook.md", content=page(NOTEBOOK, ran)))
    return files


def page(path: Path, ran: Iterable[dict[str, Any]]) -> str:
    """The notebook with its results as Markdown."""
    parts, results = list[str](), iter(ran)
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts += (
            [source]
            if cell["cell_type"] == "markdown"
            else [_fence("python", source), *_shown(next(results))]
        )
    return "\n\n".join(
        [*parts, "The notebook is `examples/trainer.ipynb`; this page was made by running it.", ""]
    )


def _shown(result: dict[str, Any]) -> list[str]:
    lines: dict[str, str] = {}
    for number, one in enumerate(result["shown"]):
        # A line that replaces itself is shown as it was in the end.
        line = (one.get("transient") or {}).get("display_id", str(number))
        lines[line] = one["data"].get("text/plain", "").rstrip()
    text = "\n".join(filter(None, [result["printed"].rstrip(), *lines.values()]))
    pictures = [
        f'<img alt="what the cell draws" src="data:image/png;base64,{one}">' for one in result["figures"]
    ]
    return [_fence("text", text)] * bool(text) + pictures


def _fence(kind: str, text: str) -> str:
    return f"```{kind}\n{text}\n```"
