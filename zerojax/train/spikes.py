"""Loss spikes: a step whose loss is far above recent ones is skipped, like one whose loss is not finite.

A bad update, from a bad batch or an exploding gradient, shows as a jump of the loss. The usual cure is to
skip the batches around it (PaLM, Chowdhery et al., 2022, section 5.1). The compiled step decides by the
losses in the train state whether a loss is a spike. So nothing waits for the host, and a resumed run decides
like one that was not interrupted.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zerojax.errors import ConfigurationError

Losses = dict[str, Array]


@dataclass(frozen=True)
class SpikeRule:
    """A loss is a spike if it exceeds mean + deviations * standard deviation of recent losses.

    Losses of skipped steps do not count as recent. Until there are ``window`` recent losses, none is a spike.

    Attributes:
        deviations: how many standard deviations above the mean; 4 to 8 are usual.
        window: the number of losses in the mean and the deviation.
    """

    deviations: float
    window: int = 100

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigurationError: naming the number.
        """
        if not 0 < self.deviations < math.inf:
            raise ConfigurationError(f"SpikeRule: deviations={self.deviations} must be a positive number.")
        if self.window < 2:
            raise ConfigurationError(
                f"SpikeRule: window={self.window} must be 2 or more: one loss has no deviation."
            )

    def start(self) -> Losses:
        """The initial losses: "recent", fp32 ``[window]``, and "count", int32, how many of them are set."""
        return {"recent": jnp.zeros(self.window, jnp.float32), "count": jnp.int32(0)}

    def limit(self, losses: Losses) -> Float[Array, ""]:
        """The largest loss that is not a spike; infinite until the window is full."""
        mean, deviation = jnp.mean(losses["recent"]), jnp.std(losses["recent"])
        # The mean of equal losses may be rounded to less than each of them.
        deviation = jnp.maximum(deviation, 1e-6 * jnp.abs(mean))
        return jnp.where(losses["count"] < self.window, jnp.inf, mean + self.deviations * deviation)

    def add(self, losses: Losses, loss: Float[Array, ""], ok: Bool[Array, ""]) -> Losses:
        """Replace the oldest loss by this one if the step is ``ok``."""
        recent = jnp.append(losses["recent"][1:], loss.astype(jnp.float32))
        added = {"recent": recent, "count": jnp.minimum(losses["count"] + 1, self.window)}
        return {name: jnp.where(ok, added[name], losses[name]) for name in losses}
