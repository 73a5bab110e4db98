"""Overlap: the fraction of the communication time that hides behind compute."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from zerojax.analysis.profile.events import Event
from zerojax.formatting import numeric, plain_text

Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Seconds of communication and compute, summed over devices; ``print`` it.

    Attributes:
        total: seconds of communication.
        hidden: seconds of communication during which the device also computes.
        compute: seconds of compute.
        hops: seconds by scope: (total, hidden). Two hops at the same time both count in full.
    """

    total: float
    hidden: float
    compute: float
    hops: dict[str, tuple[float, float]]

    @property
    def fraction(self) -> float:
        """Hidden over total; 1 if nothing is sent."""
        return self.hidden / self.total if self.total else 1.0

    def __rich__(self) -> RenderableType:
        numbers = numeric("time", "hidden behind compute", "hidden")
        table = Table("hop", *numbers, title="Communication, summed over devices")
        rows = {name or "no scope": times for name, times in sorted(self.hops.items())}
        for name, (total, hidden) in (rows | {"all": (self.total, self.hidden)}).items():
            share = f"{hidden / total:.1%}" if total else "-"
            table.add_row(name, f"{1e3 * total:.3f} ms", f"{1e3 * hidden:.3f} ms", share)
        table.caption = f"compute {1e3 * self.compute:.3f} ms"
        return table

    def __str__(self) -> str:
        return plain_text(self)


def measure_overlap(events: Sequence[Event]) -> Overlap:
    """Measure the overlap of communication and compute in a trace.

    Time in which several kernels run counts once. Communication does not hide other communication.
    """
    total = hidden = computing = 0.0
    hops: dict[str, tuple[float, float]] = {}
    for device in sorted({event.device for event in events}):
        own = [event for event in events if event.device == device]
        compute = _union((e.start, e.end) for e in own if not e.communicates)
        sent = _union((e.start, e.end) for e in own if e.communicates)
        total += _length(sent)
        hidden += _length(_common(sent, compute))
        computing += _length(compute)
        for scope in sorted({e.scope for e in own if e.communicates}):
            part = _union((e.start, e.end) for e in own if e.communicates and e.scope == scope)
            before = hops.get(scope, (0.0, 0.0))
            own_hidden = _length(_common(part, compute))
            hops[scope] = (before[0] + _length(part) / 1e9, before[1] + own_hidden / 1e9)
    return Overlap(total / 1e9, hidden / 1e9, computing / 1e9, hops)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as disjoint intervals, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The intersection of two ordered lists of disjoint intervals."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
