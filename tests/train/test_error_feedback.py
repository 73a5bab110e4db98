"""Error feedback in training: what the node hop's rounding loses in one step, later steps make up for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import Case, SlopeLayer, slope_loss
from flax import nnx

import zerojax
from zerojax.optim.shard_check import OnLayout

SIZE, STEPS = 128, 24


class Model(nnx.Module):
    """The layer on its own, and in a stack."""

    def __init__(self, rngs: nnx.Rngs):
        self.one = SlopeLayer(SIZE, rngs=rngs)
        self.stack = zerojax.Stack(partial(SlopeLayer, SIZE), 2, rngs=rngs)

    def __call__(self, slope: jax.Array) -> jax.Array:
        x = self.one(jnp.zeros(len(slope)), slope)
        return self.stack(x, slope)


def slopes(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    return {"slope": rng.standard_normal((rows, SIZE)).astype(np.float32)}


CASE = Case(Model, slope_loss, (SlopeLayer,), slopes)


SGD = optax.sgd(1.0)
WHOLE = OnLayout(lambda *_: SGD, whole=lambda _: True)
"""As an optimizer that needs weights whole: their gradients' sums are encoded as well."""


@pytest.mark.parametrize(("tx", "feedback"), [(SGD, True), (SGD, False), (WHOLE, True)])
def test_errors_do_not_add_up(tx, feedback):
    """The sum of equal steps is off by one step's rounding; without feedback by as many as there were."""
    zero = {"grads": ("fp32", "int2"), "grad_sync": "step", "error_feedback": feedback, "block_size": 64}
    state = CASE.begin(tx, nodes=2, local=1, weights="int2" if tx is WHOLE else None, **zero)
    (batch,) = CASE.batches(2, 1)
    exact = batch["slope"].mean(0)
    errors, moved = [], np.zeros(0)
    for step in range(1, STEPS + 1):
        state, _ = zerojax.train_step(state, batch)
        weights = [x.reshape(-1, SIZE) for x in jax.tree.leaves(zerojax.gather_params(state))]
        moved = -np.concatenate(weights)
        errors.append(np.abs(moved - step * exact).max())
    assert moved.shape == (3, SIZE)
    one_rounding = np.abs(batch["slope"]).max()  # int2 has no code between zero and a block's largest value
    assert (max(errors) < 2 * one_rounding) == feedback, errors
