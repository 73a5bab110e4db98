"""Optimizers and learning-rate schedules by name, from optax."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib

from zerojax.matmul.lora import A, B
from zerojax.optim.ema import average_weights
from zerojax.optim.muon import scale_by_muon
from zerojax.optim.shard_check import Optimizer, chain
from zerojax.run.config import OptimizerSection, RunConfig

_DECAYED = frozenset({"kernel", "embedding", "router", "gate", "up", "down"})
"""The names of matrices, the last four in ``zerojax.Experts``."""


def make_schedule(settings: OptimizerSection, steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates done.

    The warm-up takes at most half of the run's ``steps``, so that a short trial of a long config still
    reaches its peak.
    """
    peak, end = settings.learning_rate, settings.learning_rate * settings.final_fraction
    warmup = min(settings.warmup_steps, steps // 2)
    rest = max(1, steps - warmup)
    if settings.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif settings.schedule == "linear":
        after = optax.linear_schedule(peak, end, rest)
    elif settings.schedule == "warmup-cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=settings.final_fraction)
    else:
        decay = min(rest, max(1, round(settings.decay_fraction * steps)))
        after = optax.linear_schedule(peak, end, decay, transition_begin=rest - decay)
    # The first update is at peak/warmup, not at zero: a step at rate zero would be wasted.
    first = peak / max(1, warmup)
    rise = optax.linear_schedule(first, peak, max(1, warmup))
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def rate_changes(before: RunConfig, now: RunConfig, updates: int) -> list[str]:
    """A line on how new settings change the learning rate of a run that resumes after ``updates`` updates.

    Returns:
        A list of one line; empty if the schedule is the same.
    """
    given = [(config.optimizer, config.train.steps) for config in (before, now)]
    if given[0] == given[1]:  # compiling the schedules takes a part of a restart
        return []
    schedules = [make_schedule(*each) for each in given]
    ahead = np.arange(updates, max(updates + 1, now.train.steps))
    old, new = (np.asarray(jax.jit(jax.vmap(schedule))(ahead)) for schedule in schedules)
    if np.array_equal(old, new):
        return []
    instead = "as before" if old[0] == new[0] else f"instead of {old[0]:.3g}"
    steps = now.train.steps
    return [f"the learning rate follows the schedule of {steps} steps: {new[0]:.3g} for the next, {instead}"]


def make_optimizer(settings: OptimizerSection, steps: int) -> Optimizer:
    """Clipping by global norm, update rule, decoupled weight decay of matrices, learning rate, average.

    ``steps`` is the length of the learning rate's schedule.
    """
    b1, b2, eps = settings.beta1, settings.beta2, settings.eps
    rule: Callable[[], Optimizer] = {
        "adamw": lambda: optax.scale_by_adam(b1, b2, eps),
        "nadamw": lambda: optax.scale_by_adam(b1, b2, eps, nesterov=True),
        "adopt": lambda: optax.contrib.scale_by_adopt(b1, b2, eps),
        "lion": lambda: optax.scale_by_lion(b1, b2),
        "muon": lambda: scale_by_muon(beta=b1, b1=b1, b2=b2, eps=eps),
        "sgd": lambda: optax.trace(b1),
    }[settings.name]
    parts: list[Optimizer] = []
    if settings.clip_norm:
        parts.append(optax.clip_by_global_norm(settings.clip_norm))
    parts.append(rule())
    if settings.weight_decay:
        parts.append(optax.add_decayed_weights(settings.weight_decay, mask=decay_mask))
    parts.append(optax.scale_by_learning_rate(make_schedule(settings, steps)))
    if settings.ema_decay:
        parts.append(average_weights(settings.ema_decay))
    return chain(*parts)


def decay_mask(params: Any) -> Any:
    """A tree of bools, true for the leaves with weight decay: matrices, embeddings, and their adapters.

    They are recognised by name, because the norm scales of stacked blocks have two dimensions as well.
    """

    def is_decayed(path: tuple[Any, ...], _: Any) -> bool:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return names[-2 if names[-1] in (A, B) else -1] in _DECAYED

    return jax.tree_util.tree_map_with_path(is_decayed, params)
