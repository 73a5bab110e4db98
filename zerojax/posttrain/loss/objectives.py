"""The losses of policy, critic and preferences on batches, and the predictions that they need."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zerojax.adapters.loss import LossFn, own_tokens
from zerojax.models import GPT, label_log_probs, last_scores, scores
from zerojax.models.loss import IGNORE
from zerojax.models.shared_rows import whole_rows
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

if TYPE_CHECKING:
    from zerojax.run.config import PosttrainSection

Batch = dict[str, Array]
Answers = dict[str, Float[Array, " pairs"]]


def token_log_probs(
    model: GPT,
    tokens: Int[Array, "rows time_1"],
    mask: Float[Array, "rows time"],
    *,
    temperature: float = 1.0,
) -> Float[Array, "rows time"]:
    """The log-probability (nats, fp32) of each token except the first, given the tokens before it.

    With ``ZeroConfig(sequence_parallel=k)`` the result covers this device's tokens (``zerojax.own_tokens``).

    Args:
        model: a decoder of zerojax, whole or as a loss function gets it.
        tokens: a text per row, int32. Any tokens may follow the text.
        mask: 1 for the tokens of tokens[:, 1:] to measure. All other tokens get 0.
        temperature: divides the logits.
    """
    labels = own_tokens(jnp.where(mask > 0, tokens[:, 1:], IGNORE))
    hidden = model.hidden(tokens[:, :-1])
    found = label_log_probs(
        hidden.reshape(-1, hidden.shape[-1]),
        model.unembedding,
        labels.reshape(-1),
        chunk=model.config.loss_chunk,
        softcap=model.config.logit_softcap,
        temperature=temperature,
    )
    return found.reshape(labels.shape)


def policy_loss(settings: "PosttrainSection") -> LossFn:
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


def log_probs_of(settings: "PosttrainSection") -> Callable[[GPT, Batch], Float[Array, "rows time"]]:
    """A function for ``predict_step`` with the log-probability of each token of a batch's completions."""
    return _with_options(_log_probs, temperature=settings.temperature)


def value_loss(settings: "PosttrainSection") -> LossFn:
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
def _with_options(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
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


def preference_loss(settings: "PosttrainSection") -> LossFn:
    """The loss of ``settings.method`` for ``TrainState.create``: the mean over pairs.

    A batch has

    - "chosen" and "rejected", int32 [pairs, time + 1];
    - "chosen_mask" and "rejected_mask", fp32 [pairs, time], 1 where tokens[:, 1:] belong to the response;
    - for DPO and IPO "reference_chosen" and "reference_rejected", fp32 [pairs], the results of
      ``answer_log_probs`` for the reference.

    All micro-batches of all devices have the same number of pairs, so the mean of their means is the mean
    over all pairs. The rewards in aux are a reward model's scores. For DPO and IPO they are beta times the
    log of the ratio to the reference's probability (Rafailov et al., 2023, section 4).
    """
    if settings.method == "reward":
        return _reward_loss
    loss = ipo_loss if settings.method == "ipo" else dpo_loss
    return _with_options(_preference_loss, loss=loss, beta=settings.beta)


def answer_log_probs(model: GPT, batch: Batch) -> Answers:
    """The log-probabilities of both responses, summed over their tokens: fp32 [pairs] by name."""
    tokens, mask = both(batch)
    each = whole_rows(token_log_probs(model, tokens, mask))
    return _by_name(jnp.sum(each, axis=1))


def answer_scores(model: GPT, batch: Batch) -> Answers:
    """The scores of both responses, each at its last token: fp32 [pairs] by name.

    The responses leave at least the last column of the batch free.
    """
    tokens, mask = both(batch)
    return _by_name(last_scores(model, tokens[:, :-1], mask))


def _by_name(each: Float[Array, " responses"]) -> Answers:
    return dict(zip(("chosen", "rejected"), jnp.split(each, 2), strict=True))


def both(batch: Batch) -> tuple[Array, Array]:
    """Tokens and masks ``[2 pairs, ...]``, chosen responses first: one pass gathers each weight once."""
    return (
        jnp.concatenate([batch["chosen"], batch["rejected"]]),
        jnp.concatenate([batch["chosen_mask"], batch["rejected_mask"]]),
    )


def _preference_loss(
    model: GPT, batch: Batch, *, loss: Callable[..., Array], beta: float
) -> tuple[Array, dict[str, Array]]:
    found = answer_log_probs(model, batch)
    reference = {name: batch[f"reference_{name}"] for name in found}
    each = loss(*found.values(), *reference.values(), beta=beta)
    rewards = {name: beta * (found[name] - reference[name]) for name in found}
    return jnp.mean(each), _measure(rewards, batch)


def _reward_loss(model: GPT, batch: Batch) -> tuple[Array, dict[str, Array]]:
    found = answer_scores(model, batch)
    return jnp.mean(bradley_terry_loss(*found.values())), _measure(found, batch)


def _measure(rewards: Answers, batch: Batch) -> dict[str, Array]:
    margin = rewards["chosen"] - rewards["rejected"]
    return {
        "accuracy": jnp.mean(margin > 0),
        "margin": jnp.mean(margin),
        "rewards_chosen": jnp.mean(rewards["chosen"]),
        "rewards_rejected": jnp.mean(rewards["rejected"]),
        "length": jnp.mean(jnp.sum(both(batch)[1], axis=1)),
    }
