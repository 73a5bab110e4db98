"""Plot of the loss curve from ``metrics.jsonl``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_loss_curve(steps: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw training and validation loss against steps, as PNG; steps without a finite loss are skipped."""
    # Matplotlib takes longer to import than all of zerojax, and most commands draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    trained = [line for line in steps if line.get("loss") is not None]
    axes.plot([s["step"] for s in trained], [s["loss"] for s in trained], lw=1, label="training")
    # Only runs on preferences have an accuracy.
    unit = "mean over pairs" if any("accuracy" in line for line in steps) else "nats per token"
    evaluated = [line for line in steps if line.get("validation_loss") is not None]
    if evaluated:
        xs = [line["step"] for line in evaluated]
        ys = [line["validation_loss"] for line in evaluated]
        axes.plot(xs, ys, "o-", label="validation")
        axes.annotate(
            f"{ys[-1]:.3f}", (xs[-1], ys[-1]), textcoords="offset points", xytext=(0, 10), ha="right"
        )
    axes.set(xlabel="step", ylabel=f"loss ({unit})", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
