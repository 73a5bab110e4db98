"""An exponential moving average of the weights, kept in the optimizer's state.

It is the last transform of a chain: ``optax.chain(optax.adamw(1e-3), average_weights(0.999))``. The average
is fp32 and sharded like the master weights: 4 bytes per parameter over all devices.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32, PyTree

from zerojax.errors import ConfigurationError


class AverageState(NamedTuple):
    """The state of ``average_weights``.

    Attributes:
        averaged_count: the number of updates in the average.
        averaged_params: the average, shaped and sharded like the parameters; zeros before the first update.
    """

    averaged_count: Int32[Array, ""]
    averaged_params: PyTree[Array]


def average_weights(decay: float) -> optax.GradientTransformation:
    """Keep an average of the weights after each update.

    After n updates the average is sum_i w_i p_i, where w_i is in proportion to decay^(n - i) and the w_i sum
    to 1. It contains nothing of the initial weights. This is Adam's debiased average (Kingma and Ba, section
    3), applied to weights.

    Args:
        decay: the factor per update, in (0, 1).

    Returns:
        A transform that leaves the updates as they are. It must come last in its chain.

    Raises:
        ConfigurationError: ``decay`` is not in (0, 1).

    Examples:
        >>> tx = optax.chain(optax.adamw(1e-3), zerojax.average_weights(0.999))
        >>> other = zerojax.TrainState.create(model, tx, loss_fn, mesh=mesh, zero=zero)
        >>> other, metrics = zerojax.train_step(other, batch)
        >>> metrics = zerojax.eval_step(zerojax.averaged(other), batch)
    """
    if not 0 < decay < 1:
        raise ConfigurationError(f"average_weights: decay={decay} must lie between 0 and 1.")

    def init(params: PyTree[Array]) -> AverageState:
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        return AverageState(jnp.zeros((), jnp.int32), zeros)

    def update(
        updates: PyTree[Array], state: PyTree[Array], params: PyTree[Array] = None
    ) -> tuple[PyTree[Array], AverageState]:
        before = AverageState(*state)
        count = jnp.asarray(optax.safe_increment(before.averaged_count))
        # (1 - decay) / (1 - decay^n): 1 at the first update, which removes the zeros.
        share = (1 - decay) / -jnp.expm1(count * math.log(decay))
        after = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: a + share * (p - a), before.averaged_params, after)
        return updates, AverageState(count, average)

    return optax.GradientTransformation(init, update)
