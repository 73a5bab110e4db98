"""Recommends to recompute less, if there is memory for the activations that layers then keep."""

from contextlib import suppress
from typing import get_args

from zerojax.analysis.plan.cluster import Cluster
from zerojax.analysis.plan.host_choice import Predict, host_fits, host_needed
from zerojax.analysis.plan.memory import PredictedMemory
from zerojax.analysis.plan.speed import StepTime
from zerojax.errors import ConfigurationError
from zerojax.formatting import duration, size
from zerojax.zero_config.config import Remat, ZeroConfig

_WORTH_IT = 1.03
"""The least speed-up to recommend. Predictions are no more accurate."""


def choose_remat(zero: ZeroConfig, cluster: Cluster, predict: Predict) -> str | None:
    """Recommend the fastest ``ZeroConfig.remat`` that fits; None if the run's own is about as fast.

    ``predict`` raises a ConfigurationError for options that the model or its optimizer does not support.
    """
    fitting: dict[Remat, tuple[PredictedMemory, StepTime]] = {}
    for remat in get_args(Remat):
        with suppress(ConfigurationError):
            memory, time = predict(zero.replace(remat=remat))
            if memory.total <= cluster.budget and host_fits(memory, cluster):
                fitting[remat] = memory, time
    if zero.remat not in fitting:
        return None
    now = fitting[zero.remat][1].seconds
    remat = min(fitting, key=lambda remat: fitting[remat][1].seconds)
    memory, time = fitting[remat]
    if _WORTH_IT * time.seconds > now:
        return None
    host = f", and a host needs {size(host_needed(memory, cluster))}" if memory.host_total else ""
    return (
        f'With remat = "{remat}" a step takes {duration(time.seconds)} instead of {duration(now)}, because '
        f"it recomputes less. A GPU then holds {size(memory.total)}{host}."
    )
