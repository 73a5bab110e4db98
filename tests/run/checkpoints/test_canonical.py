"""The canonical form of a state: rows that stay in place, arrays that belong to a mesh, missing kinds."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.errors import ZeroError
from zerojax.run.checkpoints.canonical import from_canonical, to_canonical

DELTA = {"weights": "fp32", "weights_delta": True, "hpz": True}
PADDED = {"grads": ("int8", "int8")}


def state_of(zero: dict[str, Any], seed: int, tx: Any = None, width: int = 3) -> zerojax.TrainState:
    return zerojax.TrainState.create(
        lambda rngs: nnx.Linear(8, width, use_bias=False, rngs=rngs),
        tx or optax.sgd(0.1),
        lambda model, batch: model(batch).mean(),
        mesh=zerojax.make_mesh(2, 4),
        zero=zerojax.ZeroConfig(compute_dtype="float32", units=(nnx.Linear,), **zero),
        seed=seed,
    )


@pytest.mark.parametrize(
    ("source", "target"),
    [({}, {"stage": 0}), ({"stage": 0}, {}), ({}, DELTA), (DELTA, {"stage": 1}), ({}, PADDED), (PADDED, {})],
    ids=str,
)
def test_rows_keep_their_places(source, target):
    given = state_of(source, 0)
    wanted = zerojax.gather_params(given)["kernel"]
    tree = to_canonical(given)
    np.testing.assert_array_equal(tree["params"]["kernel"], wanted)
    if "weights_delta" in source:
        np.testing.assert_array_equal(tree.pop("secondary")["kernel"], wanted)
    moved = from_canonical(state_of(target, 1), tree)
    np.testing.assert_array_equal(zerojax.gather_params(moved)["kernel"], wanted)
    for copy in jax.tree.leaves(moved.replicas):
        np.testing.assert_array_equal(np.asarray(copy).reshape(wanted.shape), wanted)


def test_a_leaf_that_another_state_has_cut_elsewhere():
    given = state_of({}, 0, width=4)
    wanted = zerojax.gather_params(given)["kernel"]
    columns = jax.sharding.PartitionSpec(None, "local")
    tree = to_canonical(given)
    tree["params"]["kernel"] = jax.device_put(tree["params"]["kernel"], given.spec.sharding(columns))
    moved = from_canonical(state_of({}, 1, width=4), tree)
    np.testing.assert_array_equal(zerojax.gather_params(moved)["kernel"], wanted)


def test_what_error_feedback_remembers_goes_on_with_its_mesh():
    feedback = {"grads": ("fp32", "int4"), "grad_sync": "step", "error_feedback": True}
    state, _ = zerojax.train_step(state_of(feedback, 0), np.linspace(-1, 1, 64, dtype="f4").reshape(8, 8))
    wanted = np.asarray(state.residual["kernel"])
    assert wanted.any()
    moved = from_canonical(state_of(feedback, 1), to_canonical(state))
    np.testing.assert_array_equal(moved.residual["kernel"], wanted)


def test_an_average_is_a_kind_of_its_own_and_begins_anew_where_there_is_none():
    plain, averaging = optax.adam(0.1), optax.chain(optax.adam(0.1), zerojax.average_weights(0.5))
    tree = to_canonical(state_of({}, 0, averaging))
    assert tree["average"].keys() == {"count", "params"}
    without = to_canonical(state_of({}, 0, optax.chain(plain, optax.identity())))
    assert "average" not in without
    moved = from_canonical(state_of({}, 1, averaging), without)
    np.testing.assert_array_equal(to_canonical(moved)["average"]["count"], 0)
    for found, wanted in zip(
        jax.tree.leaves(moved.params), jax.tree.leaves(state_of({}, 0).params), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("lost", ["params", "optimizer"])
def test_a_tree_that_lacks_what_the_program_has_is_refused(lost):
    state = state_of({}, 0, optax.adam(0.1))
    tree = to_canonical(state)
    del tree[lost]
    with pytest.raises(ZeroError, match=f"lacks {lost}/.*it is of another model or optimizer"):
        from_canonical(state, tree)
