"""Predictions of a sharded model are those of the plain one, row by row."""

import jax
import numpy as np
import optax
import pytest
from core_models import CASES
from flax import nnx
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import LoRA, ZeroError
from zerojax.models import GPT
from zerojax.sharding.mesh import BY_ROWS

CASE = CASES["gpt-tied"]


def outputs(model: GPT, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    hidden = model.hidden(batch["tokens"][:, :-1])
    return {"hidden": hidden, "scaled": hidden.mean((1, 2)) * batch["scale"]}


def create(lora: LoRA | None = None, **zero) -> zerojax.TrainState:
    frozen = ("*",) if lora else ()
    return zerojax.TrainState.create(
        CASE.model, optax.sgd(0.5), CASE.loss, mesh=zerojax.make_mesh(2, 2, devices=jax.devices()[:4]),
        zero=zerojax.ZeroConfig(compute_dtype="float32", frozen=frozen, **zero), lora=lora,
    )  # fmt: skip


@pytest.fixture
def batch():
    return {**CASE.batches(8, 1)[0], "scale": 2.0}


@pytest.mark.parametrize(
    "zero", [{}, pytest.param({"weights_delta": True, "hpz": True}, marks=pytest.mark.slow)]
)
def test_rows_come_back_in_their_order(batch, zero):
    state = create(**zero)
    for _ in range(1 + bool(zero)):
        found = zerojax.predict_step(state, batch, outputs)
        plain = outputs(zerojax.gather_model(state), batch)
        for name, x in found.items():
            assert x.sharding == state.spec.sharding(BY_ROWS)
            # Delta's copies follow the weights with an error.
            np.testing.assert_allclose(x, plain[name], atol=1e-5 if not zero else 0.05)
        if zero:
            state, _ = zerojax.train_step(state, {"tokens": batch["tokens"]})


def test_rows_on_a_mesh_of_the_callers(batch):
    """The same devices in the same order, so nothing is copied; but a program has one mesh."""
    rows = jax.sharding.NamedSharding(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), P("data"))
    theirs = batch | {"tokens": jax.device_put(batch["tokens"], rows)}
    found, wanted = (zerojax.predict_step(create(), own, outputs)["hidden"] for own in (theirs, batch))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_without_adapters_the_base_predicts(batch):
    state = create(LoRA(rank=2, targets=("*kernel",)))
    first = zerojax.predict_step(state, batch, outputs)
    # B begins at 0, and with it what the adapters add.
    rng = np.random.default_rng(0)
    state = state.replace(
        params=jax.tree.map(
            lambda x: jax.device_put(rng.standard_normal(x.shape, np.float32), x.sharding), state.params
        )
    )
    base = zerojax.predict_step(state, batch, outputs, adapters=False)
    jax.tree.map(np.testing.assert_array_equal, base, first)
    adapted = zerojax.predict_step(state, batch, outputs)
    np.testing.assert_allclose(
        adapted["hidden"], outputs(zerojax.gather_model(state), batch)["hidden"], atol=1e-5
    )
    assert not np.allclose(adapted["hidden"], base["hidden"], atol=1e-3)


def test_what_cannot_be_predicted_is_refused(batch):
    state = create()
    with pytest.raises(ZeroError, match="adapters=False: the state has no adapters"):
        zerojax.predict_step(state, batch, outputs, adapters=False)
    with pytest.raises(ZeroError, match=r"shape \(\) for a batch of 2 rows a device"):
        zerojax.predict_step(state, batch, lambda model, batch: model.hidden(batch["tokens"][:, :-1]).sum())
    with pytest.raises(ZeroError, match="not a positive multiple of 4"):
        zerojax.predict_step(state, {"tokens": batch["tokens"][:6]}, outputs)
    with pytest.raises(ZeroError, match="fn returned 'str' among its results"):
        zerojax.predict_step(state, batch, lambda model, batch: outputs(model, batch) | {"name": "x"})


def test_a_unit_is_not_read_outside_of_its_call(batch):
    def read(model: GPT, batch: dict[str, jax.Array]) -> jax.Array:
        weights = jax.tree.leaves(nnx.state(model.blocks))
        return batch["tokens"] * weights[0].sum()

    with pytest.raises(ZeroError):
        zerojax.predict_step(create(), batch, read)
