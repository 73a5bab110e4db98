"""``zerojax overlap TRACE``: measure how much communication overlaps compute."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from zerojax.analysis.profile import measure_overlap, read_events, trace_files
from zerojax.cli.options import read_options
from zerojax.errors import ConfigurationError


@dataclass(frozen=True)
class Options:
    """Measure how much of a profile's communication overlaps compute.

    Attributes:
        trace: An .xplane.pb file, or a run's folder, whose newest profile is used.
    """

    trace: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TRACE")]


def run(arguments: list[str]) -> None:
    """Read the trace and print a table by hop."""
    options = read_options(Options, "overlap", arguments)
    path = options.trace if options.trace.is_file() else trace_files(options.trace)[-1]
    events = read_events(path)
    if not events:
        raise ConfigurationError(f"{path}: it has no event of a device. Trace steps that have been compiled")
    print(measure_overlap(events))
