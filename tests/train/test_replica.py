"""With a copy of the weights in every node passes give the same numbers, and send none between nodes."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from core_models import CASES, Case
from fp8_models import fp8_case
from mesh_axes import axes_used

import zerojax
from zerojax import LoRA
from zerojax.models import GPT
from zerojax.train import step
from zerojax.train.memory import device_bytes
from zerojax.train.replica import replica_bytes
from zerojax.zero_config.config import Preset

ADAM = optax.adam(0.1)  # one for all, which is checked once with each model
CHOICES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero++": {"preset": "zero++"},
    "delta": {"preset": "delta"},
    "int8 in the node": {"weights": "int8", "local_weights": "int8", "hpz": True},
    "adapters": {"frozen": ("*",), "frozen_weights": "int8", "frozen_spread": "world"},
}


def subset(choices: Iterable[str], *always: str) -> list[Any]:
    """All choices, of which those not named are slow tests."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.slow) for name in choices]


def create(
    nodes: int, local: int, preset: Preset = "zero3", case: Case = CASES["stack"], **zero
) -> zerojax.TrainState:
    lora = LoRA(rank=2, targets=("*kernel",)) if "frozen" in zero else None
    plain = {"compute_dtype": "float32", "rounding": "nearest", "rotation": 0}  # compiled in less time
    options = zerojax.ZeroConfig.preset(preset, **plain | zero)
    mesh = zerojax.make_mesh(nodes, local, devices=jax.devices()[: nodes * local])
    return zerojax.TrainState.create(case.model, ADAM, case.loss, mesh=mesh, zero=options, lora=lora)


def outputs(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return model.hidden(batch["tokens"][:, :-1]) if isinstance(model, GPT) else model(batch["x"])


def axes(state: zerojax.TrainState, batch: dict[str, np.ndarray]) -> set[str]:
    """The mesh axes that a prediction uses."""
    predict = functools.partial(step._predict, fn=outputs, adapters=True)
    return set(axes_used(jax.make_jaxpr(predict)(state, batch).jaxpr))


STEPS: dict[str, dict[str, Any]] = {name: CHOICES[name] | {"accumulate": 2} for name in CHOICES} | {
    "delta, one micro-batch": {"preset": "delta"},
    "delta, breadth": {"preset": "delta", "accumulate": 2, "accumulate_order": "breadth"},
    "delta, fp8": {"preset": "delta", "matmul_dtype": "fp8"},
    "zero++, fp8": {"preset": "zero++", "matmul_dtype": "fp8"},
}


def case_of(name: str) -> Case:
    return fp8_case("stack") if "fp8" in name else CASES["gpt-tied" if name == "zero3" else "stack"]


@functools.cache
def trained(name: str) -> zerojax.TrainState:
    """After one step; not to be donated."""
    state = create(2, 2, case=case_of(name), **STEPS[name])
    state, _ = zerojax.train_step(state, case_of(name).batches(8, 1)[0])
    return jax.block_until_ready(state)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_passes_are_the_same_and_send_nothing_between_nodes(name):
    state, later = trained(name), case_of(name).batches(8, 2)[1]
    copied = zerojax.with_replica(state)
    assert zerojax.with_replica(copied) is copied
    assert device_bytes(copied.replicas) == replica_bytes(state.spec)
    assert "node" in axes(state, later)
    assert axes(copied, later) == {"local"}
    one, other = (zerojax.eval_step(x, later)["loss"] for x in (state, copied))
    np.testing.assert_array_equal(one, other)
    one, other = (zerojax.predict_step(x, later, outputs) for x in (state, copied))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", subset(STEPS, "delta", "adapters"))
def test_a_step_from_the_copy_is_the_same_and_sends_gradients_alone(name):
    """Delta's copies afterwards are those of the node's copy."""
    _, second, third = case_of(name).batches(8, 3)
    state = jax.tree.map(jax.numpy.copy, trained(name))
    copied = zerojax.with_replica(jax.tree.map(jax.numpy.copy, state))
    sent, less = (zerojax.comm_report(one, second).phases() for one in (state, copied))
    crossing = {phase for phase, (_, between) in less.items() if between}
    assert sum(between for _, between in sent.values()) > sum(between for _, between in less.values())
    assert crossing <= {"gradients", "metrics", "scales"}
    for batch in (second, third):
        state, expected = zerojax.train_step(state, batch)
        copied, metrics = zerojax.train_step(copied, batch)
        assert not copied.current_replicas
        jax.tree.map(np.testing.assert_array_equal, (copied, metrics), (state, expected))


@pytest.mark.slow
def test_weights_of_fp8_products_that_every_node_has_anyway():
    """Muon's matrices, which the copy leaves out."""
    case = fp8_case("stack")
    tx = zerojax.chain(zerojax.scale_by_muon(), optax.scale_by_learning_rate(0.1))
    state = case.create(tx, nodes=2, local=2, matmul_dtype="fp8")
    (batch,) = case.batches(8, 1)
    copied = zerojax.with_replica(state)
    assert copied.replicas
    assert axes(copied, batch) == {"local"}
    one, other = (zerojax.eval_step(x, batch)["loss"] for x in (state, copied))
    np.testing.assert_array_equal(one, other)


def test_changed_weights_have_no_copy():
    state = zerojax.with_replica(create(2, 2))
    assert state.current_replicas
    assert state.replace(seed=state.seed).replicas
    params = jax.tree.map(jax.numpy.copy, state.params)
    assert not state.replace(params=params).replicas
    with pytest.raises(zerojax.ZeroError, match="other weights than this state computes with"):
        zerojax.train_step(dataclasses.replace(state, params=params), CASES["stack"].batches(8, 1)[0])


@pytest.mark.parametrize(("nodes", "local", "zero"), [(1, 4, {}), (2, 2, {"stage": 0})])
def test_no_copy_is_made_where_no_pass_sends_weights(nodes, local, zero):
    state = create(nodes, local, **zero)
    assert zerojax.with_replica(state) is state
