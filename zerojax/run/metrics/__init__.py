"""What a run tells while it runs: fetched late, written to files, shown on one line."""

from zerojax.run.metrics.curve import draw_loss_curve
from zerojax.run.metrics.devices import memory_in_use, peak_flops
from zerojax.run.metrics.files import MetricsFile, move_later_lines, read_lines, read_metrics
from zerojax.run.metrics.log import RunLog, StepCosts
from zerojax.run.metrics.progress import Progress
from zerojax.run.metrics.queue import MetricsQueue, StepRecord

__all__ = [
    "MetricsFile",
    "MetricsQueue",
    "Progress",
    "RunLog",
    "StepCosts",
    "StepRecord",
    "draw_loss_curve",
    "memory_in_use",
    "move_later_lines",
    "peak_flops",
    "read_lines",
    "read_metrics",
]
