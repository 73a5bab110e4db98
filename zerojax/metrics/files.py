"""Metrics on disk: `metrics.jsonl`, one JSON object a step."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """The writer of a run's metrics; a run that goes on continues the file."""

    def __init__(self, path: Path, *, start: int = 0) -> None:
        """Open the file.

        Args:
            path: of the file.
            start: steps done so far. What an earlier process wrote about later steps, which will be
                done again, is dropped.
        """
        kept = [line for line in read_metrics(path) if line["step"] <= start]
        self._lines = path.open("w", encoding="utf-8")
        for line in kept:
            self._write_line(line)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step. A value that is no finite number is written as null, as JSON has no NaN."""
        self._write_line({"step": step, **values})

    def close(self) -> None:
        """Flush and close."""
        self._lines.close()

    def _write_line(self, values: Mapping[str, Any]) -> None:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._lines.write(json.dumps(finite) + "\n")
        self._lines.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps in a `metrics.jsonl`, in order; none where there is no file.

    A line that a killed process left half written is left out.
    """
    return read_lines(path)[0]


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The steps in a `metrics.jsonl`, in order, and how many lines of it cannot be read."""
    if not path.exists():
        return [], 0
    steps, damaged = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            steps.append(values)
        else:
            damaged += 1
    return steps, damaged
