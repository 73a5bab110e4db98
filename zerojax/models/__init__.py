"""Language models in Flax NNX: GPT-2, OPT, LLaMA and Gemma style decoders, their loss and sampling."""

from zerojax.models.config import GPTConfig, flops_per_token, parameter_count
from zerojax.models.generation import generate, stream
from zerojax.models.gpt import GPT, MLP, Attention, Block
from zerojax.models.loss import cross_entropy, label_log_probs, lm_loss
from zerojax.models.sampling import Sampling

__all__ = [
    "GPT",
    "MLP",
    "Attention",
    "Block",
    "GPTConfig",
    "Sampling",
    "cross_entropy",
    "flops_per_token",
    "generate",
    "label_log_probs",
    "lm_loss",
    "parameter_count",
    "stream",
]
