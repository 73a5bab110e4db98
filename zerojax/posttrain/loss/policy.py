"""The losses of policy and critic, and the predictions that they need from before a rollout's steps."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from jaxtyping import Array, Float

from zerojax.adapters.loss import LossFn, own_tokens
from zerojax.models import GPT, last_scores, scores
from zerojax.models.shared_rows import whole_rows
from zerojax.posttrain.loss.log_probs import token_log_probs
from zerojax.posttrain.loss.losses import (
    KLEstimator,
    clipped_policy_loss,
    clipped_value_loss,
    kl_estimate,
    token_mean,
)
from zerojax.run.config import PosttrainSection

Batch = dict[str, Array]


def policy_loss(settings: PosttrainSection) -> LossFn:
    """The loss of GRPO and PPO for ``TrainState.create``: the mean over all tokens of all completions.

    A batch has "tokens", int32 [rows, time + 1]. Its other columns are fp32 [rows, time] and describe
    tokens[:, 1:]: "mask" (1 in completions with a reward), "advantages", "old_log_probs", and for GRPO with
    ``settings.kl`` also "reference_log_probs".
    """
    kl = settings.kl if settings.method == "grpo" else 0.0  # PPO has it in the rewards
    return _with_options(
        _policy_loss,
        temperature=settings.temperature,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        kl=kl,
        kl_estimator=settings.kl_estimator,
    )


def log_probs_of(settings: PosttrainSection) -> Callable[[GPT, Batch], Float[Array, "rows time"]]:
    """A function for ``predict_step`` with the log-probability of each token of a batch's completions."""
    return _with_options(_log_probs, temperature=settings.temperature)


def value_loss(settings: PosttrainSection) -> LossFn:
    """The loss of PPO's critic for ``TrainState.create``: the mean over all tokens of all completions.

    A batch has "tokens" and "mask" as for ``policy_loss``, and, fp32 [rows, time], "returns" and
    "old_values", which are the results of ``values_of`` before the rollout's steps.
    """
    return _with_options(_value_loss, clip=settings.value_clip or math.inf)


def values_of(model: GPT, batch: Batch) -> Float[Array, "rows time"]:
    """A function for ``predict_step``: the critic's value of the text before each token of a completion."""
    return batch["mask"] * whole_rows(scores(model, batch["tokens"][:, :-1]))


def completion_scores(model: GPT, batch: Batch) -> Float[Array, " rows"]:
    """A function for ``predict_step``: the score of each text at the last token of its completion."""
    return last_scores(model, batch["tokens"][:, : model.config.max_seq_len], batch["mask"])


@cache  # runs that differ only in other settings then share compiled programs
def _with_options(fn: Callable[..., Any], **options: float | str) -> Callable[..., Any]:
    return partial(fn, **options)


def _log_probs(model: GPT, batch: Batch, *, temperature: float) -> Array:
    return whole_rows(token_log_probs(model, batch["tokens"], batch["mask"], temperature=temperature))


def _own(batch: Batch, *names: str) -> Batch:
    """Columns of a device's own tokens."""
    return own_tokens({name: batch[name] for name in names})


def _policy_loss(
    model: GPT,
    batch: Batch,
    *,
    temperature: float,
    clip_low: float,
    clip_high: float,
    kl: float,
    kl_estimator: KLEstimator,
) -> tuple[Array, dict[str, Array]]:
    log_probs = token_log_probs(model, batch["tokens"], batch["mask"], temperature=temperature)
    own = _own(batch, "mask", "old_log_probs", "advantages", *(["reference_log_probs"] if kl else ()))
    mask = own["mask"]
    each, clipped = clipped_policy_loss(
        log_probs, own["old_log_probs"], own["advantages"], clip_low=clip_low, clip_high=clip_high
    )
    # The mean of -log p over sampled tokens estimates the entropy.
    aux = {"clip_fraction": token_mean(clipped, mask)[0], "entropy": token_mean(-log_probs, mask)[0]}
    if kl:
        divergence = kl_estimate(log_probs, own["reference_log_probs"], kl_estimator)
        aux["kl"] = token_mean(divergence, mask)[0]
        each += kl * divergence
    loss, count = token_mean(each, mask)
    return loss, {"tokens": count, **aux}


def _value_loss(model: GPT, batch: Batch, *, clip: float) -> tuple[Array, dict[str, Array]]:
    own = _own(batch, "mask", "old_values", "returns")
    values = own["mask"] * scores(model, batch["tokens"][:, :-1])
    each = clipped_value_loss(values, own["old_values"], own["returns"], clip=clip)
    loss, count = token_mean(each, own["mask"])
    return loss, {"tokens": count}
