"""Traces of training steps: ranges by hop and layer, and the share of communication that compute hides."""

from zerojax.analysis.profile.events import Event, read_events, trace_files
from zerojax.analysis.profile.overlap import Overlap, measure_overlap
from zerojax.analysis.profile.record import StepProfile, parse_steps, write_ranges

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
