"""Weights put into a state: everything that a step reads of them is theirs."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from core_models import CASES
from plain_loop import by_path, plain_model

import zerojax

DELTA = {"weights": "int4", "weights_delta": True, "hpz": True, "block_size": 64}


CHANGES = {
    "put_params": lambda state, given: zerojax.put_params(state, jax.tree.map(lambda x: -100 * x, given)),
    "with_params": lambda state, _: state.with_params(jax.tree.map(lambda x: -100 * x, state.params)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_secondary_copies_are_of_the_weights_that_were_put(change):
    """Copies of other weights would be brought up to date in the difference's few bits only."""
    case, given = CASES["stack"], plain_model("stack").weights
    state = case.start(optax.sgd(0.1), given, nodes=2, local=2, local_weights="bf16", **DELTA)
    kept = dataclasses.replace(state, seed=state.seed)
    assert kept.replicas is state.replicas
    state = CHANGES[change](state, given)
    params, replicas = by_path(state.params), {path: copy.values for path, copy in state.replicas.items()}
    assert params.keys() == replicas.keys()
    for path, copy in replicas.items():
        master = np.asarray(params[path]).reshape(copy.shape).astype(copy.dtype)
        np.testing.assert_array_equal(np.asarray(copy), master, err_msg=str(path))
