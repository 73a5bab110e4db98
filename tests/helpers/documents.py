"""Packed documents against documents alone."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from zerojax.models import GPT


def check_documents(model: GPT, tokens: jax.Array, bounds: Sequence[Sequence[int]]) -> jax.Array:
    """Check that packed documents have the logits that they have alone.

    Alone, each document is the begin of a row: one program computes all of them, whatever their lengths.

    Args:
        model: the model.
        tokens: ``[rows, time]``.
        bounds: of each row, where its documents begin, and the last one's end.

    Returns:
        The logits of the rows without documents, fp32 ``[rows, time, vocabulary]``.
    """
    rows, time = tokens.shape
    places = [(row, *ends) for row, own in enumerate(bounds) for ends in itertools.pairwise(own)]
    alone = [jnp.pad(tokens[row, first:last], (0, time - last + first)) for row, first, last in places]
    numbers = jnp.array([np.searchsorted(own[1:], np.arange(time), "right") for own in bounds])
    run = nnx.jit(lambda model, tokens, segments: model(tokens, segments=segments))
    packed, every = run(model, tokens, numbers), run(model, jnp.stack([*tokens, *alone]), None)
    for (row, first, last), logits in zip(places, every[rows:], strict=True):
        np.testing.assert_allclose(packed[row, first:last], logits[: last - first], atol=2e-5)
    return every[:rows]
