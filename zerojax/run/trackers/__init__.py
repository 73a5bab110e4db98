"""Experiment trackers of a run: TensorBoard, Weights & Biases, MLflow."""

from zerojax.run.trackers.base import Tracker, Trackers, check_trackers, open_trackers, track

__all__ = ["Tracker", "Trackers", "check_trackers", "open_trackers", "track"]
