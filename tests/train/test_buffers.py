"""Floating-point state between steps: equal on all devices it keeps its bits, else it becomes the mean."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax

MESH = (3, 2)  # a sum of six equal numbers rounds
DTYPES = (np.float32, np.float16, jnp.bfloat16, np.complex64)


def constants(dtype: Any) -> np.ndarray:
    """Numbers whose sums round or overflow, or that are none."""
    largest = float(jnp.finfo(np.float32 if dtype is np.complex64 else dtype).max)
    special = [0.1, -0.1, -0.0, largest, -largest, np.inf, -np.inf, np.nan]
    return np.array([*special, *np.random.default_rng(0).normal(size=40)], dtype)


def of_device(dtype: Any) -> np.ndarray:
    """What each device computes, in rows: both extremes, whose sum would overflow, and equal numbers."""
    values = np.random.default_rng(1).normal(size=(6, 8)).astype(np.float32)
    values[:, 0] = 0.1
    values[:, 1] = float(jnp.finfo(dtype).max) * np.array([1, 1, 1, 1, 1, 0.5])
    values[:, 2] = float(jnp.finfo(dtype).max) * np.array([-1, -1, -1, -1, 1, 1])
    return values


class Block(nnx.Module):
    """Keeps constants, and what it computes of its rows."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.constants = nnx.Dict({np.dtype(d).name: nnx.Variable(jnp.array(constants(d))) for d in DTYPES})
        own = {np.dtype(d).name: nnx.Variable(jnp.zeros(8, d)) for d in DTYPES[:3]}
        self.computed = nnx.Dict(own)

    def __call__(self, x, values):
        for name, variable in self.computed.items():
            variable.set_value(values[name][0].astype(variable.dtype))
        return self.linear(x)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.block = Block(rngs)
        self.table = nnx.Variable(jnp.array(constants(np.float32)))

    def __call__(self, x, values):
        return self.block(x, values)


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean(model(batch["x"], batch["values"]) ** 2)


def create(accumulate: int = 1, order: Any = "depth") -> zerojax.TrainState:
    zero = zerojax.ZeroConfig(
        compute_dtype="float32", units=(Block,), accumulate=accumulate, accumulate_order=order
    )
    return zerojax.TrainState.create(Model, optax.sgd(0.1), loss, mesh=zerojax.make_mesh(*MESH), zero=zero)


def batch(repeats: int) -> dict[str, Any]:
    """A row per device and micro-batch, of which all of a device are the same."""
    values = {np.dtype(d).name: np.repeat(of_device(d), repeats, axis=0) for d in DTYPES[:3]}
    return {"x": np.ones((6 * repeats, 4), np.float32), "values": values}


@pytest.mark.parametrize(("accumulate", "order"), [(1, "depth"), (3, "breadth"), (3, "depth")])
def test_equal_buffers_keep_their_bits_and_others_become_the_mean(accumulate, order):
    state = create(accumulate, order)
    state, _ = zerojax.train_step(state, batch(accumulate))
    state, metrics = zerojax.train_step(state, batch(accumulate))
    assert not metrics["skipped"]
    for dtype in DTYPES:
        name = np.dtype(dtype).name
        found = np.asarray(state.model_state[f"block/constants/{name}"])
        assert found.tobytes() == constants(dtype).tobytes(), name
    for dtype in DTYPES[:3]:
        found = np.asarray(state.model_state[f"block/computed/{np.dtype(dtype).name}"])
        values = of_device(dtype).astype(dtype)
        wanted = np.mean(values.astype(np.float64), axis=0)
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2 * jnp.finfo(dtype).eps)
        assert found[0] == values[0, 0], "equal elements of an array that differs keep their bits, too"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_no_code_assigns_is_not_sent(accumulate):
    report = zerojax.comm_report(create(accumulate), batch(accumulate))
    sent = sum(c.count * c.elements for c in report.collectives if c.phase == "metrics")
    # Of the block's state, which comes out of the unit as results: the sum, the largest and the smallest
    # value of four constants, one of which is complex, and of three computed vectors. Two sums of the loss.
    assert sent == 3 * (5 * 48 + 3 * 8) + 2
