"""What a run tells while it runs: fetched late, written to files, shown on one line."""

from zerojax.metrics.curve import draw_loss_curve
from zerojax.metrics.devices import memory_in_use, peak_flops
from zerojax.metrics.files import MetricsFile, move_later_lines, read_lines, read_metrics
from zerojax.metrics.log import RunLog, StepCosts
from zerojax.metrics.progress import Progress
from zerojax.metrics.queue import MetricsQueue, Record

__all__ = [
    "MetricsFile",
    "MetricsQueue",
    "Progress",
    "Record",
    "RunLog",
    "StepCosts",
    "draw_loss_curve",
    "memory_in_use",
    "move_later_lines",
    "peak_flops",
    "read_lines",
    "read_metrics",
]
