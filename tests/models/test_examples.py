"""Every example runs, learns and stays small."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
# What a model that learned nothing would reach, and a loss that is clearly below it.
LEARNED = {
    "nnx_model": (0.75, 0.3),  # the variance of the target
    "linen_scan": (math.log(4), 0.6),
    "vit": (math.log(4), 0.9),
    "encoder_decoder": (math.log(10), 0.5),
    "gemma_style": (math.log(16), 1.7),
}


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_learns(path, capsys):
    loss = load(path).main()
    assert loss < LEARNED[path.stem][1]
    assert "step  0" in capsys.readouterr().out.replace("step   0", "step  0")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_at_most_60_lines(path):
    assert len(path.read_text().splitlines()) <= 60


def test_every_example_is_judged():
    assert {path.stem for path in EXAMPLES} == set(LEARNED)
