"""What the backward pass does again: it computes what ``remat`` says, and always gathers."""

import re
from collections.abc import Callable
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import WIDTH, Block, regression_batch, squared_error
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

import zerojax
from zerojax import aot
from zerojax.matmul.low_rank import LowRankOperand
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


def state_of(layers: int, mesh: Mesh | None = None, **zero: Any) -> zerojax.TrainState:
    return zerojax.TrainState.abstract(
        lambda rngs: Model(rngs, layers),
        optax.sgd(0.1),
        squared_error,
        mesh=mesh or zerojax.make_mesh(2, 1),
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


@pytest.mark.parametrize("layers", [0, 1], ids=["unit", "one layer"])
def test_gathers_of_both_passes_are_not_merged(layers):
    """Merged, they would keep whole weights in between."""
    assert_gathers_are_compiled_as_traced(state_of(layers))


@pytest.mark.slow
def test_gathers_of_two_layers_are_not_merged_for_gpus(cuda_mesh: Callable[[int, int], Mesh]):
    """Two layers have no loop to keep the passes apart; for CPUs the compiler leaves them apart anyway."""
    assert_gathers_are_compiled_as_traced(state_of(2, cuda_mesh(2, 1)), **aot.COMPILER_OPTIONS)


def assert_gathers_are_compiled_as_traced(state: zerojax.TrainState, **options: bool | int | str) -> None:
    traced = [c for c in zerojax.comm_report(state, batch()).collectives if c.primitive == "all_gather"]
    text = str(zerojax.lower_train_step(state, batch()).compile(options).as_text())
    compiled = [c for c in hlo.collectives(text) if c.op == "all-gather"]
    assert sum(c.count for c in compiled) == sum(c.count for c in traced) > 0


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
