#!/usr/bin/env python3
"""Draw one step of a trace: what device 0 computes and sends, a row per stream, and when each exchange runs.

    scripts/bench/train.py --nodes 2 --local 1 --variants local --profile build/trace
    scripts/bench/draw_trace.py build/trace/local --picture trace.png

The step is the last but one, between two exchanges of --scope. For each hop the table says when
in the step its first event begins and its last ends, and for how long it ran beside compute.
"""

from collections.abc import Sequence
from pathlib import Path

import harness

from zerojax.analysis.profile import Event, measure_overlap, read_events, trace_files

COMPUTE = "compute"


def main() -> None:
    """Parse the command line, print the table, draw the picture."""
    parser = harness.parser(__doc__)
    parser.add_argument("trace", type=Path, help="an .xplane.pb, or a folder, whose newest is read")
    parser.add_argument("--scope", default="exchange_fragment", help="of the events that a step begins with")
    parser.add_argument("--picture", type=Path, help="a PNG to draw")
    options = parser.parse_args()
    path = options.trace if options.trace.is_file() else trace_files(options.trace)[-1]
    try:
        events = step_of(read_events(path), options.scope)
    except ValueError as error:
        raise SystemExit(f"draw_trace: {path}: {error}") from error
    print("\n".join(table(events)))
    if options.picture:
        draw(events, options.picture)


def step_of(events: Sequence[Event], scope: str) -> list[Event]:
    """Device 0's events of the last step but one.

    Raises:
        ValueError: the trace has less than two steps with events of that scope that communicate.
    """
    own = [event for event in events if event.device == min(e.device for e in events)]
    begins = [event.start for event in own if event.communicates and event.scope == scope]
    if len(begins) < 2:
        raise ValueError(f"{len(begins)} exchanges in {scope!r}, and a step is between two: trace more steps")
    return [event for event in own if begins[-2] <= event.start < begins[-1]]


def table(events: Sequence[Event]) -> list[str]:
    """A Markdown table, a row per hop and one of compute, in milliseconds since the step's first event."""
    zero, overlap = min(event.start for event in events), measure_overlap(events)
    lines = harness.heads("", "begins, ms", "ends", "runs for", "of that beside compute")
    lines.append(harness.cells(COMPUTE, *_reach(events, zero, None), f"{1e3 * overlap.compute:.2f}", ""))
    for scope, hop in overlap.hops.items():
        lines.append(harness.cells(scope, *_reach(events, zero, scope), *(f"{1e3 * s:.2f}" for s in hop)))
    return lines


def _reach(events: Sequence[Event], zero: float, scope: str | None) -> tuple[str, str]:
    """When the hop's first event begins and its last ends; of compute without a scope."""
    some = [e for e in events if e.communicates == (scope is not None) and scope in (None, e.scope)]
    if not some:
        return "-", "-"
    begins, ends = min(e.start for e in some), max(e.end for e in some)
    return f"{(begins - zero) / 1e6:.2f}", f"{(ends - zero) / 1e6:.2f}"


def draw(events: Sequence[Event], path: Path) -> None:
    """Draw a PNG: time to the right, a row per stream, colours by hop."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    zero = min(event.start for event in events)
    lines = list(dict.fromkeys(event.line for event in events))
    kinds = list(dict.fromkeys(event.scope if event.communicates else COMPUTE for event in events))
    colors = {kind: f"C{number}" for number, kind in enumerate(kinds)} | {COMPUTE: "0.75"}
    figure = Figure(figsize=(11, 1.4 + 0.4 * len(lines)), layout="constrained")
    axes = figure.subplots()
    for kind in kinds:
        for row, name in enumerate(lines):
            bars = [
                ((event.start - zero) / 1e6, (event.end - event.start) / 1e6)
                for event in events
                if event.line == name and kind == (event.scope if event.communicates else COMPUTE)
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=colors[kind])
    axes.set(xlabel="ms since the step began", yticks=range(len(lines)), yticklabels=lines)
    axes.invert_yaxis()
    figure.legend(
        handles=[Patch(color=colors[kind], label=kind or "other hops") for kind in kinds],
        loc="outside lower center",
        ncols=5,
        fontsize=8,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
