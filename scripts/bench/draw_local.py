#!/usr/bin/env python3
"""Draw the distance of local updates from zero3, of the runs that train weights on (docs/quality.md).

scripts/bench/draw_local.py --picture docs/quality-local.png
"""

import json
from pathlib import Path

import convergence
import harness
import paired

MEASURED = Path(__file__).parents[2] / "docs" / "measured"


def runs_of(optimizer: str) -> list[dict]:
    """The runs of an optimizer at their best rates, named by optimizer and variant."""
    file = MEASURED / f"quality-local-tuned-{optimizer}.json"
    found = []
    for run in convergence.with_best_rates(json.loads(file.read_text())["runs"], seed=0):
        variant = run["variant"].removesuffix("-sum")
        name = variant if variant == "zero3" else f"{optimizer}, {variant}"
        found.append({**run, "variant": name, "seed": f"{optimizer} {run['seed']}"})
    return found


def main() -> None:
    """Write the picture."""
    parser = harness.parser(__doc__)
    parser.add_argument("--picture", type=Path, required=True)
    options = parser.parse_args()
    runs = runs_of("muon") + runs_of("adamw")
    runs.sort(key=lambda run: (run["variant"].partition(",")[0], run["between_nodes"]), reverse=True)
    paired.draw(runs, "zero3", options.picture, "loss")


if __name__ == "__main__":
    main()
