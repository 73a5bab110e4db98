"""A self-contained HTML page about a run: it loads nothing from the network or from other files."""

from zerojax.run.html_report.page import render as render
from zerojax.run.html_report.run_data import RunData as RunData
