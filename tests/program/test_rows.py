"""Leaves whose owners have whole rows, from stage 3 to stage 0 and back: each row stays where it is."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.natural import from_natural, to_natural

DELTA = {"weights": "fp32", "weights_delta": True, "hpz": True}


def state_of(zero: dict, seed: int) -> zerojax.TrainState:
    return zerojax.TrainState.create(
        lambda rngs: nnx.Linear(8, 3, use_bias=False, rngs=rngs),
        optax.sgd(0.1),
        lambda model, batch: model(batch).mean(),
        mesh=zerojax.make_mesh(2, 4),
        zero=zerojax.ZeroConfig(compute_dtype="float32", units=(nnx.Linear,), **zero),
        seed=seed,
    )


@pytest.mark.parametrize(
    ("source", "target"),
    [({}, {"stage": 0}), ({"stage": 0}, {}), ({}, DELTA), (DELTA, {"stage": 1})],
    ids=str,
)
def test_rows_keep_their_places(source, target):
    given = state_of(source, 0)
    wanted = zerojax.gather_params(given)["kernel"]
    tree = to_natural(given)
    np.testing.assert_array_equal(tree["params"]["kernel"], wanted)
    if "weights_delta" in source:
        np.testing.assert_array_equal(tree.pop("secondary")["kernel"], wanted)
    moved = from_natural(state_of(target, 1), tree)
    np.testing.assert_array_equal(zerojax.gather_params(moved)["kernel"], wanted)
    for copy in jax.tree.leaves(moved.secondary):
        np.testing.assert_array_equal(np.asarray(copy).reshape(wanted.shape), wanted)
