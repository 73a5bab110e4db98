"""What runs on the devices: the losses of policy and critic, and what they start from."""

import math
from collections.abc import Callable
from functools import cache, partial

from jaxtyping import Array, Float

from zerojax.adapters import LossFn
from zerojax.models import GPT, last_scores, scores
from zerojax.posttrain.loss.log_probs import token_log_probs
from zerojax.posttrain.loss.losses import clipped_policy_loss, clipped_value_loss, kl_estimate, token_mean
from zerojax.run.config import PosttrainSection

Batch = dict[str, Array]


@cache  # so that runs with the same settings share what they compile
def policy_loss(settings: PosttrainSection) -> LossFn:
    """The loss of GRPO and PPO for ``TrainState.create``: the mean over all tokens of all completions.

    A batch has "tokens" int32 [rows, time + 1], and of tokens[:, 1:], fp32 [rows, time]: "mask" (1 for those
    of completions that count), "advantages", "old_log_probs", and with ``settings.kl`` of GRPO also
    "reference_log_probs".
    """
    return partial(_policy_loss, settings)


@cache
def log_probs_of(settings: PosttrainSection) -> Callable[[GPT, Batch], Float[Array, "rows time"]]:
    """A function for ``predict_step``: the log-probabilities of the completions in a batch's rows."""
    return partial(_log_probs, settings)


@cache
def value_loss(settings: PosttrainSection) -> LossFn:
    """The loss of PPO's critic for ``TrainState.create``: the mean over all tokens of all completions.

    A batch has "tokens" and "mask" as for ``policy_loss``, and fp32 [rows, time]: "returns", and "old_values"
    as ``values_of`` gave them before the rollout's steps.
    """
    return partial(_value_loss, settings)


def values_of(model: GPT, batch: Batch) -> Float[Array, "rows time"]:
    """A function for ``predict_step``: the critic's value of the text before each token of a completion."""
    return batch["mask"] * scores(model, batch["tokens"][:, :-1])


def completion_scores(model: GPT, batch: Batch) -> Float[Array, " rows"]:
    """A function for ``predict_step``: the score of each text at the last token of its completion."""
    return last_scores(model, batch["tokens"][:, : model.config.max_seq_len], batch["mask"])


def _log_probs(settings: PosttrainSection, model: GPT, batch: Batch) -> Array:
    return token_log_probs(model, batch["tokens"], batch["mask"], temperature=settings.temperature)


def _policy_loss(settings: PosttrainSection, model: GPT, batch: Batch) -> tuple[Array, dict[str, Array]]:
    mask, log_probs = batch["mask"], _log_probs(settings, model, batch)
    each, clipped = clipped_policy_loss(
        log_probs,
        batch["old_log_probs"],
        batch["advantages"],
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    # The mean of -log p over drawn tokens estimates the entropy.
    aux = {"clip_fraction": token_mean(clipped, mask)[0], "entropy": token_mean(-log_probs, mask)[0]}
    if settings.kl and settings.method == "grpo":  # PPO has it in the rewards
        divergence = kl_estimate(log_probs, batch["reference_log_probs"], settings.kl_estimator)
        aux["kl"] = token_mean(divergence, mask)[0]
        each += settings.kl * divergence
    loss, count = token_mean(each, mask)
    return loss, {"tokens": count, **aux}


def _value_loss(settings: PosttrainSection, model: GPT, batch: Batch) -> tuple[Array, dict[str, Array]]:
    clip = settings.value_clip or math.inf
    each = clipped_value_loss(values_of(model, batch), batch["old_values"], batch["returns"], clip=clip)
    loss, count = token_mean(each, batch["mask"])
    return loss, {"tokens": count}
