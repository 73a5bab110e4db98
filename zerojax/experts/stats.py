"""What routers did with a batch, as sums, and the auxiliary losses of them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zerojax.adapters.world_sum import world_sum


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterStats:
    """Sums over the tokens of one device, fp32, which can be added up over layers: ``stats + others``.

    Attributes:
        counts: tokens of each expert; they have no gradient.
        probabilities: of each expert, summed over tokens.
        square_logsumexp: of the logits, squared.
        entropy: of the probabilities, in nats.
        tokens: how many tokens were routed; one that goes through n layers counts n times.
    """

    counts: Float[Array, "*layers experts"]
    probabilities: Float[Array, "*layers experts"]
    square_logsumexp: Float[Array, "*layers"]
    entropy: Float[Array, "*layers"]
    tokens: Float[Array, "*layers"]

    @staticmethod
    def zeros(experts: int) -> "RouterStats":
        """Of no token."""
        each, none = jnp.zeros(experts, jnp.float32), jnp.zeros((), jnp.float32)
        return RouterStats(each, each, none, none, none)

    def __add__(self, other: "RouterStats") -> "RouterStats":
        return jax.tree.map(jnp.add, self, other)


def balance_loss(stats: RouterStats) -> Float[Array, ""]:
    """How unevenly tokens are spread: experts x the sum over experts of (share of tokens x mean probability).

    It is that of the whole batch on all devices. Where experts are used evenly it is as many as a token has,
    as ``load_balancing_loss_func`` of transformers computes it (Fedus et al., 2021, "Switch Transformers",
    section 2.2). Multiply it by a small factor, such as 0.01, and add it to the loss.

    Args:
        stats: added up over layers, for one loss of all layers pooled, as in transformers; or with leading
            axes of layers, for the mean of the losses of each layer.
    """
    counts, probabilities, tokens = world_sum((stats.counts, stats.probabilities, stats.tokens))
    products = (counts * probabilities).sum(-1) / jnp.square(jnp.maximum(tokens, 1))
    return counts.shape[-1] * products.mean()


def z_loss(stats: RouterStats) -> Float[Array, ""]:
    """The mean of the squared log-sum-exp of the logits, which keeps them small (Zoph et al., 2022, ST-MoE).

    It is that of the whole batch on all devices. Multiply it by a small factor, such as 0.001.
    """
    squares, tokens = world_sum((stats.square_logsumexp, stats.tokens))
    return (squares / jnp.maximum(tokens, 1)).mean()
