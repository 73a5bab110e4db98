#!/usr/bin/env python3
"""Train gpt-tiny under several presets with the same seed and data, and draw the curves into one picture.

    scripts/convergence.py --steps 1000 --out docs/convergence

Writes OUT.png and OUT.json: each preset's validation loss, smoothed training curve, and the relative
distance of its final losses from the exact run's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

RUNS = {
    "zero3 (exact)": ["--zero.preset", "zero3"],
    "zero++": ["--zero.preset", "zero++"],
    "delta": ["--zero.preset", "delta"],
}
EXACT = next(iter(RUNS))


def train(arguments: list[str], folder: Path, steps: int, more: list[str]) -> tuple[list[float], float]:
    """One run's training losses, and its final validation loss."""
    command = [sys.executable, "-m", "zerojax", "train", "gpt-tiny", "--run-dir", str(folder)]
    subprocess.run([*command, "--train.steps", str(steps), *arguments, *more], check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    return losses, json.loads((folder / "run.json").read_text())["validation_loss"]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """All curves, smoothed over 20 steps, and the distance of each from the exact one."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    smooth = {name: np.convolve(losses, np.ones(20) / 20, "valid") for name, losses in curves.items()}
    for name, losses in smooth.items():
        left.plot(losses, label=name, linewidth=1)
        right.plot(100 * (losses / smooth[EXACT] - 1), label=name, linewidth=1)
    left.set(xlabel="step", ylabel="training loss, nats per byte", ylim=(None, 3))
    right.set(xlabel="step", ylabel="distance from the exact run, %", ylim=(-3, 3))
    left.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run all, write the picture and the figures, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("docs/convergence"))
    parser.add_argument("more", nargs="*", help="after --: given to every run")
    options = parser.parse_args()
    curves, figures = {}, {}
    for name, arguments in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            losses, validation = train(arguments, Path(folder) / "run", options.steps, options.more)
        curves[name] = losses
        figures[name] = {"train": float(np.mean(losses[-50:])), "validation": validation}
    for name, row in figures.items():
        row["train_distance"] = row["train"] / figures[EXACT]["train"] - 1
        row["validation_distance"] = row["validation"] / figures[EXACT]["validation"] - 1
        print(f"{name:16}", "  ".join(f"{key} {value:+.5f}" for key, value in row.items()))
    options.out.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(curves, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
