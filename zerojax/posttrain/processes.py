"""The processes of a run share work: each has its own rows, and all get the same figures."""

from collections.abc import Callable

import jax
import numpy as np

from zerojax.comm.gather import gather_from_all
from zerojax.run.config import RunConfig
from zerojax.train.batch import local_rows, processes_a_row

Rows = dict[str, np.ndarray]
"""Columns of a batch by name; each has this process's rows."""


def of_this_process[T](every: list[T]) -> list[T]:
    """This process's part of a list that divides among the processes."""
    count = len(every) // jax.process_count()
    return every[jax.process_index() * count :][:count]


def mean_over_processes(values: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, float | None]:
    """Means over all processes.

    Args:
        values: by name, arrays of values and of whether each value counts.

    Returns:
        By name the mean of the values that count; None if none does.
    """
    own = [
        [float(np.sum(np.where(counted, x, 0), dtype=np.float64)), int(np.sum(counted))]
        for x, counted in values.values()
    ]
    sums = np.sum(gather_from_all(own), axis=0)
    return {
        name: float(total / count) if count else None
        for name, (total, count) in zip(values, sums, strict=True)
    }


def moments_over_processes(values: np.ndarray, counted: np.ndarray) -> tuple[float, float]:
    """Mean and variance of the values where ``counted`` > 0, over all processes. (0, 0) if there are none.

    Both arrays have this process's rows, and equal shapes.
    """
    mean = mean_over_processes({"mean": (values, counted > 0)})["mean"] or 0.0
    squares = (np.asarray(values, np.float64) - mean) ** 2
    return mean, mean_over_processes({"variance": (squares, counted > 0)})["variance"] or 0.0


def any_process(*flags: bool) -> tuple[bool, ...]:
    """Whether each flag is set in any process."""
    return tuple(map(any, zip(*gather_from_all(flags), strict=True)))


def micro_batch_rows(config: RunConfig) -> int:
    """This process's number of rows in a micro-batch. Processes that share rows have the same rows."""
    parts = jax.process_count() // processes_a_row(config.zero.sequence_parallel)
    return config.train.batch_size // config.train.accumulate // parts


def micro_batches(config: RunConfig, rows: Rows) -> list[Rows]:
    """This process's rows in micro-batches, which need no more memory than a training step."""
    size, count = micro_batch_rows(config), len(next(iter(rows.values())))
    return [{name: x[first : first + size] for name, x in rows.items()} for first in range(0, count, size)]


def predict_rows(config: RunConfig, rows: Rows, predict: Callable[[Rows], jax.Array]) -> np.ndarray:
    """Predict for this process's rows, padded with zero rows to whole micro-batches.

    Args:
        config: the run's settings.
        rows: as many as every other process has.
        predict: predicts for a micro-batch, like ``predict_step``.
    """
    count = len(rows["tokens"])
    missing = -count % micro_batch_rows(config)
    filled = {name: np.pad(x, ((0, missing), (0, 0))) for name, x in rows.items()}
    # All parts are dispatched before the first is read, so that the devices never wait for the host.
    found = [predict(part) for part in micro_batches(config, filled)]
    return np.concatenate([local_rows(part) for part in found])[:count]
