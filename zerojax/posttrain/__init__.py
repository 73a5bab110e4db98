"""Post-training: losses, advantages, rewards, and the loop of ``zerojax posttrain``."""

from zerojax.posttrain.advantages import gae, group_advantages
from zerojax.posttrain.log_probs import token_log_probs
from zerojax.posttrain.losses import (
    KLEstimator,
    bradley_terry_loss,
    clipped_policy_loss,
    clipped_value_loss,
    dpo_loss,
    ipo_loss,
    kl_estimate,
    token_mean,
)

__all__ = [
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
