"""The losses on preferences, and the log-probabilities and scores of responses."""

from collections.abc import Callable
from functools import cache, partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from zerojax.adapters.loss import LossFn
from zerojax.models import GPT, last_scores
from zerojax.models.shared_rows import whole_rows
from zerojax.posttrain.loss.log_probs import token_log_probs
from zerojax.posttrain.loss.losses import bradley_terry_loss, dpo_loss, ipo_loss
from zerojax.run.config import PosttrainSection

Batch = dict[str, Array]
Answers = dict[str, Float[Array, " pairs"]]

_LOSSES: dict[str, Callable[..., Array]] = {"dpo": dpo_loss, "ipo": ipo_loss}


@cache  # runs with the same settings then share compiled programs
def preference_loss(settings: PosttrainSection) -> LossFn:
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
    return _reward_loss if settings.method == "reward" else partial(_preference_loss, settings)


def answer_log_probs(model: GPT, batch: Batch) -> Answers:
    """The log-probabilities of both responses, summed over their tokens: fp32 [pairs] by name."""
    tokens, mask = both(batch)
    each = whole_rows(token_log_probs(model, tokens, mask))
    chosen, rejected = jnp.split(jnp.sum(each, axis=1), 2)
    return {"chosen": chosen, "rejected": rejected}


def answer_scores(model: GPT, batch: Batch) -> Answers:
    """The scores of both responses, each at its last token: fp32 [pairs] by name.

    The responses leave at least the last column of the batch free.
    """
    tokens, mask = both(batch)
    chosen, rejected = jnp.split(last_scores(model, tokens[:, :-1], mask), 2)
    return {"chosen": chosen, "rejected": rejected}


def both(batch: Batch) -> tuple[Array, Array]:
    """Tokens and masks ``[2 pairs, ...]``, chosen responses first: one pass gathers each weight once."""
    return (
        jnp.concatenate([batch["chosen"], batch["rejected"]]),
        jnp.concatenate([batch["chosen_mask"], batch["rejected_mask"]]),
    )


def _preference_loss(settings: PosttrainSection, model: GPT, batch: Batch) -> tuple[Array, dict[str, Array]]:
    found = answer_log_probs(model, batch)
    reference = {name: batch[f"reference_{name}"] for name in found}
    each = _LOSSES[settings.method](
        found["chosen"], found["rejected"], reference["chosen"], reference["rejected"], beta=settings.beta
    )
    rewards = {name: settings.beta * (found[name] - reference[name]) for name in found}
    return jnp.mean(each), _measure(rewards, batch)


def _reward_loss(model: GPT, batch: Batch) -> tuple[Array, dict[str, Array]]:
    found = answer_scores(model, batch)
    return jnp.mean(bradley_terry_loss(found["chosen"], found["rejected"])), _measure(found, batch)


def _measure(rewards: Answers, batch: Batch) -> dict[str, Array]:
    margin = rewards["chosen"] - rewards["rejected"]
    return {
        "accuracy": jnp.mean(margin > 0),
        "margin": jnp.mean(margin),
        "rewards_chosen": jnp.mean(rewards["chosen"]),
        "rewards_rejected": jnp.mean(rewards["rejected"]),
        "length": jnp.mean(jnp.sum(both(batch)[1], axis=1)),
    }
