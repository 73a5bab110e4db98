"""Language models in Flax NNX: GPT-2, OPT, LLaMA and Gemma style decoders, their loss, and scores."""

from zerojax.models.block import MLP as MLP
from zerojax.models.block import Attention as Attention
from zerojax.models.block import Block as Block
from zerojax.models.config import GPTConfig as GPTConfig
from zerojax.models.gpt import GPT as GPT
from zerojax.models.gpt import last_scores as last_scores
from zerojax.models.gpt import scores as scores
from zerojax.models.gpt import units_of as units_of
from zerojax.models.loss import cross_entropy as cross_entropy
from zerojax.models.loss import label_log_probs as label_log_probs
from zerojax.models.loss import lm_loss as lm_loss
from zerojax.models.size import describe_parameters as describe_parameters
from zerojax.models.size import flops_per_token as flops_per_token
from zerojax.models.size import parameter_count as parameter_count
