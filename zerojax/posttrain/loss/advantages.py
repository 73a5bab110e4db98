"""Advantages: how much better an action was than expected."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Shaped

from zerojax.errors import ConfigurationError


def group_advantages(
    rewards: Shaped[Array | np.ndarray, " rows"],
    counted: Shaped[Array | np.ndarray, " rows"],
    *,
    group_size: int,
    scale: bool = True,
    eps: float = 1e-6,
) -> Float32[Array, " rows"]:
    """Rewards relative to the other completions of the same prompt.

    A = (r - mean) / (std + eps) over a group (Shao et al., 2024, "DeepSeekMath", section 4.1.2). Without
    ``scale``, A = r - mean (Liu et al., 2025, "Understanding R1-Zero-Like Training").

    Args:
        rewards: one per completion, of any dtype. The completions of a prompt are next to each other.
        counted: 1; or 0 for a completion without a reward, which belongs to no group and gets 0.
        group_size: completions per prompt.
        scale: whether to divide by the standard deviation of the group.
        eps: keeps a group of equal rewards at 0.

    Raises:
        ConfigurationError: the rows do not divide into groups.
    """
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ConfigurationError(
            f"{rewards.shape[0]} rewards do not divide into groups of {group_size}: pass group_size rewards "
            "for each prompt"
        )
    groups, there = (jnp.asarray(x, jnp.float32).reshape(-1, group_size) for x in (rewards, counted))
    count = jnp.maximum(there.sum(axis=1, keepdims=True), 1)
    # Rewards relative to the largest, because the rounded mean of equal rewards may differ from them.
    largest = jnp.max(groups, axis=1, keepdims=True, where=there > 0, initial=-jnp.inf)
    below = jnp.where(there > 0, groups - largest, 0)
    centred = jnp.where(there > 0, below - below.sum(axis=1, keepdims=True) / count, 0)
    if scale:
        deviation = jnp.sqrt((centred**2).sum(axis=1, keepdims=True) / count)
        centred = centred / (deviation + eps)
    return centred.reshape(-1)


def truncated_log_probs(
    log_probs: Float32[np.ndarray, "rows time"], drawn: Float32[np.ndarray, "rows time"], cap: float
) -> Float32[np.ndarray, "rows time"]:
    """The log-probabilities of drawn tokens from which ``clipped_policy_loss`` measures its ratio.

    An engine draws a token with probability q, and the run gives it p. They differ by rounding, and by a step
    if the engine's weights are older. The ratio begins at min(p / q, cap), a truncated importance weight
    (Ionides, 2008; Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"). The clip then counts from the policy that drew the token, as in PPO. So what the last step has
    already made likelier is not pushed further. Counted from p (Hilton et al., 2022), runs ahead fail.

    Args:
        log_probs: log p, before the steps on these tokens.
        drawn: log q.
        cap: the largest ratio to begin with; 0 measures from p, as if the run had drawn the tokens.
    """
    return np.maximum(drawn, log_probs - np.float32(np.log(cap))) if cap else log_probs


def token_rewards(
    earned: Float32[np.ndarray, "rows time"], rows: Mapping[str, np.ndarray], kl: float
) -> Float32[np.ndarray, "rows time"]:
    """The reward of each token: its earned reward minus the divergence from the reference.

    r_t = [t is the last] score - kl (log p_t - log p_t of the reference). The sum over a completion is the
    reward of Ziegler et al. (2019, equation 2) and of Ouyang et al. (2022, equation 2, without the
    pretraining term).

    Args:
        earned: as ``Rollout.rewards_per_token`` returns it.
        rows: have "mask", and with ``kl`` also "log_probs" and "reference_log_probs".
        kl: beta of the papers.
    """
    found = np.zeros_like(earned)
    if kl:
        found -= kl * rows["mask"] * (rows["log_probs"] - rows["reference_log_probs"])
    return found + rows["mask"] * earned


def gae(
    rewards: Shaped[Array | np.ndarray, "rows time"],
    values: Shaped[Array | np.ndarray, "rows time"],
    mask: Shaped[Array | np.ndarray, "rows time"],
    *,
    discount: float = 1.0,
    decay: float = 0.95,
) -> tuple[Float32[Array, "rows time"], Float32[Array, "rows time"]]:
    """Generalised advantage estimates, and the returns as a critic's targets.

    A_t = sum over l of (discount decay)^l delta_(t+l), with delta_t = r_t + discount V_(t+1) - V_t. See
    equation 16 of "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (Schulman et
    al., 2016). The value after the last action is 0.

    Args:
        rewards: of each token. Arrays may have any dtype.
        values: of the state before each token.
        mask: 1 for the tokens of a completion, 0 elsewhere. Tokens between them, such as an environment's
            observations, are skipped and take no time.
        discount: gamma of the paper.
        decay: lambda of the paper: 0 trusts the critic, 1 the rewards.

    Returns:
        The advantages, and the returns (advantages + values). Both are 0 outside the mask.
    """

    def back(
        carry: tuple[Array, Array], now: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        advantage, following = carry
        reward, value, counted = now
        delta = reward + discount * following - value
        new = delta + discount * decay * advantage
        advantage, following = (
            jnp.where(counted > 0, x, old) for x, old in ((new, advantage), (value, following))
        )
        return (advantage, following), advantage

    given, value, counted = (jnp.asarray(x, jnp.float32).T for x in (rewards, values, mask))
    zeros = jnp.zeros(len(rewards), jnp.float32)
    _, advantages = jax.lax.scan(back, (zeros, zeros), (given, value, counted), reverse=True)
    return (counted * advantages).T, (counted * (advantages + value)).T
