"""Predictions of models for the rows of a rollout or a batch."""

from collections.abc import Callable

import jax
import numpy as np

from zerojax.posttrain.rollout.rollout import Rows
from zerojax.run.config import RunConfig
from zerojax.train.batch import local_rows
from zerojax.train.shared_rows import processes_a_row


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
