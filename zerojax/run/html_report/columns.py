"""Metrics by name, thinned while they are read, so that memory does not grow with the length of a run."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerojax.run.metrics.files import iterate_lines

# A longer file is read in this many stretches. A chart shows some hundreds of points, and the window of a
# smoothed line is a fiftieth of them.
_STRETCHES = 10_000
RATES = ("tokens_per_second", "mfu")
"""Values per second. Their mean is the harmonic mean, the inverse of the mean time."""

type Values = dict[int, float | None]
"""Values by their step; None for one that is not finite."""


@dataclass
class Column:
    """The values of one name.

    Attributes:
        points: the lowest, the highest and the last value of each stretch.
        means: the mean of each stretch, by the step of its last value.
    """

    points: Values = field(default_factory=dict)
    means: Values = field(default_factory=dict)

    def add(self, steps: Sequence[int], values: Sequence[float | None], *, rate: bool) -> None:
        """Add a stretch of lines."""
        known = [(value, step) for value, step in zip(values, steps, strict=True) if value is not None]
        for value, step in (min(known), max(known)) if known else ():
            self.points[step] = value
        self.points[steps[-1]] = values[-1]
        self.means[steps[-1]] = _mean([value for value, _ in known], rate)

    def sort(self) -> None:
        """Order the values by their steps, because a resumed run may have repeated some."""
        self.points, self.means = dict(sorted(self.points.items())), dict(sorted(self.means.items()))


@dataclass
class Metrics:
    """A ``metrics.jsonl`` by name.

    Attributes:
        columns: name -> values. They are complete if the file has at most 10,000 lines.
        count: number of steps.
        last: the last step.
        skipped: the steps that made no update.
        damaged: the number of lines that cannot be read.
    """

    columns: dict[str, Column] = field(default_factory=dict)
    count: int = 0
    last: int = 0
    skipped: set[int] = field(default_factory=set)
    damaged: int = 0

    def count_step(self, line: dict[str, Any]) -> None:
        """Count a line's step, and record whether it was skipped."""
        step = line["step"]
        if step > self.last or not self.count:  # a resumed run may repeat steps
            self.count, self.last = self.count + 1, step
        (self.skipped.add if line.get("skipped") else self.skipped.discard)(step)

    def add(self, stretch: Sequence[dict[str, Any]]) -> None:
        """Add the values of a stretch of lines to their columns."""
        for name in {name: None for line in stretch for name in line if name != "step"}:
            lines = [line for line in stretch if name in line]
            column = self.columns.setdefault(name, Column())
            values = [finite(line[name]) for line in lines]
            column.add([line["step"] for line in lines], values, rate=name in RATES)


def read_columns(path: Path) -> Metrics:
    """Read a ``metrics.jsonl``; nothing if there is no file."""
    found, stretch = Metrics(), list[dict[str, Any]]()
    length = -(-_count_lines(path) // _STRETCHES)
    for line in iterate_lines(path):
        if line is None:
            found.damaged += 1
            continue
        found.count_step(line)
        stretch.append(line)
        if len(stretch) >= length:
            found.add(stretch)
            stretch.clear()
    found.add(stretch)
    for column in found.columns.values():
        column.sort()
    return found


def _count_lines(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _mean(values: Sequence[float], rate: bool) -> float | None:
    if len(values) <= 1 or not rate:
        return sum(values) / len(values) if values else None
    seconds = [1 / value for value in values if value > 0]
    return len(seconds) / sum(seconds) if seconds else None


def finite(value: Any) -> float | None:
    """A number from a JSON file as a float; None for one too large for a float, and for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None
