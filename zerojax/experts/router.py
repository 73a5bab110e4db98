"""Routers: the choice of each token's experts, their weights, and the auxiliary losses of that choice."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from zerojax.adapters.loss import world_sum
from zerojax.errors import ConfigurationError

Score = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class RouterConfig:
    """How a token's logits choose its experts and weigh what they return.

    The defaults are Mixtral's and Qwen3-MoE's. OLMoE has ``normalise=False``, gpt-oss
    ``logit_biases=True``, DeepSeek-V3 ``RouterConfig("sigmoid", scale=2.5, balance_rate=0.001, groups=8,
    groups_per_token=4)``, and DeepSeek-V2 ``RouterConfig(normalise=False, scale=16, groups=8,
    groups_per_token=3, group_best=1)``.

    Attributes:
        score: how logits become scores: a "softmax" over all experts, or a "sigmoid" of each.
        normalise: whether a token's weights are its scores divided by their sum. With "softmax" this is the
            softmax over the chosen logits.
        scale: factor of the weights, after ``normalise`` (DeepSeek's routed scaling factor).
        logit_biases: whether logits have trained biases (gpt-oss).
        balance_rate: how far each expert's bias moves in a training step against the expert's load, without
            an auxiliary loss (Wang et al., 2024, 2408.15664); 0 means no such biases. The bias is added to
            scores for the choice, and not for the weights. It is state, and the optimizer does not see it.
        groups: number of groups of neighbouring experts (DeepSeek-V2).
        groups_per_token: number of groups from which a token's experts are chosen: the groups whose best
            experts have the largest sums of scores.
        group_best: how many experts of a group are in its sum.
    """

    score: Score = "softmax"
    normalise: bool = True
    scale: float = 1.0
    logit_biases: bool = False
    balance_rate: float = 0.0
    groups: int = 1
    groups_per_token: int = 1
    group_best: int = 2

    def __post_init__(self) -> None:
        if self.score not in get_args(Score):
            raise ConfigurationError(
                f"RouterConfig: score={self.score!r} must be one of {', '.join(get_args(Score))}"
            )
        if not self.scale > 0:
            raise ConfigurationError(f"RouterConfig: scale={self.scale} must be above 0")
        if self.balance_rate < 0:
            raise ConfigurationError(f"RouterConfig: balance_rate={self.balance_rate} must be at least 0")
        if not 1 <= self.groups_per_token <= self.groups:
            raise ConfigurationError(
                f"RouterConfig: groups_per_token={self.groups_per_token} must be from 1 to "
                f"groups={self.groups}"
            )
        if self.group_best < 1:
            raise ConfigurationError(f"RouterConfig: group_best={self.group_best} must be at least 1")

    def check(self, experts: int, per_token: int) -> None:
        """Check the number of experts in a layer, and for a token.

        Raises:
            ConfigurationError: a token cannot have so many experts, or groups do not divide the experts.
        """
        if not 1 <= per_token <= experts:
            raise ConfigurationError(f"per_token={per_token} must be from 1 to experts={experts}")
        if experts % self.groups:
            raise ConfigurationError(
                f"RouterConfig: groups={self.groups} do not divide experts={experts}: use another number"
            )
        size = experts // self.groups
        if self.groups > 1 and size < self.group_best:
            raise ConfigurationError(
                f"RouterConfig: groups={self.groups} of experts={experts} have {size} each, fewer than "
                f"group_best={self.group_best}: use fewer groups, or a smaller group_best"
            )
        if per_token > size * self.groups_per_token:
            raise ConfigurationError(
                f"per_token={per_token} of groups_per_token={self.groups_per_token} groups, which have "
                f"{size} experts each: choose from more groups"
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterStats:
    """A router's statistics: sums over the tokens of one device, fp32. Layers add up: ``stats + others``.

    Attributes:
        counts: tokens of each expert, without a gradient.
        probabilities: each expert's probability.
        square_logsumexp: the square of the logits' log-sum-exp.
        entropy: the entropy of the probabilities, in nats.
        tokens: how many tokens were routed. A token that passes n layers counts n times.
    """

    counts: Float[Array, "*layers experts"]
    probabilities: Float[Array, "*layers experts"]
    square_logsumexp: Float[Array, "*layers"]
    entropy: Float[Array, "*layers"]
    tokens: Float[Array, "*layers"]

    @staticmethod
    def zeros(experts: int) -> "RouterStats":
        """The statistics of no token."""
        each, none = jnp.zeros(experts, jnp.float32), jnp.zeros((), jnp.float32)
        return RouterStats(each, each, none, none, none)

    def __add__(self, other: "RouterStats") -> "RouterStats":
        return jax.tree.map(jnp.add, self, other)


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        experts: each token's experts, all different, the best first.
        weights: the weights of these experts' outputs, fp32.
        stats: the statistics of these tokens.
    """

    experts: Int32[Array, "tokens per_token"]
    weights: Float[Array, "tokens per_token"]
    stats: RouterStats


def route(
    logits: Float[Array, "tokens experts"],
    per_token: int,
    config: RouterConfig,
    bias: Float[Array, " experts"] | None = None,
    factors: Float[Array, " experts"] | None = None,
) -> Routing:
    """Choose each token's experts, in fp32. Among equal scores the first expert's counts as the best.

    ``bias`` is added to scores for the choice alone; see ``RouterConfig.balance_rate``. The weights of
    expert i are multiplied by ``factors[i]``.
    """
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits) if config.score == "softmax" else jax.nn.sigmoid(logits)
    chosen_by = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    if config.groups > 1:
        chosen_by = _within_groups(chosen_by, config)
    experts = jax.lax.top_k(chosen_by, per_token)[1].astype(jnp.int32)
    chosen = experts[..., None] == jnp.arange(logits.shape[-1])
    # By comparison, whose gradient is a sum, not a scatter.
    weights = jnp.where(chosen, scores[:, None], 0).sum(-1)
    if config.normalise:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), _TINY)
    if config.scale != 1:
        weights = weights * config.scale
    if factors is not None:
        weights = weights * jnp.where(chosen, factors.astype(jnp.float32), 0).sum(-1)
    return Routing(experts, weights, _stats(logits, chosen, config))


_TINY = 1e-20  # sums of sigmoids may be 0


def _within_groups(scores: Float[Array, "tokens experts"], config: RouterConfig) -> Array:
    """The scores, with minus infinity outside a token's groups."""
    grouped = scores.reshape(len(scores), config.groups, -1)
    best = jax.lax.top_k(grouped, config.group_best)[0].sum(-1)
    chosen = jax.lax.top_k(best, config.groups_per_token)[1]
    inside = (chosen[..., None] == jnp.arange(config.groups)).any(-2)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _stats(logits: Array, chosen: Array, config: RouterConfig) -> RouterStats:
    if config.score == "softmax":
        log_probabilities = jax.nn.log_softmax(logits)
    else:
        log_scores = jax.nn.log_sigmoid(logits)
        log_probabilities = log_scores - jax.nn.logsumexp(log_scores, -1, keepdims=True)
    probabilities = jnp.exp(log_probabilities)
    return RouterStats(
        counts=chosen.sum((0, 1), dtype=jnp.float32),
        probabilities=probabilities.sum(0),
        square_logsumexp=jnp.square(jax.nn.logsumexp(logits, -1)).sum(),
        entropy=-jnp.where(probabilities > 0, probabilities * log_probabilities, 0).sum(),
        tokens=jnp.float32(len(logits)),
    )


def balance_loss(stats: RouterStats) -> Float[Array, ""]:
    """How unevenly tokens are spread: experts x the sum over experts of (share of tokens x mean probability).

    It is computed from the whole batch on all devices. With even use it is the number of a token's experts,
    like ``load_balancing_loss_func`` in transformers (Fedus et al., 2021, "Switch Transformers", section
    2.2). Multiply it by a small factor, such as 0.01, and add it to the loss.

    Args:
        stats: added up over layers, for one loss of all layers pooled, as in transformers; or with leading
            axes of layers, for the mean of the layers' losses.
    """
    counts, probabilities, tokens = world_sum((stats.counts, stats.probabilities, stats.tokens))
    products = (counts * probabilities).sum(-1) / jnp.square(jnp.maximum(tokens, 1))
    return counts.shape[-1] * products.mean()


def z_loss(stats: RouterStats) -> Float[Array, ""]:
    """The mean of the squared log-sum-exp of the logits, which keeps them small (Zoph et al., 2022, ST-MoE).

    It is computed from the whole batch on all devices. Multiply it by a small factor, such as 0.001.
    """
    squares, tokens = world_sum((stats.square_logsumexp, stats.tokens))
    return (squares / jnp.maximum(tokens, 1)).mean()
