"""One step of a language model against SGD on a plain loss of the whole batch."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.models import GPT, GPTConfig, lm_loss


def check_step(
    config: GPTConfig,
    batch: Any,
    plain_loss: Callable[[GPT], jax.Array],
    *,
    tokens: int,
    order: Literal["depth", "breadth"] = "depth",
) -> None:
    """Train on three devices with two micro-batches, and compare the loss and the weights.

    Args:
        config: of the model.
        batch: for ``lm_loss``.
        plain_loss: the mean over all tokens that count, of an unsharded model.
        tokens: how many count.
        order: of the micro-batches.
    """
    state = zerojax.TrainState.create(
        lambda rngs: GPT(config, rngs=rngs),
        optax.sgd(1.0),
        lm_loss,
        mesh=zerojax.make_mesh(1, 3),
        zero=zerojax.ZeroConfig(accumulate=2, accumulate_order=order, compute_dtype="float32"),
    )
    model = zerojax.gather_model(state)
    expected, gradients = nnx.jit(nnx.value_and_grad(plain_loss))(model)
    moved = nnx.to_pure_dict(jax.tree.map(lambda x, g: x - g, nnx.state(model, nnx.Param), gradients))
    state, metrics = zerojax.train_step(state, batch)
    assert float(metrics["tokens"]) == tokens
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=2e-5),
        zerojax.gather_params(state),
        moved,
    )
