"""Named ranges of a trace for Perfetto: consecutive events of a stream in the same hop or layer form one."""

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from zerojax.analysis.profile.events import Event


def write_ranges(events: Sequence[Event], path: Path) -> None:
    """Write the ranges in Chrome's trace format, gzipped, for ui.perfetto.dev."""
    lines = {key: number for number, key in enumerate(sorted({(e.device, e.line) for e in events}))}
    written: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"device {device}"}}
        for device in sorted({event.device for event in events})
    ]
    written += [
        {"ph": "M", "name": "thread_name", "pid": device, "tid": number, "args": {"name": line}}
        for (device, line), number in lines.items()
    ]
    for (device, line), number in lines.items():
        own = [event for event in events if (event.device, event.line) == (device, line)]
        for name, group in itertools.groupby(own, key=lambda event: event.scope or "other"):
            inside = list(group)
            start, end = inside[0].start, max(event.end for event in inside)
            written.append(
                {
                    "ph": "X",
                    "name": name,
                    "pid": device,
                    "tid": number,
                    "ts": start / 1e3,
                    "dur": (end - start) / 1e3,
                    "args": {"events": len(inside), "first": inside[0].name},
                }
            )
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": written}, file)
