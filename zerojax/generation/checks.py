"""Checks of ``generate``'s arguments, made before any device is used."""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from zerojax.errors import ConfigurationError
from zerojax.generation.protocol import PROTOCOL, Decoder
from zerojax.models import GPT
from zerojax.sharding.param_tree import Path
from zerojax.train.spec import TrainSpec

_IDS = 2**31
"""Upper bound of token ids, which are int32."""

Stop = int | Sequence[int | Sequence[int]] | None
"""The ends of a row: a token, or any of several ends, each a token or tokens in their order."""


def abstract_model(spec: TrainSpec) -> Decoder:
    """The model with shapes and dtypes in place of weights, to read its attributes and trace its methods."""
    weights: dict[Path, Any] = {
        leaf.path: jax.ShapeDtypeStruct(leaf.unsharded_shape, leaf.gathered_dtype)
        for leaf in (*spec.leaves, *spec.frozen)
    }
    return spec.adapter.bind(weights, spec.adapter.abstract_model_state, train=False, key=None).model


class Limits(NamedTuple):
    """Limits of a model's inputs.

    Attributes:
        context: the longest sequence, in tokens; infinity if the model does not say.
        vocabulary: ids are below this; 2**31 if the model does not say.
    """

    context: float
    vocabulary: int


def checked_limits(model: object) -> Limits:
    """The limits of a model that can generate.

    Raises:
        ConfigurationError: the model lacks a method of ``PROTOCOL``, or is no language model.
    """
    if missing := [name for name in PROTOCOL if not hasattr(model, name)]:
        raise ConfigurationError(
            f"the model has no {' and no '.join(missing)}: to generate, it needs the methods "
            f"{', '.join(PROTOCOL)} (docs/generation.md)."
        )
    if isinstance(model, GPT):
        model.config.check_language_model("generation")
    vocabulary = model.config.vocab_size if isinstance(model, GPT) else _IDS
    return Limits(getattr(model, "context_length", math.inf), vocabulary)


def checked_prompts(prompts: Iterable[ArrayLike], vocabulary: int) -> list[Int[np.ndarray, " prompt"]]:
    """Prompts as int32 vectors.

    Raises:
        ConfigurationError: there is no prompt, or one is empty, no vector of integers, or has an id that is
            not in ``[0, vocabulary)``.
    """
    rows = list(map(_as_array, prompts))
    if not rows:
        raise ConfigurationError("there is no prompt: give one or more vectors of token ids.")
    for number, row in enumerate(rows):
        if row.ndim != 1 or not row.size or not np.issubdtype(row.dtype, np.integer):
            raise ConfigurationError(
                f"prompt {number} has shape {row.shape} and dtype {row.dtype}: a prompt is a vector of at "
                "least one token id."
            )
        if other := [end for end in (int(row.min()), int(row.max())) if not 0 <= end < vocabulary]:
            raise ConfigurationError(
                f"prompt {number} has the token id {other[0]}: ids are from 0 to {vocabulary - 1:,}."
            )
    return [row.astype(np.int32) for row in rows]


def _as_array(prompt: ArrayLike) -> np.ndarray:
    """A prompt as an array. Rows of different lengths give an array of objects, which is no vector."""
    try:
        return np.asarray(prompt)
    except ValueError:
        return np.empty((), object)


def checked_stop(stop: Stop) -> tuple[tuple[int, ...], ...]:
    """The ends of a row, each as tokens in their order; () for None. Other values are refused."""
    if stop is None:
        return ()
    try:
        found = tuple(tuple(map(operator.index, _several(end))) for end in _several(stop))
    except TypeError:
        found = ((),)
    if any(not end or not 0 <= min(end) <= max(end) < _IDS for end in found):
        raise ConfigurationError(
            f"stop={stop!r}: give a token, or a list of tokens and of tuples of tokens in their order."
        )
    return found


def _several(value: Any) -> Iterable[Any]:
    return value if isinstance(value, Iterable) else [value]


def check_limits(rows: Sequence[np.ndarray], limits: Sequence[int], context: float, least: int) -> None:
    """Refuse limits of new tokens below ``least``, and prompts that with their limit exceed the context."""
    for number, (row, limit) in enumerate(zip(rows, limits, strict=True)):
        if limit < least:
            raise ConfigurationError(f"max_new_tokens={limit} must be at least {least}.")
        if len(row) + limit > context:
            raise ConfigurationError(
                f"prompt {number} has {len(row)} tokens, and {limit} more would exceed the model's "
                f"context of {int(context)}: shorten it, or lower max_new_tokens."
            )
