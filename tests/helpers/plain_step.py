"""A step of a decoder against plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from core_models import begun
from flax import nnx
from plain_loop import distance

import zerojax
from zerojax.models import GPT, GPTConfig, lm_loss

RATE = 0.5


def begin(
    config: GPTConfig, mesh: tuple[int, int], tx: optax.GradientTransformation, **zero: Any
) -> zerojax.TrainState:
    """A state in fp32 whose weights NumPy draws: to compile a model's own takes as long as its step."""
    state = zerojax.TrainState.abstract(
        lambda rngs: GPT(config, rngs=rngs),
        tx,
        lm_loss,
        mesh=zerojax.make_mesh(*mesh),
        zero=zerojax.ZeroConfig(compute_dtype="float32", **zero),
    )
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)

    def draw(path: Any, weight: jax.ShapeDtypeStruct) -> np.ndarray:
        mean = "scale" in jax.tree_util.keystr(path)
        return mean + config.init_std * rng.standard_normal(weight.shape, np.float32)

    weights = jax.tree.map_with_path(draw, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return begun(state, weights)


def check_step(config: GPTConfig, mesh: tuple[int, int], batch: Any, **zero: Any) -> None:
    """Check that a step of gradient descent moves the weights along the gradient of plain JAX."""
    state = begin(config, mesh, optax.sgd(RATE), **zero)
    model, before = zerojax.gather_model(state), zerojax.gather_params(state)
    model.train()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: nnx.State) -> jax.Array:
        return lm_loss(nnx.merge(graph, params, rest), jax.tree.map(jnp.asarray, batch))[0]

    gradients = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params))
    state, _ = zerojax.train_step(state, batch)
    change = jax.tree.map(lambda x, y: (y - x) / -RATE, before, zerojax.gather_params(state))
    assert distance(change, gradients) < 2e-5
