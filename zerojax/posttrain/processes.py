"""The processes of a run share work: each has its own prompts, and all get the same figures."""

import jax
import numpy as np

from zerojax.comm.gather import gather_from_all


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
    """Mean and variance over all processes of the values where ``counted`` > 0; 0 and 0 if there are none."""
    mean = mean_over_processes({"mean": (values, counted > 0)})["mean"] or 0.0
    squares = (np.asarray(values, np.float64) - mean) ** 2
    return mean, mean_over_processes({"variance": (squares, counted > 0)})["variance"] or 0.0


def any_process(*flags: bool) -> tuple[bool, ...]:
    """Whether each flag is set in any process."""
    return tuple(map(any, zip(*gather_from_all(flags), strict=True)))
