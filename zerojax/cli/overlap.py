"""`zerojax overlap TRACE`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from zerojax.analysis.profile import measure_overlap, read_events, trace_files
from zerojax.cli.options import read_options


@dataclass(frozen=True)
class Options:
    """Measure how much of a profile's communication hides behind compute.

    Attributes:
        trace: A run's folder, whose newest profile is taken, or an .xplane.pb.
    """

    trace: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TRACE")]


def run(arguments: list[str]) -> None:
    """Read the trace and print a table by hop."""
    options = read_options(Options, "overlap", arguments)
    path = options.trace if options.trace.is_file() else trace_files(options.trace)[-1]
    print(measure_overlap(read_events(path)))
