"""Losses of which only some tokens count, against optax on the whole batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sgd_step import check_step

from zerojax.errors import ZeroError
from zerojax.models import GPT, GPTConfig, lm_loss

VOCAB, ROWS, TIME = 23, 12, 9
CONFIG = GPTConfig(
    vocab_size=VOCAB, layers=1, d_model=16, heads=4, max_seq_len=16, init_std=0.3, positions="rope"
)


def draw() -> dict[str, np.ndarray]:
    """Two documents in each row; the numbers of tokens that count differ, and rows 2 and 3 have none."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, TIME + 1)).astype(np.int32)
    segments = np.where(np.arange(TIME + 1) < 4, 1, 2).astype(np.int32) * np.ones((ROWS, 1), np.int32)
    counted = rng.random((ROWS, TIME + 1)) < np.linspace(0, 1, ROWS)[:, None]
    counted[2:4] = False
    return {"tokens": tokens, "segments": segments, "labels": np.where(counted, tokens, -1)}


def plain_loss(model: GPT, batch: Any) -> jax.Array:
    """The mean over all tokens that count and follow one of their document."""
    tokens, segments = jnp.asarray(batch["tokens"]), jnp.asarray(batch["segments"])
    scores = model(tokens[:, :-1], segments=segments[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
    counted = (jnp.asarray(batch["labels"])[:, 1:] >= 0) & (segments[:, 1:] == segments[:, :-1])
    return jnp.sum(losses * counted) / jnp.sum(counted)


def test_the_mean_is_over_the_tokens_that_count_in_the_whole_batch():
    batch = draw()
    counted = (batch["labels"][:, 1:] >= 0) & (batch["segments"][:, 1:] == batch["segments"][:, :-1])
    check_step(CONFIG, batch, lambda model: plain_loss(model, batch), tokens=counted.sum())


def test_labels_of_another_shape_are_refused():
    tokens = jnp.zeros((2, 9), int)
    model = nnx.eval_shape(lambda: GPT(CONFIG, rngs=nnx.Rngs(0)))
    with pytest.raises(ZeroError, match=r'"labels" has shape \(2, 8\), but "tokens" \(2, 9\)'):
        lm_loss(model, {"tokens": tokens, "labels": tokens[:, 1:]})
