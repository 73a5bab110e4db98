"""What models say about the rows of a rollout."""

from collections.abc import Callable

import jax
import numpy as np

from zerojax.posttrain.rollout import Rows
from zerojax.run.config import RunConfig
from zerojax.train.batch import local_rows


def micro_batches(config: RunConfig, rows: Rows) -> list[Rows]:
    """This process's rows in parts of the size of a micro-batch, which need no more memory than a step."""
    train = config.train
    size = train.batch_size // train.accumulate // jax.process_count()
    count = len(next(iter(rows.values())))
    return [{name: x[first : first + size] for name, x in rows.items()} for first in range(0, count, size)]


def predict_rows(config: RunConfig, rows: Rows, predict: Callable[[Rows], jax.Array]) -> np.ndarray:
    """Predictions for this process's rows.

    The last of their ``micro_batches`` is filled up with zeros.

    Args:
        config: the settings.
        rows: the same number in every process.
        predict: gives those of a micro-batch, as ``predict_step`` does.
    """
    given, count = micro_batches(config, rows), len(rows["tokens"])
    size = config.train.batch_size // config.train.accumulate // jax.process_count()
    parts = [{name: _padded(x, size) for name, x in part.items()} for part in given]
    # The reading comes after all parts are dispatched, so that the devices need not wait for it.
    return np.concatenate([local_rows(part) for part in [predict(part) for part in parts]])[:count]


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    return np.pad(rows, ((0, size - len(rows)), (0, 0)))
