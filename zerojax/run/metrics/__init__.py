"""Metrics of a run: fetched asynchronously, written to files, shown on a progress line."""
