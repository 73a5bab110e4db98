"""The host never waits in a step: nothing in the program calls back, ``train_step`` reads no result."""

import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.sharding.mesh import BY_ROWS
from zerojax.train.step import trace_train_step

WIDTH = 768
HOST_CALL = re.compile(r"\b(\w*callback|debug_print|infeed|outfeed)\b")


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.up(x))


def loss_fn(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def talking_loss(model, batch):
    loss = loss_fn(model, batch)
    jax.debug.print("loss {}", loss)
    return loss


def stack(layers):
    return lambda rngs: zerojax.Stack(Block, layers, rngs=rngs)


def traced_text(loss, preset):
    mesh = zerojax.make_mesh(2, 2)
    zero = zerojax.ZeroConfig.preset(preset, accumulate=2)
    state = zerojax.TrainState.abstract(stack(2), optax.adamw(1e-3), loss, mesh=mesh, zero=zero)
    batch = {"x": jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)}
    return str(trace_train_step(state, batch).jaxpr)


@pytest.mark.parametrize("preset", ["zero3", "zero++", "delta"])
def test_the_program_calls_nothing_on_the_host(preset):
    assert not HOST_CALL.search(traced_text(loss_fn, preset))


def test_a_call_to_the_host_would_be_seen():
    assert HOST_CALL.search(traced_text(talking_loss, "zero3"))


def prepared(nodes, rows):
    """A state of a mesh of single devices, after one step, and a batch that takes a while."""
    mesh = zerojax.make_mesh(nodes, 1)
    zero = zerojax.ZeroConfig(compute_dtype="float32")
    state = zerojax.TrainState.create(stack(4), optax.adamw(1e-3), loss_fn, mesh=mesh, zero=zero)
    program = state.spec
    x = np.ones((rows, WIDTH), np.float32)
    batch = {"x": jax.device_put(x, program.sharding(BY_ROWS))}
    return jax.block_until_ready(zerojax.train_step(state, batch))[0], batch


def test_steps_are_queued_before_earlier_ones_are_done():
    state, batch = prepared(nodes=1, rows=2048)
    with jax.transfer_guard("disallow"):
        begun = time.perf_counter()
        state, _ = zerojax.train_step(state, batch)
        state, metrics = zerojax.train_step(state, batch)
        loss: Any = metrics["loss"]
        queued, waiting = time.perf_counter() - begun, not loss.is_ready()
    jax.block_until_ready((state, metrics))
    assert waiting, "the last step's loss was there when train_step returned"
    assert queued < 0.5 * (time.perf_counter() - begun)


def test_emulated_devices_finish_a_step_before_the_next_begins():
    """XLA:CPU hangs once 32 programs of a device wait."""
    state, metrics = zerojax.train_step(*prepared(nodes=2, rows=512))
    assert all(x.is_ready() for x in jax.tree.leaves((state, metrics)))
