"""What the backward pass does again: it computes what ``remat`` says, and always gathers."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import WIDTH, Block, regression_batch, squared_error
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import zerojax
from zerojax.matmul.lora import LowRankOperand
from zerojax.matmul.replay import at_matmuls
from zerojax.schedule.remat import rematerialised
from zerojax.train.step import trace_train_step

MICRO = {"accumulate": 2, "accumulate_order": "breadth"}


class Attending(Block):
    """Two matmuls, of which the first's result is named as that of an attention is."""

    def __call__(self, x: jax.Array) -> jax.Array:
        named = checkpoint_name(self.up(x), "attention")
        return x + jnp.sin(self.down(jnp.sin(named)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, layers: int):
        self.inner = zerojax.Stack(Attending, layers, rngs=rngs) if layers else Attending(rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.inner(x))


def state_of(layers: int, **zero: Any) -> zerojax.TrainState:
    return zerojax.TrainState.abstract(
        lambda rngs: Model(rngs, layers),
        optax.sgd(0.1),
        squared_error,
        mesh=zerojax.make_mesh(2, 1),
        zero=zerojax.ZeroConfig(units=(Attending,), compute_dtype="float32", **zero),
    )


def batch() -> dict[str, np.ndarray]:
    return regression_batch(np.random.default_rng(0), 8)


def matmuls(layers: int, remat: str, **zero: Any) -> int:
    """In the traced step, where nothing is left out or merged yet."""
    traced = trace_train_step(state_of(layers, remat=remat, **zero), batch())
    return len(re.findall(r"\bdot_general\[", str(traced.jaxpr)))


@pytest.mark.parametrize("layers", [0, 3], ids=["unit", "stack"])
@pytest.mark.parametrize("order", [{}, MICRO], ids=["one", "breadth"])
def test_more_is_computed_again_the_less_is_kept(layers, order):
    none, attention, full = (matmuls(layers, remat, **order) for remat in ("none", "attention", "full"))
    assert none < attention < full


@pytest.mark.parametrize("layers", [0, 1, 2], ids=["unit", "one layer", "two layers"])
def test_gathers_of_both_passes_are_not_merged(layers):
    """Merged, they would keep whole weights in between. Two layers have no loop to keep them apart."""
    state = state_of(layers)
    traced = [c for c in zerojax.comm_report(state, batch()).collectives if c.primitive == "all_gather"]
    compiled = zerojax.lower_train_step(state, batch()).compile().as_text()
    assert compiled is not None
    assert len(re.findall(r" all-gather(?:-start)?\(", compiled)) == sum(c.count for c in traced)


def test_a_product_with_an_adapter_is_kept_once():
    """Its two parts are as large as their sum, which the backward pass reads."""

    def body(weights, x):
        a, b = weights[1:]
        weight = LowRankOperand.of(weights[0], a, b, jnp.uint32(0), zerojax.LoRA(rank=2), "w")
        return at_matmuls(lambda whole, x: jnp.sin(x @ whole[0]))((weight,), x)

    shapes = [(8, 16), (8, 2), (2, 16), (5, 8)]
    *weights, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    run = rematerialised(body, "none")
    kept = jax.tree.leaves(jax.eval_shape(lambda weights, x: jax.vjp(run, weights, x)[1], weights, x))
    assert [residual.shape for residual in kept].count((5, 16)) == 1
