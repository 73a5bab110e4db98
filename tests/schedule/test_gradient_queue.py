"""Gradients of micro-batches are summed in fp32, whatever the model is computed in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import slope_case

from zerojax.train.step import gradients

MICRO, SMALL = 8, 2.0**-9


@pytest.mark.parametrize(("stage", "order"), [(0, "depth"), (1, "depth"), (3, "depth"), (3, "breadth")])
def test_small_gradients_count_beside_a_large_one(stage, order):
    """In bf16 one and 2**-9 are one; so a sum may be rounded once, on its way, but not after each term."""
    zero = {"stage": stage, "compute_dtype": "bfloat16", "accumulate": MICRO, "accumulate_order": order}
    state = slope_case(4).create(optax.sgd(0.0), nodes=1, local=1, **zero)
    slope = np.full((MICRO, 4), SMALL, np.float32)
    slope[0] = 1
    (found,) = jax.tree.leaves(gradients(state, {"slope": slope.astype(jnp.bfloat16)}))
    wanted = (1 + 7 * SMALL) / MICRO
    np.testing.assert_allclose(np.asarray(found).reshape(-1)[:4], wanted, rtol=2.0**-8)
