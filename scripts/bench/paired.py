"""Statistics of runs of several variants and seeds: how far each ends from the exact run of its seed."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import scipy.special

Run = dict[str, Any]
"""A run in the output of `convergence.py`."""

_FAR = 0.1


@dataclass(frozen=True)
class Spread:
    """The mean of a few numbers and its error.

    Attributes:
        mean: of the numbers.
        deviation: standard deviation (n - 1 in the denominator); None for a single number.
        error: standard error of the mean; None for a single number.
        count: of the numbers.
    """

    mean: float
    deviation: float | None
    error: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of at least one number."""
        deviation = statistics.stdev(values) if len(values) > 1 else None
        error = None if deviation is None else deviation / len(values) ** 0.5
        return cls(statistics.fmean(values), deviation, error, len(values))


def differences(runs: Sequence[Run], exact: str, of: str = "loss") -> dict[str, dict[int, float]]:
    """Per variant and seed, the relative distance of a run's ``of`` from the exact run's of that seed."""
    base = {run["seed"]: run[of] for run in runs if run["variant"] == exact}
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        if run["seed"] in base:
            found.setdefault(run["variant"], {})[run["seed"]] = run[of] / base[run["seed"]] - 1
    return found


@dataclass(frozen=True)
class Chance:
    """The effect of chance, by an analysis of variance of log(loss) = variant + seed + chance.

    Attributes:
        deviation: of one paired difference, relative, if the two variants are equally good; pooled over all.
        freedom: degrees of freedom of the estimate.
        probability: that variants differ as much as these if all are equally good (F test).
    """

    deviation: float
    freedom: int
    probability: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Chance | None":
        """The estimate from some runs; None if there are too few."""
        if not runs:
            return None
        losses = np.log([run["loss"] for run in runs])
        seeds = _indicators([run["seed"] for run in runs])
        free, left = _residual(losses, np.hstack([seeds, _indicators([run["variant"] for run in runs])]))
        all_free, all_left = _residual(losses, seeds)
        if free == 0 or all_free == free:
            return None
        ratio = (all_left - left) / (all_free - free) / (left / free)
        probability = float(scipy.special.fdtrc(all_free - free, free, ratio))
        return cls(float((2 * left / free) ** 0.5), free, probability)


def _indicators(labels: Sequence[Any]) -> np.ndarray:
    """Indicator columns, one per label."""
    return np.asarray([[label == other for other in dict.fromkeys(labels)] for label in labels], float)


def _residual(values: np.ndarray, columns: np.ndarray) -> tuple[int, float]:
    """Residual degrees of freedom and sum of squares of a least-squares fit by columns."""
    fit, _, rank, _ = np.linalg.lstsq(columns, values)
    return len(values) - int(rank), float(np.sum((values - columns @ fit) ** 2))


def in_perplexity(runs: Sequence[Run]) -> list[Run]:
    """The runs with perplexities in the place of losses."""
    return [
        {
            **run,
            "loss": math.exp(run["loss"]),
            "loss_exact": math.exp(run["loss_exact"]),
            "curve": [(step, math.exp(loss)) for step, loss in run["curve"]],
        }
        for run in runs
    ]


def by_step(runs: Sequence[Run]) -> list[str]:
    """A Markdown table of the mean over seeds at each evaluation, a row per variant; nothing of no runs."""
    if not runs:
        return []
    steps = [step for step, _ in runs[0]["curve"]]
    lines = harness.heads("step", *steps)
    for name in dict.fromkeys(run["variant"] for run in runs):
        curves = [[loss for _, loss in run["curve"]] for run in runs if run["variant"] == name]
        means = [f"{statistics.fmean(losses):.4f}" for losses in zip(*curves, strict=True)]
        lines.append(harness.cells(name, *means))
    return lines


def table(runs: Sequence[Run], exact: str, quantity: str = "validation loss") -> list[str]:
    """A Markdown table, a row per variant in the order of their first runs.

    Columns: the mean loss (or ``quantity``) over seeds and the standard deviation of one run; the mean of the
    paired differences and its standard error; by how much the loss falls if the same weights are evaluated
    without their wire formats; the bytes that a node sends per step. Below, the effect of `Chance`.
    """
    lines = harness.heads(
        "variant", "seeds", quantity, "spread", f"from {exact}", "weights as they are", "sent"
    )
    paired = differences(runs, exact)
    for name in dict.fromkeys(run["variant"] for run in runs):
        own = [run for run in runs if run["variant"] == name]
        loss = Spread.of([run["loss"] for run in own])
        spread = "" if loss.deviation is None else f"{loss.deviation:.4f}"
        apart = ""
        if name != exact and paired.get(name):
            distance = Spread.of(list(paired[name].values()))
            error = "" if distance.error is None else f" ± {distance.error:.2%}"
            apart = f"{distance.mean:+.2%}{error}"
        bare = statistics.fmean(run["loss_exact"] / run["loss"] - 1 for run in own)
        sent = f"{own[0]['between_nodes'] / 1e6:.1f} MB"
        cells = name, len(own), f"{loss.mean:.4f}", spread, apart, f"{bare:+.2%}", sent
        lines.append(harness.cells(*cells))
    if chance := Chance.of(runs):
        lines += [
            "",
            f"By chance alone a paired difference scatters by {chance.deviation:.2%} (standard deviation, "
            f"{chance.freedom} degrees of freedom); that all variants are equally good has p = "
            f"{chance.probability:.2f}.",
        ]
    return lines


def draw(runs: Sequence[Run], exact: str, path: Path, quantity: str = "validation loss") -> None:
    """Draw a PNG of two panels: the distance from the exact run during training, and at the end, per seed.

    Distances of more than 10% are drawn on a logarithmic scale.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = [name for name in dict.fromkeys(run["variant"] for run in runs) if name != exact]
    figure = Figure(figsize=(11, 1.5 + 0.35 * max(8, len(names))), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = colormaps["tab10" if len(names) <= 10 else "tab20"]
    paired = differences(runs, exact)
    curves = {(run["variant"], run["seed"]): dict(run["curve"]) for run in runs}
    for place, name in enumerate(names):
        seeds = list(paired.get(name, {}))
        if not seeds:
            continue
        color = colors(place)
        points = {
            step: 100 * statistics.fmean(curves[name, s][step] / curves[exact, s][step] - 1 for s in seeds)
            for step in curves[name, seeds[0]]
        }
        left.plot(list(points), list(points.values()), "o-", color=color, markersize=3, label=name)
        ends = [100 * paired[name][seed] for seed in seeds]
        spread = Spread.of(ends)
        right.plot(ends, [place] * len(ends), "o", color=color, markersize=4, alpha=0.6)
        right.errorbar(spread.mean, place, xerr=spread.error, fmt="|", color=color, markersize=14, capsize=4)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.axhline(0, color="black", linewidth=0.8)
    left.set(xlabel="step", ylabel=f"{quantity} from {exact}'s, %, mean of the seeds")
    right.axvline(0, color="black", linewidth=0.8)
    if chance := Chance.of(runs):
        reach = 100 * chance.deviation
        right.axvspan(-reach, reach, color="black", alpha=0.07, linewidth=0, label="one pair, by chance")
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.invert_yaxis()
    right.set(xlabel="at the end, %: each seed; the mean and its standard error")
    if any(abs(distance) > _FAR for name in names for distance in paired.get(name, {}).values()):
        left.set_yscale("symlog", linthresh=100 * _FAR)
        right.set_xscale("symlog", linthresh=100 * _FAR)
        for axis in (left.yaxis, right.xaxis):
            axis.set_major_formatter("{x:g}")
    if paired.keys() - {exact}:
        figure.legend(loc="outside lower center", ncols=5, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
