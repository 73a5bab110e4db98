"""One HTML page about a run, which needs nothing but itself: no network, no other file."""

from zerojax.run.html_report.page import render
from zerojax.run.html_report.story import Story, read_story

__all__ = ["Story", "read_story", "render"]
