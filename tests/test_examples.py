"""Every example runs, learns and stays small."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
from environment import ROOT

from zerojax import checkpoints

EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "guess_number"]
GAME = ROOT / "examples/guess_number.py"
# What a model that learned nothing would reach, and a loss that is clearly below it.
LEARNED = {
    "nnx_model": (0.75, 0.3),  # the variance of the target
    "nnx_loop": (0.75, 0.3),
    "linen_scan": (math.log(4), 0.6),
    "linen_loop": (math.log(4), 0.6),
    "vit": (math.log(4), 0.9),
    "encoder_decoder": (math.log(10), 0.5),
    "gemma_style": (math.log(16), 1.7),
}
LOOPS = [path for path in EXAMPLES if path.stem.endswith("_loop")]
# The other one is short; tests/docs runs loops.
LONG = ("encoder_decoder", "gemma_style", "linen_loop", "nnx_loop", "nnx_model", "vit")


def to_run(paths: list[Path]) -> list[Any]:
    """The long ones run on request."""
    return [
        pytest.param(path, marks=pytest.mark.slow if path.stem in LONG else (), id=path.stem)
        for path in paths
    ]


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", to_run([path for path in EXAMPLES if path not in LOOPS]))
def test_an_example_learns(path, capsys):
    loss = load(path).main()
    assert loss < LEARNED[path.stem][1]
    assert "step  0" in capsys.readouterr().out.replace("step   0", "step  0")


@pytest.mark.parametrize("path", to_run(LOOPS))
def test_a_loop_learns_and_goes_on_where_it_stood_on_another_mesh(path, tmp_path, capsys):
    main = load(path).main
    at_once = main(tmp_path / "at once")
    assert at_once < LEARNED[path.stem][1]
    assert "step 40" in capsys.readouterr().out
    main(tmp_path / "in two", steps=20)
    assert "step 20" in capsys.readouterr().out
    in_two = main(tmp_path / "in two", nodes=4, local=2)
    # Other roundings on the other mesh; from other rows, or other weights, it would be far off.
    assert in_two == pytest.approx(at_once, rel=0.05)
    said = capsys.readouterr().out
    assert "step 30" in said
    assert "step 20" not in said
    assert checkpoints.newest_valid(tmp_path / "in two" / "checkpoints").step == 40
    assert len(list((tmp_path / "in two" / "tensorboard").iterdir())) == 2
    assert main(tmp_path / "in two", nodes=4, local=2) == in_two


def test_the_best_play_wins_every_game():
    game = load(GAME).Game()
    for secret in range(1, 8):
        low, high, state, reward = 1, 7, game.reset("Game 1", secret), 0
        said: str | None = "begin"
        while said is not None:
            guess = (low + high) // 2
            state, said, reward = game.step(state, f"{guess}\n")
            low, high = (guess + 1, high) if said == "higher" else (low, guess - 1)
        assert reward == 1
    assert game.step(game.reset("Game 1", 3), "three")[1:] == (None, 0)


@pytest.mark.parametrize("path", [*EXAMPLES, GAME], ids=lambda path: path.stem)
def test_an_example_can_be_read_at_once(path):
    assert len(path.read_text().splitlines()) <= (80 if path in (*LOOPS, GAME) else 60)


def test_every_example_is_judged():
    assert {path.stem for path in EXAMPLES} == set(LEARNED)
