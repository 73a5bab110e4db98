"""One training step of a decoder on a mesh, beside plain JAX on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from plain_loop import distance

import zerojax
from zerojax.models import GPT, GPTConfig, lm_loss


def packed_batch(config: GPTConfig) -> dict[str, np.ndarray]:
    """Rows of three documents."""
    numbers = np.sort(np.random.default_rng(1).integers(0, 3, (24, 21), dtype=np.int32), axis=1)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (24, 21), dtype=np.int32)
    return {"tokens": tokens, "segments": numbers}


def distance_of_a_step(config: GPTConfig, mesh: tuple[int, int], options: dict[str, Any]) -> float:
    """How far the change by a step of SGD in fp32 is from the gradient that plain JAX computes."""
    zero = zerojax.ZeroConfig(compute_dtype="float32", **options)
    state = zerojax.TrainState.create(
        lambda rngs: GPT(config, rngs=rngs), optax.sgd(0.5), lm_loss, mesh=zerojax.make_mesh(*mesh), zero=zero
    )
    batch = packed_batch(config)
    model = zerojax.gather_model(state)
    model.train()
    before = zerojax.gather_params(state)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: nnx.State) -> jax.Array:
        return lm_loss(nnx.merge(graph, params, rest), jax.tree.map(jnp.asarray, batch))[0]

    gradients = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params))
    state, _ = zerojax.train_step(state, batch)
    change = jax.tree.map(lambda x, y: (y - x) / -0.5, before, zerojax.gather_params(state))
    return distance(change, gradients)
