"""The metrics of a run as arrays by name. A value takes 16 bytes, so that a long run fits into memory."""

import sys
from array import array
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from zerojax.run.metrics.files import iterate_lines


class Column(NamedTuple):
    """The values of one name, in the order of their steps; nan for a value that is not finite."""

    steps: Int64[np.ndarray, " points"]
    values: Float64[np.ndarray, " points"]


def read_columns(path: Path) -> tuple[dict[str, Column], int]:
    """Read a ``metrics.jsonl``.

    Returns:
        The columns by name, none if there is no file, and the number of unreadable lines. The column "step"
        has every step. If a resumed run has repeated a step, the later line counts.
    """
    columns: dict[str, tuple[array[int], array[float]]] = defaultdict(lambda: (array("q"), array("d")))
    damaged = 0
    for line in iterate_lines(path):
        if line is None:
            damaged += 1
            continue
        for name, value in line.items():
            steps, values = columns[name]
            steps.append(line["step"])
            values.append(np.nan if (number := finite(value)) is None else number)
    return {name: _in_order(*both) for name, both in columns.items()}, damaged


def _in_order(steps: array[int], values: array[float]) -> Column:
    """The last value of each step, in the order of the steps."""
    unique, from_end = np.unique(np.asarray(steps)[::-1], return_index=True)
    return Column(unique, np.asarray(values)[::-1][from_end])


def finite(value: Any) -> float | None:
    """A number from a JSON file as a float; None for one too large for a float, and for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None
