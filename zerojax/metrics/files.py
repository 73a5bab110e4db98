"""Metrics on disk: `metrics.jsonl` always, TensorBoard events on wish."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter


class MetricsFiles:
    """Writers of one run folder; a run that goes on continues its files."""

    def __init__(self, folder: Path, *, start: int = 0, tensorboard: bool = True) -> None:
        """Open the files.

        Args:
            folder: the run's.
            start: steps done so far. What an earlier process wrote about later steps, which will be
                done again, is dropped.
            tensorboard: also write events to `folder/tensorboard`.
        """
        self._path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(self._path) if line["step"] <= start]
        self._lines = self._path.open("w", encoding="utf-8")
        for line in kept:
            self._write_line(line)
        self._events = None
        if tensorboard:
            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step. A value that is no finite number is written as null, as JSON has no NaN."""
        self._write_line({"step": step, **values})
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._lines.close()
        if self._events is not None:
            self._events.close()

    def _write_line(self, values: Mapping[str, Any]) -> None:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._lines.write(json.dumps(finite) + "\n")
        self._lines.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps in a `metrics.jsonl`, in order; none where there is no file.

    A last line that a killed process left half written is left out.
    """
    if not path.exists():
        return []
    steps = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            steps.append(values)
    return steps
