"""Post-training: losses, advantages, rewards, and the loops of ``zerojax posttrain``."""

from zerojax.posttrain.loss.advantages import gae as gae
from zerojax.posttrain.loss.advantages import group_advantages as group_advantages
from zerojax.posttrain.loss.losses import KLEstimator as KLEstimator
from zerojax.posttrain.loss.losses import bradley_terry_loss as bradley_terry_loss
from zerojax.posttrain.loss.losses import clipped_policy_loss as clipped_policy_loss
from zerojax.posttrain.loss.losses import clipped_value_loss as clipped_value_loss
from zerojax.posttrain.loss.losses import dpo_loss as dpo_loss
from zerojax.posttrain.loss.losses import ipo_loss as ipo_loss
from zerojax.posttrain.loss.losses import kl_estimate as kl_estimate
from zerojax.posttrain.loss.losses import token_mean as token_mean
from zerojax.posttrain.loss.objectives import token_log_probs as token_log_probs
from zerojax.posttrain.reward.environment import Environment as Environment
