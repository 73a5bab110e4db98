"""Who else is told about a run: TensorBoard, Weights & Biases, MLflow."""

from zerojax.trackers.base import Tracker, Trackers, check_trackers, open_trackers

__all__ = ["Tracker", "Trackers", "check_trackers", "open_trackers"]
