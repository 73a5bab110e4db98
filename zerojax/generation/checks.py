"""What ``generate`` refuses, before any device is touched."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from zerojax.errors import ConfigurationError
from zerojax.generation.protocol import PROTOCOL
from zerojax.models import GPT
from zerojax.sharding.param_tree import Path
from zerojax.train.spec import TrainSpec

Stop = int | Sequence[int | Sequence[int]] | None
"""What ends a row: a token, or any of several, each a token or tokens in their order."""


def abstract_model(spec: TrainSpec) -> Any:
    """The model with shapes and dtypes for weights, to read its attributes and to trace its methods."""
    weights: dict[Path, Any] = {
        leaf.path: jax.ShapeDtypeStruct(leaf.unsharded_shape, spec.strategy.weight_dtype(leaf))
        for leaf in (*spec.leaves, *spec.frozen)
    }
    return spec.adapter.bind(weights, spec.adapter.abstract_model_state, train=False, key=None).model


def checked_context(model: Any) -> float:
    """The longest sequence of a model that can generate, in tokens; infinity if it does not say.

    Raises:
        ConfigurationError: it lacks a method, or gives scores in place of logits.
    """
    if missing := [name for name in PROTOCOL if not hasattr(model, name)]:
        raise ConfigurationError(
            f"the model has no {' and no '.join(missing)}: to generate, it needs the methods "
            f"{', '.join(PROTOCOL)} (docs/generation.md)."
        )
    if isinstance(model, GPT):
        model.config.check_language_model("generation")
    return getattr(model, "context_length", math.inf)


def checked_prompts(prompts: Sequence[Any]) -> list[Int[np.ndarray, " prompt"]]:
    """Prompts as int32 vectors.

    Raises:
        ConfigurationError: there is none, or one is empty, no vector, or of other numbers than ids.
    """
    rows = [np.asarray(prompt) for prompt in prompts]
    if not rows:
        raise ConfigurationError("there is no prompt: give one or more vectors of token ids.")
    for number, row in enumerate(rows):
        if row.ndim != 1 or not row.size or not np.issubdtype(row.dtype, np.integer):
            raise ConfigurationError(
                f"prompt {number} has shape {row.shape} and dtype {row.dtype}: a prompt is a vector of at "
                "least one token id."
            )
        if row.min() < 0:
            raise ConfigurationError(f"prompt {number} has the token id {row.min()}: ids begin at 0.")
    return [row.astype(np.int32) for row in rows]


def checked_stop(stop: Stop) -> tuple[tuple[int, ...], ...]:
    """What ends a row, as tokens in their order.

    Raises:
        ConfigurationError: there is something else than ids.
    """
    if stop is None:
        return ()
    ends = [stop] if isinstance(stop, int) else stop
    found = tuple((end,) if isinstance(end, int) else tuple(map(int, end)) for end in ends)
    if any(not end or min(end) < 0 for end in found):
        raise ConfigurationError(
            f"stop={stop!r}: give a token, or a list of tokens and of tuples of tokens in their order."
        )
    return found


def check_limits(rows: Sequence[np.ndarray], limits: Sequence[int], context: float) -> None:
    """Refuse limits below 1, and rows that do not fit the context.

    Raises:
        ConfigurationError: naming the row.
    """
    for number, (row, limit) in enumerate(zip(rows, limits, strict=True)):
        if limit < 1:
            raise ConfigurationError(f"max_new_tokens={limit} must be at least 1.")
        if len(row) + limit > context:
            raise ConfigurationError(
                f"prompt {number} has {len(row)} tokens, and with {limit} new ones exceeds the model's "
                f"context of {int(context)}: shorten it, or lower max_new_tokens."
            )
