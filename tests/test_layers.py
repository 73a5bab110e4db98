"""The packages of zerojax stand in layers: each imports only from those before it in CONTRIBUTING's map."""

import ast
import re
from collections.abc import Iterator

import pytest
from environment import ROOT

PACKAGE = ROOT / "zerojax"
LAYERS = (
    *("terminal", "errors", "log", "versions", "documentation", "formatting", "compilation_cache"),
    *("validation", "zero_config", "network", "dataflow"),
    *("matmul", "sharding", "comm", "weights", "schedule", "adapters", "experts", "optim", "train", "models"),
    *("generation", "analysis", "multihost", "run", "interop", "posttrain", "testing", "cli"),
)


def imports(room: str) -> Iterator[tuple[str, str]]:
    """What the files of a package or module import of zerojax: the file, and the package or module.

    It is "zerojax" where a file takes public names from the top, which imports nearly everything.
    """
    files = (
        PACKAGE.glob(f"{room}.py") if (PACKAGE / f"{room}.py").exists() else (PACKAGE / room).rglob("*.py")
    )
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "zerojax":
                names = [alias.name for alias in node.names]
                yield from ((str(file), name if name in LAYERS else "zerojax") for name in names)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zerojax."):
                yield str(file), (node.module or "").split(".")[1]
            elif isinstance(node, ast.Import):
                names = [alias.name.split(".") for alias in node.names]
                yield from (
                    (str(file), name[-1] if len(name) == 1 else name[1])
                    for name in names
                    if name[0] == "zerojax"
                )


@pytest.mark.parametrize("room", LAYERS)
def test_a_layer_imports_only_from_those_before_it(room: str):
    later = LAYERS[LAYERS.index(room) + 1 :]
    assert not [(file, imported) for file, imported in imports(room) if imported in (*later, "zerojax")]


def test_every_file_is_in_a_layer():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    rooms |= {path.stem for path in PACKAGE.glob("[a-z]*.py")}
    assert rooms == set(LAYERS)


def test_the_code_map_has_the_layers_in_this_order():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"\]\(zerojax/(\w+)(?:/|\.py)\)", text)
    assert list(dict.fromkeys(name for name in named if name in LAYERS)) == list(LAYERS)
