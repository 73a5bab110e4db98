"""Draws curves of throughput over the batch, a panel for each model and link, predicted or measured."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """One line of a panel.

    Attributes:
        label: for the legend.
        points: (tokens of a GPU in a step, tokens/s of one GPU).
        color: of matplotlib's cycle, "C0" and so on.
        style: of matplotlib: "o-", "--".
    """

    label: str
    points: Sequence[tuple[int, float]]
    color: str
    style: str = "o-"


def draw_panels(
    path: Path,
    models: Sequence[str],
    links: Sequence[str],
    curves: Callable[[str, str], Iterable[Curve]],
    *,
    tokens: Sequence[int],
    title: str = "",
) -> None:
    """Draw ``curves(model, link)`` for each of both as PNG.

    Models are rows of panels, links columns; ``tokens`` are the ticks of the horizontal axis.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure = Figure(figsize=(2.75 * len(links), 2.35 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(links), sharex=True, sharey="row", squeeze=False)
    for row, model in zip(panels, models, strict=True):
        for axes, link in zip(row, links, strict=True):
            for curve in curves(model, link):
                batches = [batch for batch, _ in curve.points]
                thousands = [rate / 1e3 for _, rate in curve.points]
                axes.plot(batches, thousands, curve.style, markersize=4, color=curve.color, label=curve.label)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(tokens, [f"{t / 1024:g}k" for t in tokens])
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"{model}, {link}", fontsize=9)
            axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.supxlabel("tokens of a GPU in a step", fontsize=10)
    figure.supylabel("thousands of tokens/s of a GPU", fontsize=10)
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=110)
