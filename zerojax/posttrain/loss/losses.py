"""The losses of post-training, as pure functions of log-probabilities."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zerojax.errors import ConfigurationError

KLEstimator = Literal["k1", "k2", "k3"]


def dpo_loss(
    chosen: Float[Array, " pairs"],
    rejected: Float[Array, " pairs"],
    reference_chosen: Float[Array, " pairs"],
    reference_rejected: Float[Array, " pairs"],
    *,
    beta: float = 0.1,
) -> Float[Array, " pairs"]:
    """Direct preference optimisation (Rafailov et al., 2023, equation 7), one loss per pair.

    Args:
        chosen: log-probability of the preferred completion under the policy, summed over its tokens.
        rejected: log-probability of the rejected completion.
        reference_chosen: as ``chosen``, under the reference.
        reference_rejected: as ``rejected``, under the reference.
        beta: how strongly the policy is held to the reference.
    """
    margin = (chosen - reference_chosen) - (rejected - reference_rejected)
    return -jax.nn.log_sigmoid(beta * margin)


def ipo_loss(
    chosen: Float[Array, " pairs"],
    rejected: Float[Array, " pairs"],
    reference_chosen: Float[Array, " pairs"],
    reference_rejected: Float[Array, " pairs"],
    *,
    beta: float = 0.1,
) -> Float[Array, " pairs"]:
    """Identity preference optimisation (Azar et al., 2023, equation 17), one loss per pair.

    It has the same arguments as ``dpo_loss``; ``beta`` is the paper's tau.
    """
    margin = (chosen - reference_chosen) - (rejected - reference_rejected)
    return (margin - 1 / (2 * beta)) ** 2


def bradley_terry_loss(
    chosen: Float[Array, " pairs"], rejected: Float[Array, " pairs"]
) -> Float[Array, " pairs"]:
    """The loss of a reward model (Ouyang et al., 2022, equation 1), one loss per pair.

    It is -log of the model's probability of the preference (Bradley and Terry, 1952).

    Args:
        chosen: score of the preferred completion.
        rejected: score of the rejected completion.
    """
    return -jax.nn.log_sigmoid(chosen - rejected)


def clipped_policy_loss(
    log_probs: Float[Array, "*shape"],
    old_log_probs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
    """PPO's clipped surrogate (Schulman et al., 2017, equation 7), negated, one loss per token.

    GRPO uses it with advantages of groups (Shao et al., 2024, equation 3). A larger ``clip_high`` is DAPO's
    clip-higher (Yu et al., 2025, equation 10).

    Args:
        log_probs: of the tokens under the trained policy.
        old_log_probs: of the tokens under the policy that drew them.
        advantages: of the tokens.
        clip_low: the ratio of the two policies is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.

    Returns:
        The losses, and which tokens are clipped and so have a gradient of 0.
    """
    log_ratio = log_probs - old_log_probs
    # An overflow of the ratio only matters if the advantage is negative. Otherwise the ratio is clipped, or
    # multiplied by 0.
    largest = 0.9 * math.log(float(jnp.finfo(log_ratio.dtype).max))
    ratio = jnp.exp(jnp.where(advantages < 0, log_ratio, jnp.minimum(log_ratio, largest)))
    free = ratio * advantages
    held = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    return -jnp.minimum(free, held), held < free


def clipped_value_loss(
    values: Float[Array, "*shape"],
    old_values: Float[Array, "*shape"],
    returns: Float[Array, "*shape"],
    *,
    clip: float = 0.2,
) -> Float[Array, "*shape"]:
    """Half of the critic's squared error, with its change clipped, one loss per token.

    This is the loss of OpenAI Baselines (ppo2), by PPO's authors. Equation 9 of Schulman et al., 2017, has no
    clip.

    Args:
        values: the critic's values.
        old_values: its values before it was trained on these tokens.
        returns: the targets.
        clip: the largest change of a value that reduces the loss.
    """
    held = old_values + jnp.clip(values - old_values, -clip, clip)
    return 0.5 * jnp.maximum((values - returns) ** 2, (held - returns) ** 2)


def kl_estimate(
    log_probs: Float[Array, "*shape"],
    reference_log_probs: Float[Array, "*shape"],
    estimator: KLEstimator = "k3",
) -> Float[Array, "*shape"]:
    """An estimate of KL(policy | reference) for each token drawn by the policy (Schulman, 2020).

    The source is "Approximating KL Divergence". With r = reference / policy,

    - k1 = -log r is unbiased, with high variance;
    - k2 = (log r)^2 / 2 is biased, with low variance;
    - k3 = r - 1 - log r is unbiased and never negative (GRPO's: Shao et al., 2024, equation 4).

    Args:
        log_probs: of the tokens under the policy.
        reference_log_probs: of the tokens under the reference.
        estimator: "k1", "k2" or "k3".

    Raises:
        ConfigurationError: the estimator is unknown.
    """
    log_ratio = reference_log_probs - log_probs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    if estimator == "k3":
        return jnp.expm1(log_ratio) - log_ratio
    raise ConfigurationError(f"kl_estimate: estimator={estimator!r} is unknown: choose k1, k2 or k3.")


def token_mean(
    values: Float[Array, "rows time"], mask: Float[Array, "rows time"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The mean over the tokens of all completions (Yu et al., 2025, "DAPO", section 3.3), and their number.

    Long completions weigh more than short ones. Values outside the mask may be NaN.
    """
    count = jnp.sum(mask)
    return jnp.sum(jnp.where(mask > 0, values, 0)) / jnp.maximum(count, 1), count
