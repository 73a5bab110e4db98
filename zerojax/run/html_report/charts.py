"""Line charts as geometry: scales, ticks and SVG paths, in a box of fixed width that the page stretches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zerojax.formatting import abbreviated

# Inside the box: left for the labels of y, bottom for those of x.
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 26
_POINTS = 500
# A smoothed line is a mean over a hundredth of the steps to either side: centred, it does not lag behind.
_WINDOWS = 100
_SMOOTHED_FROM = 60

Values = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: in the legend.
        steps: along x.
        values: along y; None leaves a gap.
        look: "line"; "dots" joins few points and marks each; "faint" is the original of a smoothed line.
    """

    name: str
    steps: Sequence[int]
    values: Values
    look: Literal["line", "dots", "faint"] = "line"


@dataclass(frozen=True)
class Chart:
    """A chart, ready for the page.

    Attributes:
        title: above it.
        unit: beside the title.
        width: of the box, in its own units.
        height: likewise.
        lines: the drawing of each series: name, look, path, dots.
        x_ticks: (position, label).
        y_ticks: likewise.
        marks: positions along x of skipped steps.
        restarts: positions along x of the steps from which the run resumed.
        data: the values that the page shows under the pointer.
    """

    title: str
    unit: str
    width: int
    height: int
    lines: list[dict[str, Any]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[float]
    restarts: list[float]
    data: dict[str, Any]


def draw(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    label: Callable[[float], str] | None = None,
    last_step: int,
    log: bool = False,
    from_zero: bool = False,
    capped: bool = False,
    marks: Sequence[int] = (),
    restarts: Sequence[int] = (),
    width: int = 560,
    height: int = 230,
) -> Chart | None:
    """Lay out a chart; None if no series has a finite value.

    Args:
        title: of the chart.
        unit: of y.
        series: the lines.
        label: formats a value of y.
        last_step: the end of x.
        log: whether y is logarithmic; values that are not positive are left out.
        from_zero: whether y begins at zero.
        capped: whether y ends at twice its median: a few far outliers are drawn at the edge.
        marks: steps to mark as skipped.
        restarts: steps to mark as those from which the run resumed.
        width: of the box.
        height: of the box.
    """
    label = label or abbreviated
    if log:
        series = [replace(s, values=[v if v and v > 0 else None for v in s.values]) for s in series]
    known = [v for s in series for v in s.values if v is not None]
    if not known:
        return None
    if capped:
        cap = 2 * sorted(known)[len(known) // 2]
        series = [replace(s, values=[v if v is None else min(v, cap) for v in s.values]) for s in series]
        known = [min(v, cap) for v in known]
    low, high = _range(known, log=log, from_zero=from_zero)
    first = min(s.steps[0] for s in series if s.steps)
    first = 0 if first == 1 else first
    span = max(1, last_step - first)

    def x_of(step: float) -> float:
        return round(LEFT + (step - first) / span * (width - LEFT - RIGHT), 1)

    def y_of(value: float) -> float:
        share = (_at(value, log) - _at(low, log)) / (_at(high, log) - _at(low, log))
        return round(height - BOTTOM - share * (height - TOP - BOTTOM), 1)

    lines, shown = [], []
    for one in series:
        steps, values = thinned(one.steps, one.values)
        points = [None if v is None else (x_of(s), y_of(v)) for s, v in zip(steps, values, strict=True)]
        dots = [point for point in points if point] if one.look == "dots" else []
        lines.append({"name": one.name, "look": one.look, "path": _path(points), "dots": dots})
        if one.look != "faint":
            kept = [(s, v) for s, v in zip(steps, values, strict=True) if v is not None]
            points = [[s, x_of(s), y_of(v), label(v)] for s, v in kept]
            shown.append({"name": one.name, "points": points})
    return Chart(
        title,
        unit,
        width,
        height,
        lines,
        x_ticks=[(x_of(s), f"{s:,.0f}") for s in ticks(first, last_step, 6) if s == int(s)],
        y_ticks=[(y_of(v), label(v)) for v in (_log_ticks(low, high) if log else ticks(low, high, 5))],
        marks=[x_of(step) for step in marks],
        restarts=[x_of(step) for step in restarts],
        data={"series": shown},
    )


def smoothed(name: str, steps: Sequence[int], values: Values, *, rate: bool = False) -> list[Series]:
    """Split a noisy line into all of it, faint, and its moving mean; a short line stays as it is.

    Args:
        name: of the line.
        steps: along x.
        values: along y.
        rate: whether the values are per second: then the seconds are averaged.
    """
    if len(values) < _SMOOTHED_FROM:
        return [Series(name, steps, values)]
    reach = max(1, len(values) // _WINDOWS)
    sums, counts = [0.0], [0]
    for value in values:
        known = value is not None and (value > 0 or not rate)
        sums.append(sums[-1] + ((1 / value if rate else value) if value is not None and known else 0.0))
        counts.append(counts[-1] + known)
    averages: list[float | None] = []
    for i, value in enumerate(values):
        first, end = max(0, i - reach), min(len(values), i + reach + 1)
        count = counts[end] - counts[first]
        mean = (sums[end] - sums[first]) / count if count and value is not None else None
        averages.append(1 / mean if rate and mean else mean)
    return [Series(name, steps, values, "faint"), Series(f"{name} (smoothed)", steps, averages)]


def thinned(steps: Sequence[int], values: Values) -> tuple[list[int], list[float | None]]:
    """At most some hundreds of points: the lowest and the highest of each stretch, so no peak is lost."""
    if len(steps) <= _POINTS:
        return list(steps), list(values)
    stretch = math.ceil(2 * len(steps) / _POINTS)
    kept: set[int] = {0, len(steps) - 1}
    for start in range(0, len(steps), stretch):
        own = range(start, min(start + stretch, len(steps)))
        finite = [(v, i) for i in own if (v := values[i]) is not None]
        kept |= {min(finite)[1], max(finite)[1]} if finite else {start}
    chosen = sorted(kept)
    return [steps[i] for i in chosen], [values[i] for i in chosen]


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from low to high."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    apart = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.75 * raw)
    first = math.ceil(low / apart - 1e-9)
    return [round(i * apart, 12) for i in range(first, math.floor(high / apart + 1e-9) + 1)]


def _range(values: Sequence[float], *, log: bool, from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        return (low * 0.9, high * 1.1)
    if from_zero:
        low = min(0.0, low)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return (low if from_zero and low == 0 else low - margin), high + margin


def _at(value: float, log: bool) -> float:
    return math.log10(value) if log else value


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5)):
        found = [m * 10.0**p for p in powers for m in steps if low <= m * 10.0**p <= high]
        if len(found) >= 3:
            return found[:: max(1, len(found) // 6)]
    return ticks(low, high, 4)


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """An SVG path that lifts the pen at each None."""
    parts, drawing = [], False
    for point in points:
        if point is not None:
            parts.append(f"{'L' if drawing else 'M'}{point[0]:g} {point[1]:g}")
        drawing = point is not None
    return "".join(parts)
