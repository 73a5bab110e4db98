"""Overlap: the fraction of the communication time that hides behind compute."""

import math
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
        compute = [(e.start, e.end) for e in own if not e.communicates]
        by_scope: dict[str, list[Interval]] = {}
        for event in own:
            if event.communicates:
                by_scope.setdefault(event.scope, []).append((event.start, event.end))
        sent = [interval for intervals in by_scope.values() for interval in intervals]
        total += _covered(sent)
        hidden += _common(sent, compute)
        computing += _covered(compute)
        for scope, part in sorted(by_scope.items()):
            before = hops.get(scope, (0.0, 0.0))
            hops[scope] = (before[0] + _covered(part) / 1e9, before[1] + _common(part, compute) / 1e9)
    return Overlap(total / 1e9, hidden / 1e9, computing / 1e9, hops)


def _covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals."""
    length, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def _common(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """The length of the intersection of two unions of intervals."""
    return _covered(a) + _covered(b) - _covered([*a, *b])
