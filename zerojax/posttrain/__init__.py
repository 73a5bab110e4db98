"""Post-training: losses, advantages, rewards, and the loops of ``zerojax posttrain``."""

from zerojax.posttrain.loss.advantages import gae, group_advantages
from zerojax.posttrain.loss.losses import (
    KLEstimator,
    bradley_terry_loss,
    clipped_policy_loss,
    clipped_value_loss,
    dpo_loss,
    ipo_loss,
    kl_estimate,
    token_mean,
)
from zerojax.posttrain.loss.objectives import token_log_probs
from zerojax.posttrain.reward.environment import Environment

__all__ = [
    "Environment",
    "KLEstimator",
    "bradley_terry_loss",
    "clipped_policy_loss",
    "clipped_value_loss",
    "dpo_loss",
    "gae",
    "group_advantages",
    "ipo_loss",
    "kl_estimate",
    "token_log_probs",
    "token_mean",
]
