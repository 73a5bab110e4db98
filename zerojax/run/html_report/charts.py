"""Line charts as geometry: scales, ticks and SVG paths, in a box of fixed width that the page stretches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64
from matplotlib.ticker import LogLocator, MaxNLocator

from zerojax.formatting import abbreviated

# Margins inside the box: left for the labels of y, bottom for the labels of x.
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 26
_POINTS = 500
# A smoothed line is a centred mean over a hundredth of the steps to either side, so it does not lag behind.
_WINDOWS = 100
_SMOOTHED_FROM = 60
_ROUND = (1, 2, 5, 10)
"""The distance of ticks is one of these times a power of ten."""

Steps = Sequence[int] | Int64[np.ndarray, " points"]
Values = Float64[np.ndarray, " points"]


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: the name in the legend.
        steps: positions along x.
        values: positions along y; None or nan leaves a gap.
        look: "line"; "dots" joins few points and marks each; "faint" is the original of a smoothed line.
    """

    name: str
    steps: Steps
    values: Sequence[float | None] | Values
    look: Literal["line", "dots", "faint"] = "line"

    @property
    def numbers(self) -> Values:
        """The values, nan for gaps."""
        return np.array(self.values, np.float64)


@dataclass(frozen=True)
class Chart:
    """A chart that the page draws.

    Attributes:
        title: the heading.
        unit: the unit of y, beside the title.
        series: the lines.
        last_step: the end of x.
        label: formats a value of y.
        log: whether y is logarithmic; values that are not positive are skipped.
        from_zero: whether y begins at zero.
        capped: whether y ends at twice the median, so that a few far outliers are drawn at the edge.
        marks: steps to mark as skipped.
        restarts: steps from which the run resumed, to mark.
        width: width of the box, in its own units.
        height: height of the box.
    """

    title: str
    unit: str
    series: Sequence[Series]
    last_step: int
    label: Callable[[float], str] = abbreviated
    log: bool = False
    from_zero: bool = False
    capped: bool = False
    marks: Sequence[int] = ()
    restarts: Sequence[int] = ()
    width: int = 560
    height: int = 230

    def narrow(self) -> "Chart":
        """The same chart for a narrow page, on which the labels of a wide box would be too small."""
        return replace(self, width=Chart.width, height=Chart.height)

    @cached_property
    def known(self) -> Values:
        """The values that can be drawn."""
        values = np.concatenate([one.numbers for one in self.series] or [np.empty(0)])
        return values[values > 0] if self.log else values[~np.isnan(values)]

    @cached_property
    def cap(self) -> float:
        """The largest value that is drawn at its own place; larger ones are drawn there, too."""
        return 2 * float(np.sort(self.known)[self.known.size // 2]) if self.capped else math.inf

    @cached_property
    def range(self) -> tuple[float, float]:
        """The values at the lower and the upper end of the y axis."""
        low, high = float(self.known.min()), min(float(self.known.max()), self.cap)
        if self.log:
            return low * 0.9, high * 1.1
        low = min(0.0, low) if self.from_zero else low
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        return (low if self.from_zero and low == 0 else low - margin), high + margin

    @cached_property
    def first_step(self) -> int:
        """The step at the left end of x: 0 if the first is 1."""
        first = min(int(one.steps[0]) for one in self.series if len(one.steps))
        return 0 if first == 1 else first

    def x(self, step: float) -> float:
        """The place of a step, in the picture's units from the left."""
        share = (step - self.first_step) / max(1, self.last_step - self.first_step)
        return round(LEFT + share * (self.width - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """The place of a value, in the picture's units from the top."""
        low, high, at = (math.log10(x) if self.log else x for x in (*self.range, min(value, self.cap)))
        return round(self.height - BOTTOM - (at - low) / (high - low) * (self.height - TOP - BOTTOM), 1)

    @property
    def x_ticks(self) -> list[int]:
        """Round steps, where the x axis has ticks."""
        locator = MaxNLocator(7, steps=_ROUND, integer=True)
        found = locator.tick_values(self.first_step, max(self.last_step, self.first_step + 1))
        return [int(step) for step in found if self.first_step <= step <= self.last_step]

    @property
    def y_ticks(self) -> list[float]:
        """Round values, where the y axis has ticks."""
        low, high = self.range
        decades = LogLocator(subs=(1,) if high > 1e3 * low else _ROUND[:3])
        locator = decades if self.log else MaxNLocator(6, steps=_ROUND)
        return [float(value) for value in locator.tick_values(low, high) if low <= value <= high]

    def points(self, one: Series) -> list[tuple[int, float, float, str] | None]:
        """Step, place and label of each point of a line; None for a gap."""
        return [
            (step, self.x(step), self.y(value), self.label(min(value, self.cap)))
            if (value > 0 if self.log else not math.isnan(value))
            else None
            for step, value in zip(*thinned(one.steps, one.numbers), strict=True)
        ]

    def path(self, one: Series) -> str:
        """An SVG path that lifts the pen at each gap."""
        parts, drawing = [], False
        for point in self.points(one):
            if point is not None:
                parts.append(f"{'L' if drawing else 'M'}{point[1]:g} {point[2]:g}")
            drawing = point is not None
        return "".join(parts)

    @property
    def data(self) -> dict[str, Any]:
        """The values that the page shows under the pointer."""
        shown = [one for one in self.series if one.look != "faint"]
        return {"series": [{"name": s.name, "points": [p for p in self.points(s) if p]} for s in shown]}


def smoothed(
    name: str, steps: Steps, values: Sequence[float | None] | Values, *, rate: bool = False
) -> list[Series]:
    """Split a noisy line into all of it, faint, and its moving mean; a short line stays as it is.

    If the values are a ``rate`` per second, the mean is their harmonic mean.
    """
    line = Series(name, steps, values)
    if len(steps) < _SMOOTHED_FROM:
        return [line]
    numbers = line.numbers
    known: Bool[np.ndarray, " points"] = numbers > 0 if rate else ~np.isnan(numbers)
    terms = np.zeros_like(numbers)
    terms[known] = 1 / numbers[known] if rate else numbers[known]
    # Differences of running sums: a convolution would take minutes for a million steps.
    middle, reach = np.arange(len(steps)), max(1, len(steps) // _WINDOWS)
    first, end = np.maximum(middle - reach, 0), np.minimum(middle + reach + 1, len(steps))
    running = (np.append(0, np.cumsum(x)) for x in (terms, known))
    sums, counts = (so_far[end] - so_far[first] for so_far in running)
    means = np.where(np.isnan(numbers), np.nan, sums / np.where(counts, counts, np.nan))
    return [replace(line, look="faint"), Series(f"{name} (smoothed)", steps, 1 / means if rate else means)]


def thinned(steps: Steps, values: Values) -> tuple[list[int], list[float]]:
    """At most some hundreds of points: the lowest and the highest of each stretch, so no peak is lost."""
    chosen = range(len(steps))
    if len(steps) > _POINTS:
        stretch = math.ceil(2 * len(steps) / _POINTS)
        kept = {0, len(steps) - 1}
        for start in range(0, len(steps), stretch):
            own = values[start : start + stretch]
            gaps = np.isnan(own).all()
            kept |= {start} if gaps else {start + int(np.nanargmin(own)), start + int(np.nanargmax(own))}
        chosen = sorted(kept)
    return [int(steps[i]) for i in chosen], values[chosen].tolist()
