"""Traces of some steps, what each range of them is for, and how much communication hides behind compute."""

from zerojax.profile.events import Event, read_events, trace_files
from zerojax.profile.overlap import Overlap, measure_overlap
from zerojax.profile.ranges import write_ranges
from zerojax.profile.record import StepProfile, parse_steps

__all__ = [
    "Event",
    "Overlap",
    "StepProfile",
    "measure_overlap",
    "parse_steps",
    "read_events",
    "trace_files",
    "write_ranges",
]
