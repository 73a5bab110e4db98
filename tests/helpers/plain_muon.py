"""optax's Muon on whole leaves, told which axes are a matrix's: the last two of kernels and of experts."""

from typing import Any

import jax
import optax
from optax import contrib


def plain_muon(rate: optax.ScalarOrSchedule, stack: str = "stack") -> optax.GradientTransformation:
    """Muon for matrices and Adam for the rest: optax's own would use Nesterov for these, too.

    Args:
        rate: the learning rate.
        stack: what the paths of stacked leaves contain.
    """

    def is_matrix(path: Any, x: Any) -> bool:
        name = jax.tree_util.keystr(path)
        of_experts = "'mixture'" in name and x.ndim - (stack in name) == 3
        return x.ndim - (stack in name) == 2 + of_experts and "bias" not in name

    def dims(params: Any) -> Any:
        def one(path: Any, x: Any) -> Any:
            return contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if is_matrix(path, x) else None

        return jax.tree_util.tree_map_with_path(one, params)

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: "muon" if is_matrix(path, x) else "adam", params
        )

    muon = contrib.muon(
        rate, adam_b2=0.95, nesterov=True, consistent_rms=0.2, muon_weight_dimension_numbers=dims
    )
    return optax.partition({"muon": muon, "adam": optax.adam(rate, 0.9, 0.95)}, labels)
