"""The gated delta rule and the rule of Mamba-2 in numpy, token by token."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


def gated_delta_rule(
    query: Floats,
    key: Floats,
    value: Floats,
    log_decay: Floats,
    beta: Floats | None,
    begins: NDArray[np.bool_],
) -> Floats:
    """The outputs of one head, in the dtype of its arguments.

    Args:
        query: [time, dim].
        key: [time, dim].
        value: [time, value_dim].
        log_decay: [time], at most 0; or [time, dim], for each channel of the keys (Kimi Delta Attention,
            2510.26692, equation 1).
        beta: [time], how far the state moves: 0 is not at all, 1 all the way. With None a token adds its
            value to the state and removes nothing, as in Mamba-2 (Dao and Gu, 2024, 2405.21060, section 5).
        begins: [time], where a document begins, before which the state is zero.
    """
    state = np.zeros((key.shape[1], value.shape[1]), value.dtype)
    out = np.empty_like(value)
    for t in range(len(value)):
        state = np.zeros_like(state) if begins[t] else np.exp(log_decay[t])[..., None] * state
        change = value[t] if beta is None else beta[t] * (value[t] - key[t] @ state)
        state = state + np.outer(key[t], change)
        out[t] = query[t] @ state
    return out
