"""The data in a run's folder, read even if the run was killed or files are damaged."""

import sys
import time
from array import array
from collections import defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from zerojax.errors import ConfigurationError
from zerojax.run.checkpoints import step_dirs
from zerojax.run.config import RunConfig, config_to_dict
from zerojax.run.metrics.files import iterate_lines
from zerojax.run.run_dir import RunFolder, sessions
from zerojax.validation.untrusted import parse_toml

# A run marked as running that has not written a step for this long has probably died.
_SILENCE_SECONDS = 600
_SAMPLES = 16
_SAMPLE = {"prompt", "completion"}


class Column(NamedTuple):
    """The values of one name, in the order of their steps; nan for a value that is not finite.

    A value takes 16 bytes, so that a long run fits into memory.
    """

    steps: Int64[np.ndarray, " points"]
    values: Float64[np.ndarray, " points"]


class RunData:
    """The data in a run's folder. Files that cannot be read are skipped and noted.

    Attributes:
        name: the folder's name.
        path: the folder.
        summary: ``run.json``.
        config: section -> key -> value, from ``config.toml``; empty if it cannot be read.
        changed: "section.key" of the settings that differ from the defaults.
        columns: the values in ``metrics.jsonl`` by name.
        samples: the newest lines of ``samples.jsonl``: a prompt, a completion, and its reward or the expected
            completion.
        notes: remarks for the reader: damaged files, a silent run.
        written: when ``metrics.jsonl`` was last written (Unix time), or None.
        checkpoints: the steps of the checkpoints.
        profiles: folders with a trace, relative to the run's folder.

    Raises:
        ConfigurationError: there is no run.
    """

    def __init__(self, folder: RunFolder) -> None:
        if not (folder.config.is_file() or folder.metrics.is_file() or folder.summary.is_file()):
            raise ConfigurationError(
                f"{folder.path} is not a run folder: it has no {folder.config.name}. Name the folder of a run"
            )
        self.name, self.path = folder.path.absolute().name, str(folder.path)
        self.notes: list[str] = []
        self.columns, damaged = read_columns(folder.metrics)
        if damaged:
            lines = "1 line" if damaged == 1 else f"{damaged} lines"
            self.notes.append(f"{lines} of {folder.metrics.name} cannot be read and were skipped.")
        self.summary = folder.read_summary()
        if not self.summary:
            name = folder.summary.name
            what = f"{name} cannot be read" if folder.summary.is_file() else f"There is no {name}"
            self.notes.append(f"{what}: how the run ended is not known.")
        self.written = folder.metrics.stat().st_mtime if folder.metrics.is_file() else None
        silence = time.time() - (self.written or 0)
        if not self.columns:
            self.notes.append("No step is done yet, so there is nothing to draw.")
        elif self.status == "running" and silence > _SILENCE_SECONDS:
            self.notes.append(
                f"The run is marked as running, and wrote its last step {silence / 60:.0f} minutes ago: "
                "it may have been killed."
            )
        self.config, self.changed = _config(folder, self.notes)
        samples = (one for one in iterate_lines(folder.samples) if one is not None and one.keys() >= _SAMPLE)
        self.samples = list(deque(samples, _SAMPLES))
        self.checkpoints = step_dirs.steps(folder.checkpoints)
        traces = folder.profile.glob("**/*.xplane.pb")
        self.profiles = sorted(str(trace.parent.relative_to(folder.path)) for trace in traces)

    @property
    def status(self) -> str:
        """One of "finished", "failed", "stopped", "running", or "unknown"."""
        return str(self.summary.get("status", "unknown"))

    @property
    def reason(self) -> str | None:
        """Why the run failed or stopped."""
        reason = self.summary.get("reason")
        return None if reason is None else str(reason)

    def series(self, name: str) -> Column:
        """The values of a name; no steps if there are none.

        Step 0 has the value of the first weights, if the run measured it.
        """
        found = self.columns.get(name, Column(np.empty(0, np.int64), np.empty(0)))
        if (first := finite(self.summary.get(f"first_{name}"))) is None or not len(found.steps):
            return found
        return Column(np.append(0, found.steps), np.append(first, found.values))

    def finite(self, name: str) -> list[float]:
        """The finite values of a name, in the order of their steps."""
        values = self.series(name).values
        return values[~np.isnan(values)].tolist()

    @property
    def steps(self) -> list[int]:
        """Every step of the run so far."""
        return self.series("step").steps.tolist()

    @property
    def skipped(self) -> list[int]:
        """The steps that made no update."""
        steps, values = self.series("skipped")
        return steps[np.nan_to_num(values) > 0].tolist()

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """The starts of the run, oldest first, as from ``zerojax.run.run_dir.sessions``."""
        return sessions(self.summary)


def _config(folder: RunFolder, notes: list[str]) -> tuple[dict[str, dict[str, Any]], frozenset[str]]:
    """The settings as written, perhaps by another version of zerojax, and which differ from the defaults."""
    try:
        written = parse_toml(folder.config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{folder.config.name} cannot be read: {error}")
        return {}, frozenset()
    sections = {name: values for name, values in written.items() if isinstance(values, dict)}
    defaults = config_to_dict(RunConfig())
    changed = frozenset(
        f"{section}.{key}"
        for section, values in sections.items()
        for key, value in values.items()
        if defaults.get(section, {}).get(key) != value
    )
    return sections, changed


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
