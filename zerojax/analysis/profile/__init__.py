"""Traces of training steps: ranges by hop and layer, and the share of communication that compute hides."""

from zerojax.analysis.profile.events import Event as Event
from zerojax.analysis.profile.events import read_events as read_events
from zerojax.analysis.profile.events import trace_files as trace_files
from zerojax.analysis.profile.overlap import Overlap as Overlap
from zerojax.analysis.profile.overlap import measure_overlap as measure_overlap
from zerojax.analysis.profile.record import StepProfile as StepProfile
from zerojax.analysis.profile.record import parse_steps as parse_steps
from zerojax.analysis.profile.record import write_ranges as write_ranges
