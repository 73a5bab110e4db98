"""Language models in Flax NNX: GPT-2, OPT, LLaMA and Gemma style decoders, their loss, and scores."""

from zerojax.models.block import MLP, Attention, Block
from zerojax.models.config import GPTConfig
from zerojax.models.gpt import GPT, last_scores, scores, units_of
from zerojax.models.loss import cross_entropy, label_log_probs, lm_loss
from zerojax.models.size import describe_parameters, flops_per_token, parameter_count

__all__ = [
    "GPT",
    "MLP",
    "Attention",
    "Block",
    "GPTConfig",
    "cross_entropy",
    "describe_parameters",
    "flops_per_token",
    "label_log_probs",
    "last_scores",
    "lm_loss",
    "parameter_count",
    "scores",
    "units_of",
]
