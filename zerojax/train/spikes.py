"""Loss spikes: a step whose loss is far above recent ones is skipped, like one that is not finite.

One bad update, from a bad batch or an exploding gradient, shows as a loss that jumps; skipping the batches
around it is the usual cure (PaLM, Chowdhery et al., 2022, section 5.1). Whether a loss is a spike is decided
inside the compiled step, from losses that the train state carries: nothing waits for the host, and a run that
is resumed decides as it would have.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zerojax.errors import ConfigurationError

Losses = dict[str, Array]


@dataclass(frozen=True)
class SpikeRule:
    """When a loss is a spike: above mean + deviations * standard deviation of recent losses.

    Losses of skipped steps are not among the recent ones. Until there are ``window`` of those, nothing is a
    spike.

    Attributes:
        deviations: how many standard deviations above the mean; 4 to 8 are usual.
        window: how many losses the mean and the deviation are taken over.
    """

    deviations: float
    window: int = 100

    def __post_init__(self) -> None:
        """Refuse numbers that make no rule.

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
        """What a state carries: "recent", fp32 ``[window]``, and "count", int32, of those that are filled."""
        return {"recent": jnp.zeros(self.window, jnp.float32), "count": jnp.int32(0)}

    def limit(self, losses: Losses) -> Float[Array, ""]:
        """The largest loss that is no spike; infinite until the window is full."""
        mean, deviation = jnp.mean(losses["recent"]), jnp.std(losses["recent"])
        # Of equal losses the mean may be rounded to less than each of them.
        deviation = jnp.maximum(deviation, 1e-6 * jnp.abs(mean))
        return jnp.where(losses["count"] < self.window, jnp.inf, mean + self.deviations * deviation)

    def add(self, losses: Losses, loss: Float[Array, ""], ok: Bool[Array, ""]) -> Losses:
        """One more in the place of the oldest; the losses as they are where the step is not ``ok``."""
        recent = jnp.append(losses["recent"][1:], loss.astype(jnp.float32))
        count = jnp.minimum(losses["count"] + 1, self.window)
        return {
            "recent": jnp.where(ok, recent, losses["recent"]),
            "count": jnp.where(ok, count, losses["count"]),
        }
